"""PQCache on one GPU: kernels checked against fp32, then prefill and decode beside full attention and transformers' offloading.

    python scripts/bench_gpu.py                                # one GPU, Mistral-7B's geometry, random fp16 weights
    python scripts/bench_gpu.py --lengths 32768 131072 --layers 16 --minutes 5
    python scripts/bench_gpu.py --tiny --device cpu            # shows that it runs; kernels through Triton's interpreter

Rows: full attention (SDPA over a growing buffer), PQCache over a resident and over a host store, transformers' offloaded
cache; at the first length also PQCache over the block cache, and with its codes on the host (whose steps wait for the device).
`step` is a decode step launched from Python, `recorded` the same step replayed as a CUDA graph (full attention then uses the
same split kernel). TT2T: submission to second token, index and storage included, of the second of two prompts; the first warms
up. Roofline: weights at the bandwidth of a copy, plus fetched bytes at the bandwidth of the link, both measured here. K and V
stored on the device are listed beside it. Writes bench_gpu.json, and a PNG where matplotlib is installed, to <out>/<device>/.
Needs torch, transformers and this checkout; without triton no kernel is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Read when triton is imported.
if "cpu" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pqcache.device.switch import triton_installed
from pqcache.selective import Budget
from scripts.bench.arguments import refuse_below
from scripts.bench.gpu import method_rows, report
from scripts.bench.gpu.clock import Machine, free


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Checked options; sizes that are not given depend on --tiny."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that it runs, measures nothing")
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="prompt tokens; default 32K, 64K, 128K")
    parser.add_argument("--layers", type=int, default=None, help="default 32, Mistral-7B's")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--steps", type=int, default=None, help="decode steps launched from Python")
    parser.add_argument("--replays", type=int, default=None, help="recorded decode steps")
    parser.add_argument("--minutes", type=float, default=5.5, help="no further length is begun after this")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="default results/reference, with --tiny results/tiny")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: no CUDA device here; --tiny --device cpu shows that the script runs")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device=cpu: allowed with --tiny only")
    try:
        Budget.parse(args.budget)
    except ValueError as error:
        parser.error(str(error))
    refuse_below(parser, args, layers=1, steps=4, replays=4)
    sizes: dict[str, Any] = {"lengths": [32_768, 65_536, 131_072], "layers": 32, "steps": 24, "replays": 64}
    if args.tiny:
        sizes = {"lengths": [300, 600], "layers": 2, "steps": 5, "replays": 8}
    sizes["out"] = Path("results") / ("tiny" if args.tiny else "reference")
    for name, value in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def caption_of(facts: dict[str, Any], args: argparse.Namespace) -> str:
    """Machine, versions and sizes in one sentence."""
    return (
        f"{facts['device']}; torch {facts['torch']}, triton {facts.get('triton', 'not installed')}, transformers"
        f" {facts['transformers']}; copy {facts['copy_gb_s']:.0f} GB/s (read + written), link {facts['link_gb_s']:.1f} GB/s;"
        f" Mistral geometry{' (tiny)' if args.tiny else ''}, {args.layers} layers, random weights, batch 1, budget {args.budget}"
    )


def check_kernels(machine: Machine, tiny: bool) -> dict[str, dict[str, Any]]:
    """The checks' rows; none where triton is missing."""
    if not triton_installed():
        print("triton is not installed: no kernels to check, plain torch is measured")
        return {}
    from scripts.bench.gpu.kernels import KernelChecks

    print("kernels, against fp32 torch on fresh random data")
    dtype = torch.float16 if machine.cuda else torch.float32
    return KernelChecks(machine, 400 if tiny else 131_072, dtype).run()


def measure(args: argparse.Namespace, machine: Machine, figures: dict[str, Any], started: float) -> None:
    """Fill figures["lengths"] and figures["targets"], length by length until the minutes are over."""
    model = method_rows.build_model(args, machine.device)
    every, once = method_rows.methods(args, machine.cuda)
    for s in args.lengths:
        if figures["lengths"] and time.perf_counter() - started > 60 * args.minutes:
            print(f"{s} tokens: left out, {args.minutes} minutes are over")
            continue
        makers = every if figures["lengths"] else {**every, **once}
        table = figures["lengths"][str(s)] = method_rows.measure_length(model, machine, makers, s, args)
        if not any("failed" in table[name] for name in every):
            figures["targets"] += report.targets(table, s)


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 if a kernel's result is wrong."""
    started = time.perf_counter()
    args = arguments(argv)
    machine = Machine(torch.device(args.device), args.tiny)
    facts = machine.describe()
    caption = caption_of(facts, args)
    print(caption)
    figures: dict[str, Any] = {"caption": caption, "machine": facts, "tiny": args.tiny, "lengths": {}, "targets": []}
    if not args.no_checks and (checked := check_kernels(machine, args.tiny)):
        figures["kernels"] = checked
    free()
    measure(args, machine, figures, started)
    print()
    report.judge(figures["targets"], args.tiny)
    every = [row for table in figures["lengths"].values() for row in table.values()]
    for reason in sorted({row["not_recorded"] for row in every if "not_recorded" in row}):
        print(f"steps not recorded: {reason}")
    folder = args.out / machine.slug
    folder.mkdir(parents=True, exist_ok=True)
    figures["seconds"] = time.perf_counter() - started
    (folder / "bench_gpu.json").write_text(json.dumps(figures, indent=1))
    report.draw(figures, folder)
    print(f"{caption}\n{figures['seconds']:.0f} s; written to {folder}")
    wrong = [name for name, row in figures.get("kernels", {}).items() if not row["ok"]]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
