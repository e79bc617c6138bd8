"""task=latency: one cell is one method at one prompt length. Its row has times, bytes, and the bound of a decode step.

    python run.py -m model=random model.geometry=tiny task=latency task.length=512,1024 method=full,pqcache
    python run.py model=random model.geometry=mistral-7b-instruct-v0.2 model.layers=2 task=latency method=pqcache
    python run.py -m model=random model.geometry=tiny task=latency task.batch=1,8 method=full,zipcache

With task.batch=n every round answers n prompts at once. TT2T, TPOT and bytes are of the whole batch; `extra.tokens_per_s` says
how many tokens all rows get per second of decoding.

Prompts are random tokens for random weights, else plain sentences. Finished rounds are not run again. `limit` does not apply.
"""

import contextlib
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from pqcache.harness.config import environment
from pqcache.harness.config.cells import Cell
from pqcache.harness.report import rows
from pqcache.harness.run.memory import Chunks
from pqcache.harness.run.row_builder import build_row
from pqcache.harness.run.samples import Sample, SampleLog, fingerprint, make_sample
from pqcache.harness.run.session import Session
from pqcache.measure.machine import ceilings
from pqcache.measure.peak import peak_memory
from pqcache.measure.roofline import DROPPED_STEPS, bound, prompt
from pqcache.pq.profile import offload_seconds
from pqcache.selective import generate, time_batch
from pqcache.selective.support import attention_kernel
from pqcache.store.lanes import Lanes, ThreadLanes, lanes_for

ceilings_of = cache(ceilings)  # (device, dtype) -> bandwidths, once per process


def make_lanes(overlap: str, device: torch.device) -> Lanes:
    """The lanes of `task.overlap`, on which work may run beside the model: none, threads, or the device's own."""
    own = {"none": Lanes, "threads": ThreadLanes}.get(overlap)
    return lanes_for(device) if own is None else own().serve(device)


def write_row(session: Session, cell: Cell, log: SampleLog) -> None:
    """Run the rounds that a cell lacks, and write its row if there were some."""
    loaded, task, path = session.model(cell), cell.identity["task"], cell.folder / "row.json"
    model, device, length, batch = loaded.model, loaded.model.device, task["length"], task["batch"]
    facts = environment.facts(loaded.device, loaded.kept)
    if loaded.name == "random":
        text = ids = prompt(model, length, cell.identity["seed"])
    else:
        text = loaded.calibration_text()
        ids = text.repeat(1, -(-length // text.shape[1]))[:, :length]
    cell.method.prepare(model, text, Path(cell.run.cache_dir).expanduser())
    chunks = Chunks(cell.run.prefill_chunk, batch)
    settings = {"device": facts["device"], "attn": cell.run.attn, "new_tokens": task["new_tokens"], "length": length}
    settings |= {"batch": batch} if batch > 1 else {}
    weights = loaded.weights, loaded.old_weights or loaded.weights
    marks = [fingerprint(ids[0, :64].tolist(), {**settings, "model": mark}) for mark in weights]
    chunk, warm = chunks.of(model, length), False
    # the prompts of a batch are shifted by a token from row to row: no two are alike
    prompts = torch.cat([ids.roll(-row, 1) for row in range(batch)]).to(device)
    options: dict[str, Any] = {"attn": cell.run.attn, "graph": cell.run.graph, "kernels": cell.run.kernels}
    run_one = generate if batch == 1 else time_batch
    one_round = partial(run_one, model, cell.method, prompts, prefill_chunk=chunk, **options)
    samples: list[Sample] = []
    for index in range(task["rounds"]):
        sample = log.find("latency", index, marks[0], marks[1] if batch == 1 else None)
        if sample is None:
            limits = ceilings_of(device, model.dtype)
            if not warm:  # at the same length: kernels and allocators depend on it
                with contextlib.suppress(ValueError):
                    one_round(max_new_tokens=3)
            warm = True
            with peak_memory(device) as peak:
                run = one_round(max_new_tokens=task["new_tokens"], lanes=make_lanes(task["overlap"], device))
            config, timed = model.config.get_text_config(decoder=True), run.step_s[DROPPED_STEPS:]
            run.extra.update(**peak, **bound(model, run, limits, batch), **limits)
            run.extra.update(layers=int(config.num_hidden_layers), batch=batch)
            run.extra.update(tokens_per_s=batch * len(timed) / sum(timed), **chunks.fact(chunk))
            if batch == 1 and getattr(cell.method, "store", "resident") != "resident":
                run.extra["offload_s"] = offload_seconds(config, length, model.dtype, device, 3)
            key = "latency", index, marks[0]
            sample = make_sample(run, key, "", None, 0, attention_kernel(cell.run.attn)[0], facts)
            log.append(sample)
        samples.append(sample)
    if not warm and rows.read_row(path) is not None:
        return
    protocol = {"wrapper": "none", "system": None, "bos_count": 0, "truncation": "none"}
    row = build_row(cell, {}, samples, prompt_protocol=protocol, kv_dtype=loaded.dtype)
    row["n_samples"] = len(samples)
    if row["tpot_p50_ms"] is not None:
        row["roofline"] = row["tpot_p50_ms"] / (row["extra"]["weights_ms"] + row["extra"]["link_ms"])
        row["roofline_reason"] = None
    rows.write_row(path, row)
