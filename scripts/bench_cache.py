"""Bytes that the policies of the block cache move per decode step, on recorded selections.

    python run.py -m task=pocket task.length=4096 limit=2 method=pqcache budget=0.2,0.1 diagnostics=trace
    python scripts/bench_cache.py outputs                    # every trace below the folder; an eighth of each prompt is cached
    python scripts/bench_cache.py outputs --cache-tokens 512 --cache-block 32 --cache-topk 32 --policies none lru paying

Each layer's K and V are random numbers of the model's geometry in a store of each policy. The store then reads, step by step,
what the trace says; what it returns must equal what the host store returns. Bytes are those that the stores report. "worst" is
the largest ratio to `none` of all bytes moved up to a step, over every layer and step: above 1, a policy moves more than none.
"fetch ms" is the time of a read with its table work and copies on this machine: median over layers and steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pqcache.diagnostics.trace import SUFFIX, Trace
from pqcache.measure.machine import device_caption
from pqcache.registry import method_class
from pqcache.store.base import RetrievalStore
from pqcache.store.block_cache import POLICIES
from scripts.bench.rounds import progress


@dataclass
class Moved:
    """What the stores of one policy moved."""

    steps: int = 0  # decode steps of whole models
    fetch: int = 0  # bytes
    refill: int = 0
    lookups: int = 0
    hits: int = 0
    worst: float = 0.0  # bytes up to a step to those of no cache, the largest
    seconds: list[float] = field(default_factory=list)  # of each read

    def add(self, other: Moved) -> None:
        for name in ("steps", "fetch", "refill", "lookups", "hits"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst = max(self.worst, other.worst)
        self.seconds += other.seconds


def make_store(policy: str, trace: Trace, options: dict[str, int], moved: Counter[str]) -> RetrievalStore:
    """The store that PQCache makes for this policy, for the trace's sinks."""
    method = method_class("pqcache")(
        store="block_cache", cache_policy=policy, n_sink=trace.header["sinks"], **options
    )  # fmt: skip

    def count(kind: str, nbytes: int) -> None:
        moved[kind] += nbytes

    return method.make_store(1, count)  # type: ignore[no-any-return, attr-defined]


def replay_layer(trace: Trace, at: int, policies: list[str], options: dict[str, int]) -> dict[str, Moved]:
    """What each policy moves in layer `at`. Raises RuntimeError where a store returns other rows than the host store."""
    shape, prompt = trace.shape, trace.header["prompt_tokens"]
    generator = torch.Generator().manual_seed(at)

    def draw(t: int) -> list[torch.Tensor]:
        return [torch.randn(1, shape.h_kv, t, shape.d, generator=generator) for _ in "kv"]

    counts: dict[str, Counter[str]] = {policy: Counter() for policy in ("none", *policies)}
    stores = {policy: make_store(policy, trace, options, moved) for policy, moved in counts.items()}
    k, v = draw(prompt)
    for store in stores.values():
        store.load(k, v, [prompt])
    result = {policy: Moved() for policy in counts}
    for choice in trace.layer(at):
        new = draw(1)
        for store in stores.values():
            store.append(*new)
        if choice.indices is None:
            continue
        expected: tuple[torch.Tensor, ...] = ()
        real = (choice.indices >= 0).expand(-1, max(choice.indices.shape[1], shape.h_kv), -1)
        for policy, store in stores.items():
            start = time.perf_counter()
            got = store.fetch(choice.indices, shape.group)  # type: ignore[attr-defined]
            result[policy].seconds.append(time.perf_counter() - start)
            expected = expected or got
            if not all(torch.equal(a[real], b[real]) for a, b in zip(got, expected, strict=True)):
                raise RuntimeError(f"{trace.path}: layer {at}: {policy} returns other rows than the host store")
            if store.served is not None:
                result[policy].lookups += sum(store.served.lookups)
                result[policy].hits += sum(store.served.hits)
        base = counts["none"]["fetch"]
        for policy, moved in counts.items():
            result[policy].worst = max(result[policy].worst, (moved["fetch"] + moved["refill"]) / max(1, base))
    for policy, moved in counts.items():
        result[policy].fetch, result[policy].refill = moved["fetch"], moved["refill"]
    return result


