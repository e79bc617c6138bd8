"""Bytes that a cell needs at most, from its model's configuration: no weights are loaded, and nothing runs.

    need = bound(config, method, prompt_tokens=32000, new_tokens=512, dtype="float16")
    need.on("cuda") <= free("cuda")

Weights and recording are exact, and so are the caches of Full and of methods that evict: theirs follow from the plan. Prefill's
temporaries are counted from the shapes of one layer. A retrieval method's index counts as much as the keys, a codec's cache as
Full's in the model's dtype: they hold less.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import datasets
import psutil
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, PreTrainedConfig

from pqcache.harness.config.cells import Cell
from pqcache.harness.config.options import LocalLaunch
from pqcache.harness.run import models
from pqcache.harness.run.memory import fitting_chunk, free_bytes, group_limit, kept_bytes, prefill_bytes
from pqcache.measure.geometries import published
from pqcache.naming import size
from pqcache.selective import Method, ModelShape
from pqcache.store.buffer import round_up

SPREAD = "several devices"  # of a model with a device map, which accelerate fills when it loads the weights
WORKER = "a worker's device"  # of a run on a cluster, where the driver does not look at its own GPU
ENTRY = 16  # bytes beside K and V of an evictor's entry: its position and its importance


@dataclass(frozen=True)
class Memory:
    """Bytes of one cell at its longest prompt, times the batch."""

    weights: int
    device: int  # the method's cache on the device
    host: int  # and in host memory
    prefill: int  # temporaries of the prompt's forward pass
    exact: bool  # whether the cache is what will really be held

    def on(self, device: str) -> int:
        """Bytes on the device at the worst moment. On a CPU host memory is the same memory."""
        return self.weights + self.device + self.prefill + (self.host if device == "cpu" else 0)

    @property
    def least(self) -> int:
        """Bytes without which the cell cannot end."""
        return self.weights + (self.device if self.exact else 0)


def bound(
    config: PreTrainedConfig,
    method: Method | None,
    *,
    prompt_tokens: int,
    new_tokens: int,
    dtype: str,
    attn: str = "auto",
    prefill_chunk: int | None = None,
    batch: int = 1,
) -> Memory:
    """What one cell needs at a prompt of `prompt_tokens` and an answer of `new_tokens`.

    method: None counts the cache as Full's. dtype: as torch names it, without "torch.". attn: as the top-level key.
    prefill_chunk: tokens that are computed at a time; every layer then holds the whole prompt's K and V until its last chunk.
    batch: prompts of this length at once.
    """
    device, host, exact = cache_bytes(config, method, prompt_tokens, new_tokens, dtype)
    chunk = min(prefill_chunk or prompt_tokens, prompt_tokens)
    if chunk < prompt_tokens or getattr(method, "waits", False):
        device = max(device, kept_bytes(config, prompt_tokens, dtype))
    weights = parameter_count(config) * getattr(torch, dtype).itemsize
    prefill = prefill_bytes(config, chunk, dtype, attn)
    exact = exact and getattr(config, "quantization_config", None) is None
    return Memory(weights, batch * device, batch * host, batch * prefill, exact)


def parameter_count(config: PreTrainedConfig) -> int:
    """Parameters of the model of a configuration; weights that two layers share count once."""
    text = config.to_json_string()
    if text not in _counts:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        _counts[text] = sum(parameter.numel() for parameter in model.parameters())
    return _counts[text]


_counts: dict[str, int] = {}


def cache_bytes(
    config: PreTrainedConfig, method: Any, prompt_tokens: int, new_tokens: int, dtype: str
) -> tuple[int, int, bool]:
    """(bytes on the device, bytes in host memory, whether they are exact) of the method's cache after prompt and answer."""
    shape = ModelShape.of(config.get_text_config(decoder=True))
    tokens = prompt_tokens + new_tokens
    kept = shape.token * getattr(torch, dtype).itemsize  # K and V of a token
    whole = kept * round_up(tokens)
    dense = min(shape.n_layers, 0 if method is None else method.dense_layers or 0)
    rest = range(dense, shape.n_layers)
    if method is None or not rest or method.name == "full":
        return whole * shape.n_layers, 0, method is not None
    if method.kind == "evict":
        plans = [method.plan(prompt_tokens, layer, shape.n_layers).total for layer in rest]
        most = tokens
        if method.replans and method.budget.tokens:  # refreshed ones drop before they take another token
            most = max(*plans, method.budget.tokens) + (not method.refreshes)
        entries = sum(round_up(min(min(prompt_tokens, plan) + new_tokens, most)) for plan in plans)
        if method.ragged:  # rows of a prompt have no room for more
            entries = sum(min(prompt_tokens, plan) + round_up(new_tokens) for plan in plans)
        copies = shape.group if method.repeats_kv else 1
        return whole * dense + entries * copies * (kept + ENTRY * shape.h_kv), 0, True
    all_layers = whole * len(rest)
    if method.kind == "quantize":
        return whole * dense + all_layers, 0, False
    own = method.index_bytes(round_up(tokens), shape)
    index = all_layers // 2 if own is None else own * len(rest)
    if getattr(method, "store", "resident") == "resident":
        return whole * dense + all_layers + index, 0, False
    plan = method.plan(prompt_tokens, dense, shape.n_layers)
    held = tokens if plan is None else plan.total + getattr(method, "cache_tokens", 0) + new_tokens
    near = min(tokens, held)
    return whole * dense + kept * near * len(rest) + index, all_layers + index, False


