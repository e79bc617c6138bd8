"""Peak memory of a prefill by method and prompt length, in one pass and in chunks: it grows with s, not with s^2.

    python scripts/peak_memory.py                                              4096 and 8192 tokens, chunks of 512
    python scripts/peak_memory.py --lengths 8192,16384,32768 --chunks 2048 --methods full,pqcache,snapkv,h2o,zipcache,infllm

Each line is a process of its own: what an earlier prefill left in the allocator would hide a later peak. Printed are MB above
what the process held before the prompt came (weights, libraries), and for each method the growth from the first length to the
last: 2 where doubling the prompt doubles the peak, 4 where a matrix of prompt by prompt was made. `--out` also writes a CSV.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import json
import subprocess
import sys
from pathlib import Path

METHODS = "full,pqcache,snapkv,h2o,zipcache,infllm"  # one of each kind: dense, retrieve, evict by a window and by all, quantize


def measure(
    geometry: str, layers: int, method: str, length: int, chunk: int | None, dtype: str
) -> dict[str, int | None]:
    """Bytes that a prefill holds at most above what was there, and that its cache holds after it. In this process."""
    import torch

    from pqcache.measure.peak import STATUS, peak_memory
    from pqcache.measure.roofline import prompt, random_model
    from pqcache.registry import method_class
    from pqcache.selective import Budget, generate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(geometry, layers, getattr(torch, dtype), device)
    cls = method_class(method)
    made = cls() if cls.ignores_budget else cls(budget=Budget(ratio=0.2))
    with torch.no_grad():
        generate(
            model, made, prompt(model, 600), max_new_tokens=2, prefill_chunk=chunk
        )  # kernels, lazily loaded libraries
    before = torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # no glibc
            # it keeps freed memory, which would count as held before and hide a part of the peak
            ctypes.CDLL(None).malloc_trim(0)
        text = STATUS.read_text()
        before = int(text.split("VmRSS:")[1].split()[0]) * 1024
    with peak_memory(device) as peak:
        run = generate(model, made, prompt(model, length), max_new_tokens=2, prefill_chunk=chunk)
    return {
        "peak": None if peak.bytes is None else peak.bytes - before,
        "cache": sum(run.resident_bytes.values()),
        "before": before,
    }


def in_a_process(arguments: argparse.Namespace, method: str, length: int, chunk: int | None) -> dict[str, int | None]:
    one = [method, str(length), str(chunk or 0)]
    words = [sys.executable, __file__, "--one", *one]
    words += ["--geometry", arguments.geometry, "--layers", str(arguments.layers), "--dtype", arguments.dtype]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{method}, {length} tokens: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192")
    parser.add_argument("--chunks", default="0,512", help="0: in one pass")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--geometry", default="tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="a CSV file")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "LENGTH", "CHUNK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        method, length, chunk = arguments.one
        options = int(length), int(chunk) or None, arguments.dtype
        print(json.dumps(measure(arguments.geometry, arguments.layers, method, *options)))
        return
    lengths = [int(x) for x in arguments.lengths.split(",")]
    chunks = [int(x) for x in arguments.chunks.split(",")]
    lines: list[list[str]] = [["method", "chunk", *(f"{n} tokens, MB" for n in lengths), "cache, MB", "growth"]]
    print("  ".join(f"{word:>16}" for word in lines[0]), flush=True)
    for method in arguments.methods.split(","):
        for chunk in chunks:
            found = [in_a_process(arguments, method, length, chunk or None) for length in lengths]
            peaks = [one["peak"] for one in found]
            ends = peaks[0], peaks[-1]
            growth = "n/a" if None in ends or not ends[0] else f"{(ends[1] or 0) / ends[0]:.2f}"
            sizes = ["n/a" if peak is None else f"{peak / 1e6:.0f}" for peak in peaks]
            lines.append([method, str(chunk or "whole"), *sizes, f"{(found[-1]['cache'] or 0) / 1e6:.0f}", growth])
            print("  ".join(f"{word:>16}" for word in lines[-1]), flush=True)
    if arguments.out is not None:
        with arguments.out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
