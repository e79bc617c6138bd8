"""What the GPU benchmark measures, the most telling first: the targets' length with every store, then the shorter prompt."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pqcache.device import interpreter
from pqcache.device.switch import triton_installed
from scripts.bench.gpu import method_rows
from scripts.bench.gpu.clock import Machine, free
from scripts.bench.gpu.survive import Measurement, Row, failed

CODECS = ("int8", "kivi", "zipcache")
BATCH = 8
BATCHES = (1, 2, 4, 8, 16)
BATCH_PROMPT = 4096  # prompt tokens of the throughput by batch
CODEC_STEPS = 6  # decode steps of a codec: plain torch decodes it, tile by tile


class Bench:
    """What measurements share: machine, models, options. Each part is made when the first one needs it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self._model: PreTrainedModel | None = None
        if args.device == "cpu" and triton_installed():
            interpreter.mend()

    @cached_property
    def machine(self) -> Machine:
        return Machine(torch.device(self.args.device), self.args.tiny)

    @property
    def dtype(self) -> torch.dtype:
        """The type of all rows but bf16's."""
        return torch.float16 if self.args.device == "cuda" else torch.float32

    def model(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Random weights; those of another type are dropped first."""
        dtype = dtype or self.dtype
        if self._model is not None and self._model.dtype != dtype:
            self._model = None
            free()
        if self._model is None:
            self._model = method_rows.build_model(self.args, self.machine.device, dtype)
        return self._model

    def ids(self, s: int, batch: int = 1) -> torch.Tensor:
        """Random prompts (batch, s) for the present model."""
        assert self._model is not None
        generator = torch.Generator().manual_seed(s)
        return torch.randint(0, self._model.config.vocab_size, (batch, s), generator=generator).to(self.machine.device)


def measurements(args: argparse.Namespace, bench: Bench) -> list[Measurement]:
    """All of them, in order."""
    plan = [Measurement("machine", partial(machine, bench))]
    for number, s in enumerate(args.lengths):
        plan += [Measurement(f"{s}: {label}", partial(decode, bench, label, s)) for label in labels(args, first=True)]
        plan.append(Measurement(f"{s}: {method_rows.OFFLOADED}", partial(offloaded, bench, s)))
        plan += [Measurement(f"{s}: {label}", partial(decode, bench, label, s)) for label in labels(args, first=False)]
        if number == 0 and not args.no_checks and triton_installed():
            plan.append(Measurement("kernels", partial(kernels, bench)))
    short = args.lengths[-1]
    own = labels(args, first=True)
    plan += [Measurement(f"{short}: {x}, bf16", partial(decode, bench, x, short, torch.bfloat16)) for x in own]
    plan += [Measurement(f"{short}: {x}, batch of {BATCH}", partial(batch, bench, x, short, BATCH)) for x in own]
    plan += [Measurement(f"{short}: {name}", partial(codec, bench, name, short)) for name in CODECS]
    plan += [Measurement(f"trace: {x}", partial(trace, bench, x, short)) for x in labels(args, first=None)[1:4]]
    prompt = short if args.tiny else BATCH_PROMPT
    for n in BATCHES[:2] if args.tiny else BATCHES:
        plan += [Measurement(f"{prompt}: {x}, throughput of {n}", partial(batch, bench, x, prompt, n)) for x in own]
    return plan


def labels(args: argparse.Namespace, first: bool | None) -> list[str]:
    """Methods whose targets are set (first), the others (False), or all in the order of stores (None)."""
    target, rest = method_rows.methods(args)
    return list(target if first else rest) if first is not None else [*target, *rest]


def machine(bench: Bench) -> Iterator[Row]:
    """Names, versions, ceilings."""
    yield {"kind": "machine", "slug": bench.machine.slug, **bench.machine.describe()}


def decode(bench: Bench, label: str, s: int, dtype: torch.dtype | None = None) -> Iterator[Row]:
    """Two rows: steps launched from Python, and recorded ones."""
    model, args = bench.model(dtype), bench.args
    target, rest = method_rows.methods(args)
    make = {**target, **rest}[label]
    facts = {"kind": "decode", "method": label, "prompt_tokens": s, "batch": 1, "dtype": str(model.dtype)[6:]}
    for row in method_rows.run_selective(model, bench.machine, make(), bench.ids(s), args.steps, args.replays):
        if row["tpot_ms"] is not None:
            row["roofline"] = method_rows.roofline(model, bench.machine, row, label == "full", s)
        method_rows.show(f"{s} {label}", row)
        yield {**facts, **row}


def offloaded(bench: Bench, s: int) -> Iterator[Row]:
    """transformers' own cache in host memory."""
    facts = {"kind": "decode", "method": method_rows.OFFLOADED, "prompt_tokens": s, "batch": 1, "mode": "eager"}
    if bench.args.device != "cuda":
        yield {**facts, "tpot_ms": None, "not_applicable": "it needs a CUDA device's streams"}
        return
    row = method_rows.run_offloaded(bench.model(), bench.ids(s), 3)
    method_rows.show(f"{s} {method_rows.OFFLOADED}", row)
    yield {**facts, "dtype": str(bench.dtype)[6:], **row}


def codec(bench: Bench, name: str, s: int) -> Iterator[Row]:
    """A quantization method's steps. None of them is recorded."""
    row = method_rows.run_batch(bench.model(), method_rows.make_codec(name, bench.args.tiny), bench.ids(s), CODEC_STEPS)
    method_rows.show(f"{s} {name}", row)
    yield {"kind": "codec", "method": name, "prompt_tokens": s, "batch": 1, "dtype": str(bench.dtype)[6:], **row}


def batch(bench: Bench, label: str, s: int, n: int) -> Iterator[Row]:
    """n prompts at once."""
    args = bench.args
    make = method_rows.methods(args)[0][label]
    row = method_rows.run_batch(bench.model(), make(), bench.ids(s, n), args.steps)
    method_rows.show(f"{s} {label} x {n}", row)
    yield {"kind": "batch", "method": label, "prompt_tokens": s, "batch": n, "dtype": str(bench.dtype)[6:], **row}


def trace(bench: Bench, label: str, s: int) -> Iterator[Row]:
    """A profiler's trace of three decode steps, for chrome://tracing."""
    target, rest = method_rows.methods(bench.args)
    name = label.replace(", ", "_").replace(" ", "_")
    file = bench.folder / f"trace_{name}.json"
    row = method_rows.trace_steps(bench.model(), {**target, **rest}[label](), bench.ids(s), file)
    yield {"kind": "trace", "method": label, "prompt_tokens": s, "file": file.name, **row}


def kernels(bench: Bench) -> Iterator[Row]:
    """One row per kernel checked; a check that fails is a row too, and the next one goes on."""
    from scripts.bench.gpu.kernels import KernelChecks

    checks = KernelChecks(bench.machine, 400 if bench.args.tiny else 131_072, bench.dtype)
    for name, check in checks.checks().items():
        known = set(checks.rows)
        try:
            check()
        except Exception as error:  # the others can still be checked
            torch.cuda.synchronize() if bench.machine.cuda else None  # raises where the device answers no more
            yield {"kind": "kernel", "kernel": name, **failed(error)}
        for new in [x for x in checks.rows if x not in known]:
            yield {"kind": "kernel", "kernel": new, **checks.rows[new]}
