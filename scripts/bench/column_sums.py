"""Column sums of a prompt's attention: time and peak memory of their forms, for one layer.

    python scripts/bench_methods.py column_sums                                # Mistral-7B's geometry, 8192 tokens
    python scripts/bench_methods.py column_sums --prompt 32768 --heads 8 --kv-heads 2 --rounds 1
    python scripts/bench_methods.py column_sums --prompt 32768 --device cuda --dtype bfloat16

One pass needs q and k only. Two passes also need each row's log-sum-exp, here from torch's own kernel. That kernel computes the
whole attention; its time is the last row. A layer that gets the log-sum-exp with its attention does not pay it again. Both are
plain torch; where a compiled kernel serves, it has rows of its own, on the CPU one of attention and sums together. Rounds are
interleaved, medians printed. Memory is what the process (or the device) held beyond its state before the call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable

import torch

from pqcache import kernels
from pqcache.measure.machine import device_caption
from pqcache.selective.column_sums import BLOCK, LSE_TILE, accumulator_dtype, add_column_sums, attend_and_sum, together
from scripts.bench.arguments import add_machine_options, add_shape_options, prepare, refuse_below
from scripts.bench.peak_memory import peak_bytes


def log_sum_exp(q: torch.Tensor, k: torch.Tensor, scaling: float) -> torch.Tensor:
    """(n, h, t) of causal attention, from the kernel that scaled_dot_product_attention itself would run."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, True, scale=scaling)[1]
    lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True, False, scale=scaling)[1]
    return lse[..., : q.shape[2]]


def measured(call: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds and peak bytes of one call."""
    start = time.perf_counter()
    memory = peak_bytes(call, device)
    return time.perf_counter() - start, memory


def measure(calls: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, tuple[float, int]]:
    """Median seconds and peak bytes of each call, in interleaved rounds. No round warms up: that would hide memory."""
    results: dict[str, list[tuple[float, int]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            results[name].append(measured(call, device))
    return {
        name: (statistics.median(taken for taken, _ in each), max(memory for _, memory in each))
        for name, each in results.items()
    }


@torch.no_grad()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench_methods.py column_sums", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block", type=int, default=BLOCK, help="queries at a time")
    parser.add_argument("--rounds", type=int, default=3)
    add_shape_options(parser)
    add_machine_options(parser, threads=1, json=False)
    args = parser.parse_args(argv)
    refuse_below(parser, args, rounds=1, prompt=1, block=1)
    device, dtype = prepare(args)

    s, scaling = args.prompt, args.dim**-0.5
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, heads, s, args.dim, generator=generator).to(device, dtype)
        for heads in (args.heads, args.kv_heads)
    )
    lse = log_sum_exp(q, k, scaling)
    forms = "one pass", "two passes", "one pass, compiled"
    sums = {form: torch.zeros(1, args.heads, s, dtype=accumulator_dtype(q), device=device) for form in forms}

    def add(form: str) -> None:
        sums[form].zero_()
        with contextlib.nullcontext() if form == forms[2] else kernels.plain_torch():
            add_column_sums(sums[form], q, k, [s], [s], scaling, args.block, lse=lse if form == forms[1] else None)

    calls: dict[str, Callable[[], object]] = {form: functools.partial(add, form) for form in forms}
    if together(q):
        calls["sums and attention"] = lambda: attend_and_sum(q, k, k, scaling)
    calls["the attention itself"] = lambda: log_sum_exp(q, k, scaling)
    small = q[:, :, :1], k[:, :, :1], k[:, :, :1]
    attend_and_sum(*small, scaling)  # loads the kernels, not their memory for s tokens
    results = measure(calls, args.rounds, device)
    heads, group = f"{args.heads} / {args.kv_heads} heads", args.heads // args.kv_heads
    print(f"s = {s}, {heads}, d = {args.dim}, {args.dtype}, {args.rounds} rounds, {device_caption(device)}")
    one, two = group * args.block * s * 4 / 2**20, group * args.block * LSE_TILE * 4 / 2**20
    print(f"a block of one group: {one:.1f} MiB (one pass), {two:.2f} MiB (two passes);", end=" ")
    print(f"s x s: {group * s * s * 4 / 2**30:.1f} GiB a group")
    print(f"{'':24}{'seconds':>9}{'ratio':>8}{'peak memory':>16}")
    for name, (median, memory) in results.items():
        print(f"{name:24}{median:9.3f}{median / results[forms[0]][0]:8.2f}{memory / 2**20:12.1f} MiB")
    for form in forms[1:]:
        difference = float((sums[forms[0]] - sums[form]).abs().max())
        print(
            f"largest difference of {form} from {forms[0]}: {difference:.1e} (largest sum {float(sums[form].max()):.1f})"
        )
