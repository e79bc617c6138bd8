"""PQCache on one GPU: kernels checked against fp32, then prefill and decode beside full attention and transformers' offloading.

    python scripts/bench_gpu.py --out results/gpu              # one GPU, Mistral-7B's geometry, random fp16 weights
    python scripts/bench_gpu.py --lengths 131072 --layers 16 --minutes 5
    python scripts/bench_gpu.py --tiny --device cpu            # shows that it runs; kernels through Triton's interpreter

Measured in this order, the most telling first: at 128K, then at 32K tokens, full attention (SDPA over a growing buffer), PQCache
over a resident and over a host store, transformers' offloaded cache, PQCache over the block cache, and with its codes on the host
(whose steps wait for the device); after 128K the kernels alone. Then at 32K the same in bf16, in a batch of 8, codecs, one
profiler trace per store; and throughput by batch.

Each row is written to <out>/rows.jsonl as soon as it is measured, one JSON object per line (without --out to
results/reference/bench_gpu). `tpot_ms` is the median decode step, `mode` how it was launched: eager from Python, recorded as a
CUDA graph. A measurement that fails is a row too, with `failed` and `traceback`; what the clock (--minutes) left out has
`left_out`. The measurements run in a process of their own, which is started again where a kernel has ended it.

TT2T: submission to second token, index and storage included, of the second of two prompts; the first warms up. Roofline: weights
at the bandwidth of a copy, plus fetched bytes at the bandwidth of the link, both measured here. K and V stored on the device are
listed beside it. At the end bench_gpu.json, and a PNG where matplotlib is installed, are written to <out>/<device>/. Needs torch,
transformers and this checkout; without triton no kernel is checked.
"""

from __future__ import annotations

import argparse
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

from pqcache.selective import Budget
from scripts.bench.arguments import refuse_below
from scripts.bench.gpu import plan, report
from scripts.bench.gpu.clock import free
from scripts.bench.gpu.method_rows import OFFLOADED
from scripts.bench.gpu.survive import Rows, run_all, supervise


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Checked options; sizes that are not given depend on --tiny."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that it runs, measures nothing")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=None, help="prompt tokens, in order; default 128K, 32K"
    )
    parser.add_argument("--layers", type=int, default=None, help="default 32, Mistral-7B's")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--steps", type=int, default=None, help="decode steps launched from Python")
    parser.add_argument("--replays", type=int, default=None, help="recorded decode steps")
    parser.add_argument("--minutes", type=float, default=8.0, help="the measurements are ended after this")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which one measurement is ended")
    parser.add_argument("--no-checks", action="store_true", help="check no kernel alone")
    parser.add_argument("--out", type=Path, default=None, help="default results/reference, with --tiny results/tiny")
    parser.add_argument("--worker", type=float, default=None, help=argparse.SUPPRESS)  # measure until this clock
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: no CUDA device here; --tiny --device cpu shows that the script runs")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device=cpu: allowed with --tiny only")
    try:
        Budget.parse(args.budget)
    except ValueError as error:
        parser.error(str(error))
    refuse_below(parser, args, layers=1, steps=4, replays=4, lengths=1)
    for name in ("minutes", "limit"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name}={getattr(args, name):g}: allowed is a number above 0")
    sizes: dict[str, Any] = {"lengths": [131_072, 32_768], "layers": 32, "steps": 24, "replays": 64}
    if args.tiny:
        sizes = {"lengths": [600, 300], "layers": 2, "steps": 5, "replays": 8}
    for name, value in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.lengths = list(dict.fromkeys(args.lengths))
    args.base = args.out or Path("results") / ("tiny" if args.tiny else "reference")
    args.rows = args.out or args.base / "bench_gpu"
    return args


def work(args: argparse.Namespace) -> int:
    """Measure in this process what has no row yet."""
    bench = plan.Bench(args, args.rows)

    def lost() -> bool:
        """Whether the device answers no more: after some errors no call of this process does."""
        if args.device != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    return run_all(plan.measurements(args, bench), Rows(args.rows), args.worker, lost=lost, after=free)


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 if a kernel's result is wrong or a measurement failed."""
    started, args = time.time(), arguments(argv)
    if args.worker is not None:
        return work(args)
    rows, until = Rows(args.rows), started + 60 * args.minutes
    rows.begin()
    print(f"rows as they are measured: {rows.file}", flush=True)
    given = sys.argv[1:] if argv is None else argv
    command = [sys.executable, str(Path(__file__).resolve()), *given, "--worker", str(until)]
    names = [one.name for one in plan.measurements(args, plan.Bench(args, args.rows))]
    supervise(command, names, rows, until, args.limit)
    methods = [*plan.labels(args, None), OFFLOADED]
    return report.conclude(rows.read(), args, methods, time.time() - started)


if __name__ == "__main__":
    sys.exit(main())
