"""What KVCrush's grouping adds to a prompt: one layer's prefill attention and pruning under Full, SnapKV, KVCrush, K-Means.

    python scripts/bench_methods.py kvcrush                                    # Mistral-7B's geometry, 8192 tokens
    python scripts/bench_methods.py kvcrush --base h2o --budget 672
    python scripts/bench_methods.py kvcrush --prompt 32768 --device cuda --dtype bfloat16

Rounds are interleaved and medians printed. "grouping" is the pruning's time minus the base's in the same round. KVCrush claims
less than 0.5 % for it, and about 200 % for K-Means (arXiv 2503.00022, section IV-C). Two shares are printed: of Full's
attention alone, and of the base's attention and pruning together. Neither contains projections, feed-forward or decode steps,
so a share of a whole inference is smaller.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from baselines.full import Full
from baselines.kvcrush import KVCrush
from pqcache.measure.machine import device_caption
from pqcache.registry import method_class
from pqcache.selective import Budget, Method
from scripts.bench.arguments import add_machine_options, add_shape_options, prepare, refuse_below
from scripts.bench.layer import AttentionLayer, LayerSize
from scripts.bench.rounds import interleaved, median_ratio, seconds


def methods(base: str, budget: int) -> dict[str, Method]:
    """The rows of the table, at one budget in tokens."""
    tokens = Budget(tokens=budget)
    # KVCrush prunes once, so H2O is measured in the mode that prunes once.
    options = {"mode": "static"} if base == "h2o" else {}
    return {
        "full": Full(),
        base: method_class(base)(budget=tokens, **options),
        f"kvcrush over {base}": KVCrush(budget=tokens, base=base),
        f"k-means over {base}": KVCrush(budget=tokens, base=base, grouping="kmeans"),
    }


def prefill(layer: AttentionLayer, method: Method, qkv: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Seconds of one layer's prompt of queries, keys and values: (all of it, the pruning alone)."""
    q, k, v = qkv
    cache = layer.cache(method, q.shape[2])
    ctx = layer.prompt_context(cache, q.shape[2], q.shape[2])
    whole = seconds(lambda: cache.layers[0].attend(q, k, v, None, ctx), layer.device)
    return whole, cache.ledger.index_build_s


def show(base: str, results: dict[str, list[tuple[float, float]]]) -> None:
    """Print a line per row of the table."""
    whole = {name: [all_s for all_s, _ in rounds] for name, rounds in results.items()}
    pruning = {name: [pruning_s for _, pruning_s in rounds] for name, rounds in results.items()}
    print(
        f"{'':24}{'prefill s':>11}{'to full':>9}{'pruning ms':>12}{'grouping ms':>13}{'of attention':>14}{'of base':>9}"
    )
    for name in results:
        line = f"{name:24}{statistics.median(whole[name]):11.3f}{median_ratio(whole[name], whole['full']):9.3f}"
        line += f"{1e3 * statistics.median(pruning[name]):12.1f}"
        if name not in ("full", base):
            grouping = [a - b for a, b in zip(pruning[name], pruning[base], strict=True)]
            of_full, of_base = (100 * median_ratio(grouping, whole[other]) for other in ("full", base))
            line += f"{1e3 * statistics.median(grouping):13.1f}{of_full:12.2f} %{of_base:7.2f} %"
        print(line)


@torch.no_grad()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench_methods.py kvcrush", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="snapkv", choices=["h2o", "snapkv", "pyramidkv"])
    parser.add_argument("--budget", type=int, default=2048, help="tokens kept per KV head")
    parser.add_argument("--rounds", type=int, default=3)
    add_shape_options(parser)
    add_machine_options(parser, threads=1, json=False)
    args = parser.parse_args(argv)
    refuse_below(parser, args, rounds=1, prompt=1)
    device, dtype = prepare(args)

    layer = AttentionLayer.build(LayerSize(args.heads, args.kv_heads, args.dim, 64), dtype, device)
    qkv = (layer.queries(args.prompt), layer.keys(args.prompt, 0), layer.keys(args.prompt, 1))
    rows = methods(args.base, args.budget)
    results = interleaved({name: lambda m=m: prefill(layer, m, qkv) for name, m in rows.items()}, args.rounds)
    heads = f"{args.heads} / {args.kv_heads} heads, d = {args.dim}"
    print(f"one layer, {heads}, prompt {args.prompt}, {args.budget} tokens kept,")
    print(f"{args.dtype}, batch 1, {args.rounds} rounds, {device_caption(device)}")
    show(args.base, results)
