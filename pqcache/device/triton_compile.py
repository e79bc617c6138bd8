"""Compile every Triton kernel without a GPU, as the decode step and K-Means of Mistral-7B's geometry call them.

    python -m pqcache.device.triton_compile                 # sm_90 (H100, H200); prints shared memory and machine code size
    python -m pqcache.device.triton_compile --target 80 --quick     # each kernel, not each variant
    TRITON_CACHE_DIR=.triton python -m pqcache.device.triton_compile    # keeps what it compiles: scripts/*_gpu.sh find it there

Triton brings its own assembler, so types, layouts and shared memory are checked on any Linux machine; nothing runs. A binary is
found again by its source, constants and the divisibility of its arguments, wherever the folder and the checkout are. Grids are
those of an H100 or H200, whose number of multiprocessors is a constant of some kernels.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pqcache.device import (
    triton_attend,
    triton_blocks,
    triton_codes,
    triton_nearest,
    triton_pack,
    triton_packed,
    triton_sums,
)
from pqcache.device.switch import device_of, pretended
from pqcache.store.layout import Codes, LowRank, Outliers
from pqcache.store.quantizer import packed_width

PROCESSORS = 132  # multiprocessors of an H100 SXM and of an H200
TOKENS = 13_107  # attended: a tenth of 128K
CODES = ((2, 64, torch.uint8), (2, 256, torch.uint8), (1, 4096, torch.int16))  # sub-spaces, centroids, type of a code
# dimensions and centroids of K-Means: the first is 2 x 6 bits; 129 are ClusterKV's inner products
KMEANS = ((64, 64), (128, 256), *((d, c) for d in (64, 96, 128, 129, 256) for c in (16, 64, 256, 1024, 4096)))


class _NoDevice:
    """Stands for the driver while Triton compiles."""

    def __init__(self, target: int) -> None:
        self.target = GPUTarget("cuda", target, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def calls(quick: bool) -> None:
    """Call every kernel, in the variants that are used, on the default device."""
    n, h_kv, g, d, capacity, sinks = 1, 8, 4, 128, 8192, 32
    cursor = torch.zeros(n, dtype=torch.int32)
    plan = torch.zeros((n, 4), dtype=torch.int32)
    for dtype in (torch.float16,) if quick else (torch.float16, torch.bfloat16, torch.float32):
        store = torch.zeros((n, h_kv, capacity, d), dtype=dtype), torch.zeros((n, h_kv, capacity, d), dtype=dtype)
        k, q = torch.zeros((n, h_kv, 1, d), dtype=dtype), torch.zeros((n, h_kv * g, 1, d), dtype=dtype)
        chosen = torch.zeros((n, h_kv, 512), dtype=torch.int32)
        for one in (False,) if quick else (True, False):
            for indices in (chosen, None) if not one else (chosen,):
                triton_attend.attend(
                    q, store, store, store, indices, cursor, plan, ring=capacity, tokens=TOKENS, scaling=1.0,
                    n_sink=0 if one else sinks, one=one, advance=True,
                )  # fmt: skip
        for width in (d,) if quick else (64, 96, d, 256):
            x = torch.zeros((n, h_kv, capacity, width), dtype=dtype)
            triton_attend.attend(
                torch.zeros((n, h_kv * g, 1, width), dtype=dtype), (x, x), None, (x, x), None, cursor, plan, ring=capacity,
                tokens=TOKENS, scaling=1.0, one=True, advance=True,
            )  # fmt: skip
        _block_cache(store, chosen, cursor, plan, sinks, quick)
        _packed(dtype, n, h_kv, g, d, quick)
        block = torch.zeros((n, h_kv * g, 1024, d), dtype=dtype)
        for windows in (None,) if quick else (None, [64]):
            sums = torch.zeros((n, h_kv * g, 1024))
            triton_sums.add(sums, block, store[0], [1024], [1024], 1.0, windows=windows)
        triton_codes.enter(k, k, store, capacity, cursor, plan)
        for m, c, code_type in CODES[: 2 if quick else 3]:
            codes = torch.zeros((n, h_kv * m, capacity), dtype=code_type)
            centroids = torch.zeros(
                (n, h_kv, m, c, d // m), dtype=torch.float32 if dtype.itemsize == 4 else torch.float16
            )
            amount = triton_codes.histogram(codes, cursor, plan, sinks, h_kv, m, c)
            for far in (None, store):
                entered = triton_codes.enter(
                    k, k, store, capacity, cursor, plan, far=far, n_sink=sinks, q=q, centroids=centroids, codes=codes,
                    amount=amount, scaling=0.1,
                )  # fmt: skip
            triton_codes.select(entered, codes, cursor, plan, sinks, 512, capacity)
    keys = torch.zeros((n, h_kv, 2, 8192, 64), dtype=torch.float16)  # their sub-vectors, as PQCache clusters them
    triton_nearest.moments(keys)
    triton_nearest.nearest(keys, torch.zeros((16, 64, 64)), torch.zeros((16, 1, 64)), add=True)
    for d, c in KMEANS[:2] if quick else KMEANS:
        x = torch.zeros((16, 8192, d))
        for add in (True,) if quick else (True, False):
            triton_nearest.nearest(x, torch.zeros((16, c, d)), x[:, :1], add=add)


def _block_cache(
    store: tuple[torch.Tensor, torch.Tensor],
    chosen: torch.Tensor,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    sinks: int,
    quick: bool,
) -> None:
    """Look-up, policy and refill of 32 slots for 128 tokens each, and the policy of four thousand smaller ones."""
    n, h_kv, capacity, _ = store[0].shape
    for slots, topk, block, lfu in ((32, 32, 128, False), (32, 32, 128, True), (4096, 512, 1, True))[
        : 1 if quick else 3
    ]:
        slot, tables = torch.zeros((n, capacity // block), dtype=torch.long), torch.zeros((n, slots), dtype=torch.long)
        counts, incoming = torch.zeros(slot.shape, dtype=torch.int32), torch.zeros((n, topk, 2), dtype=torch.long)
        tally, chance = torch.zeros((n, 3), dtype=torch.long), torch.zeros(n, dtype=torch.float64)
        triton_blocks.read(store, store, chosen, slot, counts, tally, cursor, plan, sinks, block)
        triton_blocks.admit(
            counts, slot, tables, tables, tables, tally[:, 0], incoming, tally, chance, cursor, plan, heads=h_kv, n_sink=sinks,
            block=block, min_columns=1, lfu=lfu,
        )  # fmt: skip
        rows = store[0].transpose(1, 2), store[1].transpose(1, 2)
        triton_blocks.refill(rows, rows, incoming, block)


def _packed(dtype: torch.dtype, n: int, h_kv: int, g: int, d: int, quick: bool) -> None:
    """Attention over codes: KIVI's and Int8's, ZipCache's (a range per width; a scale per channel), GEAR's."""
    tokens, group, ring = 8192, 32, 128

    def half(*sizes: int) -> torch.Tensor:
        return torch.zeros((n, h_kv, *sizes), dtype=torch.float16)

    def made(bits: int, **parts: Any) -> Codes:
        return Codes(bits, d, torch.zeros((n, h_kv, tokens, packed_width(d, bits)), dtype=torch.uint8), **parts)

    def by_token(bits: int, groups: int, **parts: Any) -> Codes:
        return made(bits, token_step=half(tokens, groups), token_low=half(tokens, groups), **parts)

    def by_channel(bits: int, span: int, **parts: Any) -> Codes:
        lines = tokens // span
        return made(bits, channel_step=half(lines, d), channel_low=half(lines, d), span=span, **parts)

    pairs: list[tuple[Codes | None, Codes | None]] = [
        (by_channel(bits, group), by_token(bits, d // group)) for bits in ((2,) if quick else (2, 3, 4, 8))
    ]
    if not quick:
        few, rank = (
            Outliers(torch.zeros((n, 1, tokens, 20), dtype=dtype), half(1).short()),
            LowRank(half(tokens, 4), half(1, 4, d), tokens),
        )
        many = Outliers(torch.zeros((n, h_kv, 1, 160, d), dtype=dtype), half(1).short(), tokens)
        pairs += [(by_token(8, 1), by_token(8, 1)), (None, None)]
        pairs += [
            (by_channel(bits, tokens), by_token(bits, 1, channel_step=half(1, d), span=tokens)) for bits in (2, 4)
        ]
        pairs += [
            (by_channel(4, tokens, outliers=many, low_rank=rank), by_token(4, 1, outliers=few, low_rank=rank)),
        ]
    exact = torch.zeros((n, h_kv, ring, d), dtype=dtype), torch.zeros((n, h_kv, ring, d), dtype=dtype)
    counts = torch.zeros((n, h_kv, triton_packed.COLUMNS), dtype=torch.int32)
    new, q = torch.zeros((n, h_kv, 1, d), dtype=dtype), torch.zeros((n, h_kv * g, 1, d), dtype=dtype)
    for k, v in pairs:
        last = triton_packed.TokenList(k, v, exact, counts, tokens)
        launches: list[Callable[[], None]] = [partial(triton_packed.prepare_add(last), new, new)]
        triton_packed.attend(q, [last], 1.0)
        for of_values, codes in enumerate((k, v)):
            if codes is not None and triton_pack.can_pack(codes):
                launches.append(triton_pack.prepare_pack(last, bool(of_values), ring - 1))
        with device_of(new):
            for launch in launches:
                launch()


def compile_all(target: int = 90, quick: bool = False, calls: Callable[[bool], None] = calls) -> list[dict[str, Any]]:
    """Name, registers, spilled bytes and shared memory of every kernel variant of `calls`; raises what the compiler raises.

    `cached`: 1 where Triton's cache folder had the binary. Afterwards this process compiles and runs nothing else.
    """
    built: dict[int, tuple[str, int, Any]] = {}
    hits: list[bool] = []

    def compile_only(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
        hits.clear()
        binary = run(kernel, *args, **{**kwargs, "warmup": True})
        if hits:  # else this process has had it before
            built[id(binary)] = (kernel.__name__, int(hits[0]), binary)

    run = JITFunction.run
    triton.runtime.driver.set_active(_NoDevice(target))
    triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    JITFunction.run = compile_only
    try:
        with pretended(PROCESSORS):
            calls(quick)
    finally:
        JITFunction.run = run
    return [{"kernel": name, **_resources(binary, target), "cached": hit} for name, hit, binary in built.values()]


def _resources(binary: Any, target: int) -> dict[str, int]:
    """Shared memory, warps, registers and spilled bytes of one binary, as the assembler reports them."""
    resources = {"shared": binary.metadata.shared, "warps": binary.metadata.num_warps}
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    suffix = "a" if target == 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(binary.asm["ptx"])
        command = [str(ptxas), "-v", f"--gpu-name=sm_{target}{suffix}", str(source), "-o", str(source) + ".cubin"]
        report = subprocess.run(command, capture_output=True, text=True).stderr
    for name, pattern in (("registers", r"Used (\d+) registers"), ("spilled", r"(\d+) bytes spill stores")):
        match = re.search(pattern, report)
        if match:
            resources[name] = int(match[1])
    return resources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=int, default=90, help="compute capability without the dot")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows = compile_all(args.target, args.quick)
    hits = sum(row.pop("cached") for row in rows)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(f"kernels {len(rows)}  found in the cache {hits}  most shared memory {max(row['shared'] for row in rows)}")


if __name__ == "__main__":
    main()