def replay(trace: Trace, policies: list[str], options: dict[str, int]) -> dict[str, Moved]:
    """What each policy moves over all layers of a trace."""
    total = {policy: Moved() for policy in ("none", *policies)}
    for at in range(trace.header["dense_layers"], trace.shape.n_layers):
        for policy, moved in replay_layer(trace, at, policies, options).items():
            total[policy].add(moved)
    for moved in total.values():
        moved.steps = trace.steps
    return total


def show(title: str, families: dict[str, dict[str, Moved]]) -> dict[str, Any]:
    """Print the table of one method and budget, a row per family and policy and their sum; returns its figures."""
    families = {**families, "all": {}}
    for family, by_policy in list(families.items())[:-1]:
        for policy, moved in by_policy.items():
            families["all"].setdefault(policy, Moved()).add(moved)
        assert family != "all"
    print(title)
    columns = ("policy", "fetch KiB", "refill KiB", "to none", "worst", "hit rate", "fetch ms")
    print(f"{'':20} {columns[0]:>8}" + "".join(f" {name:>10}" for name in columns[1:]))
    figures: dict[str, Any] = {}
    for family, by_policy in families.items():
        for policy, moved in by_policy.items():
            whole = moved.fetch + moved.refill
            row = figures.setdefault(family, {})[policy] = {
                "steps": moved.steps,
                "fetch_kib_per_step": moved.fetch / 1024 / max(1, moved.steps),
                "refill_kib_per_step": moved.refill / 1024 / max(1, moved.steps),
                "to_none": whole / max(1, by_policy["none"].fetch),
                "worst_prefix": moved.worst,
                "hit_rate": moved.hits / max(1, moved.lookups),
                "fetch_ms": 1e3 * statistics.median(moved.seconds or [0.0]),
            }
            print(
                f"{family:20} {policy:>8} {row['fetch_kib_per_step']:10.0f} {row['refill_kib_per_step']:10.0f}"
                f" {row['to_none']:10.3f} {row['worst_prefix']:10.3f} {row['hit_rate']:10.3f} {row['fetch_ms']:10.3f}"
            )
    print()
    return figures


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help=f"a folder with *{SUFFIX} files, at any depth")
    parser.add_argument("--policies", nargs="+", default=["lru", "lfu", "paying"], choices=POLICIES)
    parser.add_argument(
        "--cache-tokens", type=int, help="tokens on the device per layer; default: an eighth of each prompt"
    )
    parser.add_argument("--cache-block", type=int, default=32)
    parser.add_argument("--cache-topk", type=int, default=32)
    parser.add_argument("--documents", type=int, help="at most so many traces per family, method and budget")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    args.files = sorted(args.folder.rglob(f"*{SUFFIX}"))
    if not args.files:
        parser.error(f"{args.folder}: has no *{SUFFIX} files; run.py with diagnostics=trace writes them")
    if args.cache_block < 1 or args.cache_topk < 1 or (args.cache_tokens or args.cache_block) < args.cache_block:
        parser.error("--cache-block, --cache-topk: allowed is >= 1; --cache-tokens: >= --cache-block")
    return args


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    groups: dict[tuple[str, float], dict[str, dict[str, Moved]]] = {}
    policies = [policy for policy in args.policies if policy != "none"]
    seen: Counter[tuple[str, float, str]] = Counter()
    for number, path in enumerate(args.files):
        trace = Trace(path)
        sample = trace.header["sample"]
        key, family = (sample["method"]["name"], sample["budget"]), sample["task"].removeprefix("pocket_")
        seen[*key, family] += 1
        if args.documents is not None and seen[*key, family] > args.documents:
            continue
        progress(f"trace {number + 1}/{len(args.files)}  ")
        tokens = args.cache_tokens or max(args.cache_block, trace.header["prompt_tokens"] // 8)
        options = {"cache_tokens": tokens, "cache_block": args.cache_block, "cache_topk": args.cache_topk}
        by_policy = groups.setdefault(key, {}).setdefault(family, {})
        for policy, moved in replay(trace, policies, options).items():
            by_policy.setdefault(policy, Moved()).add(moved)
    progress(" " * 40)
    cached = f"{args.cache_tokens} tokens" if args.cache_tokens else "an eighth of each prompt"
    print(f"{cached} cached; blocks of {args.cache_block} tokens, {args.cache_topk} to the policy per step (lru, lfu)")
    caption = device_caption(torch.device("cpu"))
    print(f"fp32; KiB per decode step of all layers; {caption}\n")
    figures = {
        f"{method} {budget}": show(f"{method}, budget {budget}", families)
        for (method, budget), families in sorted(groups.items())
    }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
