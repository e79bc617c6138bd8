"""What KVCrush's grouping adds to a prompt: one layer's prefill attention and pruning under Full, SnapKV, KVCrush, K-Means.

    python scripts/bench_kvcrush.py                                            # Mistral-7B's geometry, 8192 tokens
    python scripts/bench_kvcrush.py --base h2o --budget 672
    python scripts/bench_kvcrush.py --prompt 32768 --device cuda --dtype bfloat16

Rounds are interleaved and medians printed. "grouping" is the pruning's time less the base's in the same round, per KVCrush's
claim of less than 0.5 % against about 200 % for K-Means (arXiv 2503.00022, section IV-C). Two shares are given: of Full's
attention alone, and of the base's attention and pruning together. Projections, feed-forward and decode steps are not part
of either, so a share of a whole inference is smaller.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from baselines.full import Full
from baselines.h2o import H2O
from baselines.kvcrush import BASES, KVCrush
from baselines.snapkv import SnapKV
from pqcache.selective import Budget, Method
from pqcache.selective.layer import LayerContext, Step
from pqcache.selective.ledger import Ledger, synchronize
from pqcache.selective.shape import ModelShape


def context(shape: ModelShape, q: torch.Tensor) -> LayerContext:
    """As much of a layer's context as a whole prompt in one block needs."""
    s, nothing = q.shape[2], None
    cache: Any = SimpleNamespace(
        ledger=Ledger(),
        attn="sdpa",
        observers=[],
        watchers=[],
        kernel=sdpa_attention_forward,
        note_resident=lambda: None,
    )
    module: Any = SimpleNamespace(num_key_value_groups=shape.group, is_causal=True, training=False)
    step = Step(decode=False, t=s, past=[0], counts=[s], final=[s], ends_prompt=True, first=True)
    ctx = LayerContext(0, module, cache, q, nothing, nothing, nothing, [], nothing, step)  # type: ignore[arg-type]
    ctx.scaling = shape.d**-0.5
    return ctx


@torch.no_grad()
def prefill(
    method: Method, shape: ModelShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[float, float]:
    """Seconds of one layer's prompt: (all of it, the pruning alone)."""
    layer, ctx = method.layers(shape)[0], context(shape, q)
    synchronize(q.device)
    start = time.perf_counter()
    layer.attend(q, k, v, None, ctx)
    synchronize(q.device)
    return time.perf_counter() - start, ctx.cache.ledger.index_build_s


def methods(base: str, budget: int) -> dict[str, Method]:
    """The rows of the table, at one budget in tokens."""
    tokens = Budget(tokens=budget)
    plain: Method = {
        "h2o": lambda: H2O(budget=tokens, mode="static"),
        "snapkv": lambda: SnapKV(budget=tokens),
        "pyramidkv": lambda: BASES["pyramidkv"](budget=tokens),
    }[base]()
    return {
        "full": Full(),
        base: plain,
        f"kvcrush over {base}": KVCrush(budget=tokens, base=base),
        f"k-means over {base}": KVCrush(budget=tokens, base=base, grouping="kmeans"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="snapkv", choices=list(BASES))
    parser.add_argument("--budget", type=int, default=2048, help="tokens kept per KV head")
    parser.add_argument("--prompt", type=int, default=8192, help="prompt tokens")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    shape = ModelShape(n_layers=1, h=args.heads, h_kv=args.kv_heads, d=args.dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, args.prompt, args.dim, generator=generator).to(args.device, getattr(torch, args.dtype))
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )
    rows = methods(args.base, args.budget)
    whole: dict[str, list[float]] = {name: [] for name in rows}
    pruning: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(args.rounds + 1):
        for name, method in rows.items():
            seconds, own = prefill(method, shape, q, k, v)
            if round_:  # the first round warms up
                whole[name].append(seconds)
                pruning[name].append(own)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{platform.machine()} CPU"
    print(
        f"one layer, {args.heads} / {args.kv_heads} heads, d = {args.dim}, prompt {args.prompt}, {args.budget} tokens kept,"
    )
    print(f"{args.dtype}, batch 1, {args.rounds} rounds, {device}, {args.threads} thread(s)")
    print(
        f"{'':24}{'prefill s':>11}{'to full':>9}{'pruning ms':>12}{'grouping ms':>13}{'of attention':>14}{'of base':>9}"
    )
    for name in rows:
        ratio = statistics.median(a / b for a, b in zip(whole[name], whole["full"], strict=True))
        line = (
            f"{name:24}{statistics.median(whole[name]):11.3f}{ratio:9.3f}{1e3 * statistics.median(pruning[name]):12.1f}"
        )
        if name not in ("full", args.base):
            extra = [a - b for a, b in zip(pruning[name], pruning[args.base], strict=True)]
            of_full, of_base = (
                100 * statistics.median(a / b for a, b in zip(extra, whole[reference], strict=True))
                for reference in ("full", args.base)
            )
            line += f"{1e3 * statistics.median(extra):13.1f}{of_full:12.2f} %{of_base:7.2f} %"
        print(line)


if __name__ == "__main__":
    main()