# -- a cell ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Nothing is downloaded inside: what is not in the caches is not at hand."""
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
    try:
        with offline():
            return models.load_config(name, options)
    except (OSError, ValueError):
        if (known := published(name)) is None:
            raise
        return known


def device_of(cell: Cell) -> str:
    """Where the cell computes. With an engine the GPU is a worker's: the driver may have none, or must leave it to them."""
    if cell.spread:
        return SPREAD
    device = models.pick_device(cell.identity["model"]["device"])
    elsewhere = not isinstance(cell.launch, LocalLaunch)
    return WORKER if elsewhere and device.startswith("cuda") else device


def free(device: str) -> int | None:
    """Bytes that can be had on the device, swap included; None of WORKER, SPREAD and a GPU that another machine has."""
    if device in (WORKER, SPREAD) or (device.startswith("cuda") and not torch.cuda.is_available()):
        return None
    there = free_bytes(torch.device(device))
    if device != "cpu":
        return there
    there += psutil.swap_memory().free
    limit = group_limit()  # which swap does not raise
    return there if limit is None else min(there, limit)


def memory_of(cell: Cell, longest: tuple[int, int]) -> Memory | None:
    """The cell's memory at its longest (prompt, answer); None if the model's configuration is not at hand."""
    prompt, new = longest
    try:
        config = config_of(cell)
    except (OSError, ValueError):
        return None
    dtype = models.dtype_name(config, cell.identity["model"])
    task = cell.identity["task"]
    batch = int(task["batch"] if task["name"] == "latency" else cell.run.batch)
    chunk = cell.run.prefill_chunk
    if chunk == "auto":
        there = free(device_of(cell))
        weights = parameter_count(config) * getattr(torch, dtype).itemsize
        chunk = None if there is None else fitting_chunk(config, prompt, max(0, there - weights) // batch, dtype)
    how: dict[str, Any] = {"dtype": dtype, "attn": cell.run.attn, "prefill_chunk": chunk, "batch": batch}
    return bound(config, cell.method, prompt_tokens=prompt, new_tokens=new, **how)


def misfit(cell: Cell, longest: tuple[int, int], need: Memory) -> tuple[bool, str]:
    """(whether the cell surely fails, why in one line with what would fit); (False, "") where it fits.

    A cell is sure to fail only where its weights and what its cache really holds exceed the memory. Where just the upper bound
    does, it may run.
    """
    device = device_of(cell)
    there = free(device)
    if there is None or need.on(device) <= there:
        return False, ""
    advice = _advice(cell, longest, device, there)
    if need.least <= there:
        return False, f"{cell.label} needs at most {size(need.on(device))} of {size(there)} on {device}{advice}"
    held = f" and {size(need.device)} of cache at {longest[0]:,} tokens" if need.exact else ""
    parts = f"{size(need.weights)} of weights{held} exceed the {size(there)} free on {device}"
    return True, f"does not fit the memory: {parts}{advice}"


def _advice(cell: Cell, longest: tuple[int, int], device: str, there: int) -> str:
    """The fewest changes with which the upper bound fits."""
    changes, room = _changes(cell, device), free("cpu")

    def fits(chosen: tuple[str, ...]) -> bool:
        changed = cell
        for text in chosen:
            changed = replace(changed, **changes[text])
        need = memory_of(changed, longest)
        return need is not None and need.on(device) <= there and (device == "cpu" or room is None or need.host <= room)

    for count in range(1, len(changes) + 1):
        if would := list(filter(fits, combinations(changes, count))):
            return f"; {' or '.join(' with '.join(chosen) for chosen in would)} would fit"
    spread = " or model.device_map=auto" if cell.identity["model"].get("path") else ""
    return f"; not with {', '.join(changes)} either: a smaller model or shorter prompts{spread}" if changes else ""


def _changes(cell: Cell, device: str) -> dict[str, dict[str, Any]]:
    """The options that take less memory and are not set yet: what to type -> the fields of the cell that it changes."""
    changes: dict[str, dict[str, Any]] = {}
    if cell.run.batch > 1:
        changes["batch=1"] = {"run": replace(cell.run, batch=1)}
    if cell.run.prefill_chunk is None:
        changes["prefill_chunk=auto"] = {"run": replace(cell.run, prefill_chunk="auto")}
    method: Any = cell.method
    if device != "cpu" and "store" in {f.name for f in fields(method)} and method.store != "host":
        with contextlib.suppress(ValueError):  # not with the method's other options
            changes["method.store=host"] = {"method": replace(method, store="host")}
    options = cell.identity
    if models.dtype_name(config_of(cell), options["model"]) == "float32":
        half = {**options, "model": {**options["model"], "dtype": "bfloat16"}}
        changes["model.dtype=bfloat16"] = {"about": replace(cell.about, options=half)}
    return changes
