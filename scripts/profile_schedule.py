"""Profile one layer's prefill, its copy to the host and the clustering of its keys, for method.max_iter=adaptive.

    python scripts/profile_schedule.py --model mistral-7b-instruct-v0.2 --dtype float16 --device cuda
    python scripts/profile_schedule.py --shape 32,8,128,4096,14336 --dtype float32 --device cpu --threads 2
    python scripts/profile_schedule.py --shape 4,2,64,256,768 --lengths 512 1024 2048 --rounds 1 --figure schedule.png

A decoder layer with random weights prefills prompts of each length; a quadratic is fitted to its times. Random keys are
clustered in 3 and in 9 rounds; a line is fitted to the cost of 3 rounds and to that of each further one. Every time is the
fastest of its repetitions, since other jobs only add to it. A warning says which times still contradict each other. T(x) is
the largest number of rounds, from 3 to 300, that ends within one layer's prefill (PQCache, section 3.3). The profile is stored
in <cache-dir>/schedule by machine and geometry, where `method=pqcache method.max_iter=adaptive` reads it.

Without an accelerator clustering and prefill use the same cores, so neither runs beside the other. The profile then says what
share of a prefill clustering takes. The picture (PQCache's Figure 7) needs matplotlib.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pqcache.measure.geometries import GEOMETRIES, geometry
from pqcache.measure.machine import device_caption
from pqcache.pq.profile import FEW, MANY, layer_config, measure
from pqcache.pq.schedule import CACHE_DIR, CostModel, Geometry, save_cost
from scripts.bench.arguments import add_machine_options, prepare, refuse_below

LENGTHS = (1024, 2048, 4096, 8192)


def contradictions(points: dict[str, Any], cost: CostModel) -> list[str]:
    """One line per pair of times that cannot be right: other jobs ran, or there were too few repetitions."""
    lines = []
    lengths, compute = points["lengths"], points["compute_s"]
    for i in range(1, len(lengths)):
        if compute[i] <= compute[i - 1]:
            lines.append(f"{lengths[i]} tokens were prefilled sooner than {lengths[i - 1]}")
    for x, few, many in zip(points["keys"], points["few_s"], points["many_s"], strict=True):
        if many <= few:
            lines.append(f"{x} keys were clustered in {MANY} rounds sooner than in {FEW}: T({x}) = {cost.rounds(x)}")
    return lines


def draw(cost: CostModel, points: dict[str, list[float]], caption: str, path: Path) -> None:
    """Draw PQCache's Figure 7: what runs during one layer's prefill, over the length of the prompt."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = points["lengths"]
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    a2, a1, a0 = cost.compute
    fine = [lengths[0] + (lengths[-1] - lengths[0]) * i / 60 for i in range(61)]
    rounds = [cost.rounds(int(x)) for x in fine]
    axis.plot(fine, [1e3 * ((a2 * x + a1) * x + a0) for x in fine], color="#1f4e9c", label="one layer's prefill")
    axis.plot(lengths, [1e3 * y for y in points["compute_s"]], "o", color="#1f4e9c")
    axis.plot(
        lengths, [1e3 * y for y in points["offload_s"]], "s--", color="#3a8f3a", label="copy of its K and V to the host"
    )
    for key, count, colour in (("few_s", FEW, "#d98200"), ("many_s", MANY, "#b03030")):
        axis.plot(
            points["keys"], [1e3 * y for y in points[key]], "^-", color=colour, label=f"clustering, {count} rounds"
        )
    (c1, c0), (e1, e0) = cost.base, cost.per_round
    own = [1e3 * (c1 * x + c0 + (t - FEW) * (e1 * x + e0)) for x, t in zip(fine, rounds, strict=True)]
    span = f"{rounds[0]}" if len(set(rounds)) == 1 else f"{min(rounds)} to {max(rounds)}"
    axis.plot(fine, own, ":", color="black", label=f"clustering, adaptive ({span} rounds)")
    axis.set_xlabel("prompt length (tokens)")
    axis.set_ylabel("ms per layer")
    # Where the same cores do both, clustering is a hundredth of a prefill.
    axis.set_yscale("log")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    axis.set_title(caption, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def show(cost: CostModel, points: dict[str, Any]) -> None:
    """Print the profile, length by length."""
    print(
        f"{'tokens':>8} {'layer ms':>9} {'to host ms':>10} {'3 rounds ms':>11} {'per round':>9} {'share of 3':>10} {'T':>4}"
    )
    for i, x in enumerate(points["lengths"]):
        layer, few, many = (1e3 * points[key][i] for key in ("compute_s", "few_s", "many_s"))
        print(
            f"{x:8d} {layer:9.2f} {1e3 * points['offload_s'][i]:10.2f} {few:11.2f} {(many - few) / (MANY - FEW):9.2f}"
            f" {few / layer:10.4f} {cost.rounds(x):4d}"
        )
    shares = [few / layer for few, layer in zip(points["few_s"], points["compute_s"], strict=True)]
    print(f"mean share of a layer's prefill that 3 rounds take: {statistics.mean(shares):.4f}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help=f"a geometry by name ({', '.join(GEOMETRIES)}), a hub id or a folder")
    model.add_argument(
        "--shape", help="query heads, KV heads, head dimension, hidden size, MLP size: 32,8,128,4096,14336"
    )
    add_machine_options(parser, device="cuda" if torch.cuda.is_available() else "cpu", json=False)
    parser.add_argument("--kmeans-device", default="cpu", choices=["cpu", "cuda"], help="as method.kmeans_device")
    parser.add_argument("--m", type=int, default=2)
    parser.add_argument("--b", type=int, default=6)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="at least three")
    parser.add_argument("--rounds", type=int, default=3, help="timed repetitions, after one that warms up")
    parser.add_argument("--cache-dir", type=Path, default=CACHE_DIR)
    parser.add_argument("--figure", type=Path, default=None, help="draw Figure 7 here")
    args = parser.parse_args(argv)
    if len(set(args.lengths)) < 3 or min(args.lengths) <= 2**args.b:
        parser.error(f"--lengths={args.lengths}: allowed are three or more lengths above 2^b={2**args.b}")
    refuse_below(parser, args, rounds=1)
    if "cuda" in (args.device.split(":")[0], args.kmeans_device) and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --device cpu --kmeans-device cpu")
    try:
        args.config = requested_config(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def requested_config(args: argparse.Namespace) -> LlamaConfig:
    """A LlamaConfig of one layer of the requested size."""
    if args.shape is not None:
        try:
            h, h_kv, d, hidden, intermediate = map(int, args.shape.split(","))
        except ValueError:
            raise ValueError(f"--shape={args.shape}: expected five integers, such as 32,8,128,4096,14336") from None
        size = Geometry(h, h_kv, d, hidden, intermediate, args.dtype, args.m, args.b, args.kmeans_device)
    else:
        size = Geometry.of(geometry(args.model), args.dtype, m=args.m, b=args.b, kmeans_device=args.kmeans_device)
    if size.d % args.m or size.h % size.h_kv:
        shape = f"{size.h},{size.h_kv},{size.d},{size.hidden},{size.intermediate}"
        raise ValueError(f"--shape={shape}: --m must divide the head dimension, KV heads the query heads")
    return layer_config(size)


@torch.no_grad()
def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device, dtype = prepare(args)
    config, lengths = args.config, sorted(set(args.lengths))
    where = torch.device(args.kmeans_device)
    cost, points = measure(config, lengths, dtype, device, where, m=args.m, b=args.b, repeat=args.rounds)
    shape = Geometry.of(config, args.dtype, m=args.m, b=args.b, kmeans_device=where.type)
    path = save_cost(cost, shape, device, args.cache_dir, points)
    caption = (
        f"{shape.h}/{shape.h_kv} heads of {shape.d}, hidden {shape.hidden}, {shape.dtype}, m={shape.m}, b={shape.b}"
    )
    caption += f"\n{device_caption(device)}; clustering on {where.type}; fastest of {args.rounds}"
    print(caption)
    show(cost, points)
    for line in contradictions(points, cost):
        print(f"warning: {line}; measure again on a quiet machine, or with more --rounds", file=sys.stderr)
    print(path)
    if args.figure is not None:
        draw(cost, points, caption, args.figure)
        print(args.figure)
    return path


if __name__ == "__main__":
    main()
