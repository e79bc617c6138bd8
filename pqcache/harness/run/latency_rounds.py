"""task=latency: one cell is one method at one prompt length. Its row has times, bytes, and the bound of a decode step.

    python run.py -m model=random model.geometry=tiny task=latency task.length=512,1024 method=full,pqcache
    python run.py model=random model.geometry=mistral-7b-instruct-v0.2 model.layers=2 task=latency method=pqcache
    python run.py -m model=random model.geometry=tiny task=latency task.batch=1,8 method=full,zipcache

With task.batch=n every round answers n prompts at once. TT2T, TPOT and bytes are of the whole batch; `extra.tokens_per_s` says
how many tokens all rows get per second of decoding.

Prompts are random tokens for random weights, else plain sentences. Finished rounds are not run again. `limit` does not apply.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pqcache.harness.report import rows
from pqcache.harness.run.memory import Chunks
from pqcache.harness.run.row_builder import DROPPED_STEPS, build_row
from pqcache.harness.run.samples import Sample, SampleLog, fingerprint, make_sample
from pqcache.measure.machine import Ceilings, ceilings
from pqcache.measure.peak import peak_memory
from pqcache.measure.roofline import bound, prompt
from pqcache.pq.profile import offload_seconds
from pqcache.selective import generate, time_batch
from pqcache.selective.support import attention_kernel
from pqcache.store.lanes import Lanes, ThreadLanes, lanes_for

if TYPE_CHECKING:
    from pqcache.harness.config.cells import Cell
    from pqcache.harness.config.environment import Facts
    from pqcache.harness.report.rows import Row
    from pqcache.harness.run.models import LoadedModel
    from pqcache.harness.run.session import Session
    from pqcache.selective import GenerationResult

_ceilings: dict[tuple[str, str], Ceilings] = {}  # (device, dtype) -> bandwidths, measured once per process


def limits_of(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The measured bandwidths of a device."""
    key = str(device), str(dtype)
    if key not in _ceilings:
        _ceilings[key] = ceilings(device, dtype)
    return _ceilings[key]


def prompt_ids(loaded: LoadedModel, length: int, seed: int) -> torch.Tensor:
    """Token ids (1, length)."""
    if loaded.name == "random":
        return prompt(loaded.model, length, seed)
    text = loaded.calibration_text()
    return text.repeat(1, -(-length // text.shape[1]))[:, :length]


def batch_ids(ids: torch.Tensor, batch: int) -> torch.Tensor:
    """`batch` prompts of one length, (batch, length), no two alike: ids (1, length) shifted by a token from row to row."""
    return torch.cat([ids.roll(-row, 1) for row in range(batch)])


def throughput(run: GenerationResult, batch: int) -> float:
    """Tokens per second of decode steps, all rows together; the first two steps are dropped, as in TPOT."""
    timed = run.step_s[DROPPED_STEPS:]
    return batch * len(timed) / sum(timed)


def make_lanes(overlap: str, device: torch.device) -> Lanes:
    """The lanes of `task.overlap`, on which work may run beside the model: none, threads, or the device's own."""
    own = {"none": Lanes, "threads": ThreadLanes}.get(overlap)
    return lanes_for(device) if own is None else own().serve(device)


def write_row(session: Session, cell: Cell, log: SampleLog) -> None:
    """Run the rounds that a cell lacks, and write its row if there was one."""
    loaded = session.model(cell)
    row, fresh = measure(cell, loaded, log, session.facts(loaded))
    path = cell.folder / "row.json"
    if fresh or rows.read_row(path) is None:
        rows.write_row(path, row)


def measure(cell: Cell, loaded: LoadedModel, log: SampleLog, facts: Facts) -> tuple[Row, bool]:
    """The row of a cell, and whether a new round was run for it."""
    task, model, device = cell.identity["task"], loaded.model, loaded.model.device
    ids = prompt_ids(loaded, task["length"], cell.identity["seed"])
    text = ids if loaded.name == "random" else loaded.calibration_text()
    cell.method.prepare(model, text, Path(cell.run.cache_dir).expanduser())
    limits = limits_of(device, model.dtype)
    chunks = Chunks(cell.run.prefill_chunk, task["batch"])
    chunk = chunks.of(model, task["length"])
    settings = {
        "model": loaded.weights,
        "device": facts["device"],
        "attn": cell.run.attn,
        "new_tokens": task["new_tokens"],
    }
    settings["length"] = task["length"]
    mark = fingerprint(ids[0, :64].tolist(), settings)
    old_mark = fingerprint(ids[0, :64].tolist(), {**settings, "model": loaded.old_weights})
    if (batch := task["batch"]) > 1:
        settings["batch"] = batch
        mark = fingerprint(ids[0, :64].tolist(), settings)
        ids = batch_ids(ids, batch)

    def generated(new_tokens: int, lanes: Lanes | None = None) -> GenerationResult:
        prompts = ids.to(device)
        options: dict[str, Any] = {
            "max_new_tokens": new_tokens,
            "attn": cell.run.attn,
            "lanes": lanes,
            "graph": cell.run.graph,
            "kernels": cell.run.kernels,
        }
        if batch == 1:
            return generate(model, cell.method, prompts, prefill_chunk=chunk, **options)
        return time_batch(model, cell.method, prompts, prefill_chunk=chunk, **options)

    samples: list[Sample] = []
    fresh = False
    for index in range(task["rounds"]):
        sample = log.find("latency", index, mark, old_mark if batch == 1 else None)
        if sample is None:
            if not fresh:  # warm up at the same length: kernels and allocators depend on it
                with contextlib.suppress(ValueError):
                    generated(3)
            fresh = True
            with peak_memory(device) as peak:
                run = generated(task["new_tokens"], make_lanes(task["overlap"], device))
            run.extra.update(chunks.fact(chunk))
            if peak.bytes is not None:
                run.extra.update(peak_memory_bytes=peak.bytes, peak_memory_of=peak.of)
            run.extra.update(bound(model, run, limits, batch).to_dict(), **limits.to_dict(), layers=cell_layers(loaded))
            run.extra.update(batch=batch, tokens_per_s=throughput(run, batch))
            if batch == 1 and getattr(cell.method, "store", "resident") != "resident":
                config = model.config.get_text_config(decoder=True)
                run.extra["offload_s"] = offload_seconds(config, [task["length"]], model.dtype, device, 3)[0]
            sample = make_sample(
                run,
                task="latency",
                doc_id=index,
                mark=mark,
                response="",
                score=None,
                question_tokens=0,
                attn=attention_kernel(cell.run.attn)[0],
                facts=facts,
            )
            log.append(sample)
        samples.append(sample)
    protocol = {"wrapper": "none", "system": None, "bos_count": 0, "truncation": "none"}
    row = build_row(cell, {}, samples, prompt_protocol=protocol, kv_dtype=loaded.dtype)
    row["n_samples"] = len(samples)
    bound_ms = row["extra"]["weights_ms"] + row["extra"]["link_ms"]
    if row["tpot_p50_ms"] is not None:
        row["roofline"], row["roofline_reason"] = row["tpot_p50_ms"] / bound_ms, None
    return row, fresh


def cell_layers(loaded: LoadedModel) -> int:
    """Number of transformer layers."""
    return int(loaded.model.config.get_text_config(decoder=True).num_hidden_layers)
