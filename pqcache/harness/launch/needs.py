"""What a command needs of this machine: the models' configurations, downloads, memory. Offline, and without weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pqcache.harness.config.cells import Cell
from pqcache.harness.config.launch import LocalLaunch
from pqcache.harness.launch import estimate, figures
from pqcache.harness.launch.documents import Counted
from pqcache.harness.run import chunks, models, smoke_models
from pqcache.harness.run.session import task_of_cell
from pqcache.measure.geometries import GEOMETRIES, geometry


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Nothing is downloaded inside: what is not in the caches is not at hand."""
    import datasets
    from huggingface_hub import constants

    settings: Any = datasets.config
    old = constants.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE = old


def config_of(cell: Cell) -> Any:
    """The model's configuration, from the caches or a known geometry. Raises OSError or ValueError if there is none."""
    options = dict(cell.identity["model"])
    name = options.pop("name")
    if cell.run.smoke:
        return smoke_models.model_config(name, options)
    try:
        with offline():
            return models.load_config(name, options)
    except (OSError, ValueError):
        if name in GEOMETRIES:
            known = geometry(name)
            known.dtype = torch.bfloat16  # all of them were published in 16 bits
            return known
        raise


@dataclass(frozen=True)
class Download:
    """Something of the hub that is not in the local cache."""

    what: str
    nbytes: int | None

    @property
    def text(self) -> str:
        return f"{self.what} ({'size unknown' if self.nbytes is None else 'about ' + estimate.words(self.nbytes)})"


def downloads(cells: Sequence[Cell]) -> list[Download]:
    """Weights and data sets that the cells need and the local caches lack."""
    found: dict[str, Download] = {}
    for cell in cells:
        options = dict(cell.identity["model"])
        path = options.get("path")
        if path and not cell.run.smoke and path not in found and not _has_weights(str(path), options["revision"]):
            try:
                config = config_of(cell)
                stored = str(getattr(config, "dtype", None) or "float16").removeprefix("torch.")
                size: int | None = estimate.parameter_count(config) * (4 if stored == "float32" else 2)
            except (OSError, ValueError):
                size = None
            found[str(path)] = Download(str(path), size)
        known = figures.download(task_of_cell(cell))
        if known and known["repo"] not in found and not _has_data(known["repo"], known.get("file")):
            found[known["repo"]] = Download(known["repo"], known["bytes"])
    return list(found.values())


def _has_weights(path: str, revision: str | None) -> bool:
    if Path(path).expanduser().is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    return any(isinstance(try_to_load_from_cache(path, name, revision=revision), str) for name in names)


def _has_data(repo: str, file: str | None) -> bool:
    from huggingface_hub import constants, try_to_load_from_cache

    if file is not None:
        return isinstance(try_to_load_from_cache(repo, file, repo_type="dataset"), str)
    return (Path(constants.HF_HUB_CACHE) / f"datasets--{repo.replace('/', '--')}").is_dir()


def device_of(cell: Cell) -> str:
    """Where the cell computes. With an engine the GPU is a worker's: the driver may have none, or must leave it to them."""
    if cell.spread:
        return estimate.SPREAD
    device = models.pick_device(cell.identity["model"]["device"])
    elsewhere = not isinstance(cell.launch, LocalLaunch)
    return estimate.WORKER if elsewhere and device.startswith("cuda") else device


def memory_of(cell: Cell, counted: Counted, *, measured: bool) -> estimate.Memory | None:
    """The cell's memory at its longest document; None if the model's configuration is not at hand."""
    prompt, new = counted.longest
    try:
        config = config_of(cell)
        dtype = models.dtype_name(config, cell.identity["model"])
        if cell.run.smoke:
            dtype = "bfloat16" if dtype == "bfloat16" else "float32"
        return estimate.memory(
            config,
            cell.method,
            prompt_tokens=prompt,
            new_tokens=new,
            dtype=dtype,
            attn=cell.run.attn,
            measured=measured,
            prefill_chunk=_chunk(cell, config, prompt, dtype),
            batch=batch_of(cell),
        )
    except (OSError, ValueError):
        return None


def batch_of(cell: Cell) -> int:
    """Prompts that the cell computes at once."""
    return int(cell.identity["task"]["batch"] if cell.identity["task"]["name"] == "latency" else cell.run.batch)


def _chunk(cell: Cell, config: Any, tokens: int, dtype: str) -> int | None:
    """`prefill_chunk` of the cell at a prompt of `tokens` tokens, with auto resolved by the memory that is free now."""
    wanted = cell.run.prefill_chunk
    if wanted != "auto":
        return wanted
    there = estimate.device_memory(device_of(cell))
    if there is None:
        return None
    weights = estimate.parameter_count(config) * getattr(torch, dtype).itemsize
    return chunks.fitting_chunk(config, tokens, max(0, there - weights) // batch_of(cell), dtype)
