"""Column sums of a prompt's attention: time and peak memory of the two forms, for one layer.

    python scripts/bench_column_sums.py                                  # Mistral-7B's geometry, 8192 tokens
    python scripts/bench_column_sums.py --prompt 32768 --heads 8 --kv-heads 2 --rounds 1
    python scripts/bench_column_sums.py --prompt 32768 --device cuda --dtype bfloat16

One pass needs q and k only; two passes are given each row's log-sum-exp, here by torch's own kernel, whose time (it computes
the whole attention) is the third row: where a layer gets the log-sum-exp with its attention, it costs nothing more.
Rounds are interleaved, medians printed. Memory is what the process (or the device) held beyond its state before the call.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pqcache.selective.column_sums import BLOCK, LSE_TILE, accumulator_dtype, add_column_sums
from pqcache.selective.ledger import synchronize


def resident(what: str = "VmRSS") -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far."""
    found = re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def held_more(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that `call` held at its peak beyond what was held before it."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)  # memory freed but kept by the allocator would be used first, unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident()
    call()
    return resident("VmHWM") - before


def log_sum_exp(q: torch.Tensor, k: torch.Tensor, scaling: float) -> torch.Tensor:
    """(n, h, t) of causal attention, from the kernel that scaled_dot_product_attention itself would run."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, True, scale=scaling)[1]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True, False, scale=scaling)[1][
        ..., : q.shape[2]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", type=int, default=8192, help="prompt tokens")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=BLOCK, help="queries at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    device, s = torch.device(args.device), args.prompt
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, heads, s, args.dim, generator=generator).to(device, getattr(torch, args.dtype))
        for heads in (args.heads, args.kv_heads)
    )
    scaling = args.dim**-0.5
    lse = log_sum_exp(q, k, scaling)
    sums = {passes: torch.zeros(1, args.heads, s, dtype=accumulator_dtype(q), device=device) for passes in (1, 2)}

    def add(passes: int) -> None:
        sums[passes].zero_()
        add_column_sums(sums[passes], q, k, [s], [s], scaling, args.block, lse=lse if passes == 2 else None)

    calls: dict[str, Callable[[], object]] = {
        "one pass": lambda: add(1),
        "two passes": lambda: add(2),
        "the attention itself": lambda: log_sum_exp(q, k, scaling),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    memory: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            memory[name] = max(memory.get(name, 0), held_more(call, device))
            seconds[name].append(time.perf_counter() - start)
    difference = float((sums[1] - sums[2]).abs().max())
    where = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU, {args.threads} thread"
    )
    print(f"s = {s}, {args.heads} / {args.kv_heads} heads, d = {args.dim}, {args.dtype}, {args.rounds} rounds, {where}")
    group = args.heads // args.kv_heads
    print(f"a block of one group: {group * args.block * s * 4 / 2**20:.1f} MiB (one pass),", end=" ")
    print(
        f"{group * args.block * LSE_TILE * 4 / 2**20:.2f} MiB (two passes); s x s: {group * s * s * 4 / 2**30:.1f} GiB a group"
    )
    print(f"{'':24}{'seconds':>9}{'ratio':>8}{'peak memory':>16}")
    base = statistics.median(seconds["one pass"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:24}{median:9.3f}{median / base:8.2f}{memory[name] / 2**20:12.1f} MiB")
    print(f"largest difference of the two forms: {difference:.1e} (largest sum {float(sums[1].max()):.1f})")


if __name__ == "__main__":
    main()
