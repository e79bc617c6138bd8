"""The CPU kernels of PQCache against what one would use instead, on the same data in the same run.

    python scripts/bench_kernels.py                                    # all parts, Mistral-7B's layer geometry, fp32
    python scripts/bench_kernels.py --threads 2 --rounds 9 --json kernels.json
    python scripts/bench_kernels.py --parts kmeans --quick             # one part; small sizes, to see that it runs

K-Means: one layer's 16 groups (8 KV heads x 2 sub-spaces), 5 rounds, the same init, against scikit-learn's Lloyd and faiss with
every point used; floor = the matrix products alone. Scoring: all 32 query heads' top-k per KV head, against exact products +
group softmax + top-k and against faiss IndexPQ (which ranks per query head and knows no group). Decode: one whole attention
step of PQCache at a budget, index look-up, encoding and storing of the new token included, against attention over the full
cache. Rounds are interleaved and medians compared, so that a busy machine slows all alike; a ratio is the median over the
rounds of our time / the fastest peer's time in that round. Needs scikit-learn and faiss (the dev extra).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from pqcache import kernels
from pqcache.pq import PQCache, codebook
from pqcache.pq.kmeans import initial_positions, kmeans
from pqcache.selective import Budget
from pqcache.selective.layer import LayerContext, Step
from pqcache.selective.ledger import Ledger
from pqcache.selective.retrieval_layer import RetrievalLayer
from pqcache.selective.shape import ModelShape
from pqcache.store.lanes import Lanes

SHAPE = ModelShape(n_layers=1, h=32, h_kv=8, d=128)  # one layer of Mistral-7B
M, B, ROUNDS, SINKS = 2, 6, 5, 32
GROUP_TOKENS = 32_640

Results = dict[str, list[float]]


def interleave(calls: Mapping[str, Callable[[], Any]], rounds: int) -> Results:
    """Seconds of each call in each round, after one warm-up round."""
    times: Results = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: Results, ours: str, peers: list[str]) -> float:
    return statistics.median(
        mine / min(others) for mine, *others in zip(times[ours], *(times[p] for p in peers), strict=True)
    )


def show(title: str, times: Results, ours: str, peers: list[str], note: Mapping[str, str]) -> float:
    result = ratio(times, ours, peers)
    print(f"\n{title}")
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"  {name:<34} {middle * 1e3:>10.2f} ms   {note.get(name, '')}")
    print(f"  ratio to the fastest of {', '.join(peers)}: {result:.3f}")
    return result


class Machine:
    """What this machine reaches by itself: the ceiling that achieved rates are compared with."""

    def __init__(self, quick: bool) -> None:
        size = 1 << (22 if quick else 26)
        source, target = torch.ones(size), torch.empty(size)
        side = 512 if quick else 2048
        a = torch.randn(side, side)
        times = interleave({"copy": lambda: target.copy_(source), "matmul": lambda: a @ a}, 5)
        self.copy = 2 * 4 * size / min(times["copy"]) / 1e9
        self.matmul = 2 * side**3 / min(times["matmul"]) / 1e9

    def bandwidth(self, size: float, seconds: float) -> str:
        rate = size / seconds / 1e9
        return f"{rate:6.1f} GB/s, {100 * rate / self.copy:4.0f} % of copy"

    def compute(self, flops: float, seconds: float) -> str:
        rate = flops / seconds / 1e9
        return f"{rate:6.1f} GFLOP/s, {100 * rate / self.matmul:4.0f} % of matmul"


def real_keys(groups: int, tokens: int) -> torch.Tensor:
    """Post-RoPE keys of the embedded model on its own prompts, all layers and heads one after the other: (groups, tokens, 64)."""
    from baselines.full import Full
    from pqcache.embedded import load_model, load_tokenizer, needle_pocket
    from pqcache.selective import SelectiveCache, attach

    model, tokenizer = load_model(dtype=torch.float32), load_tokenizer()
    pieces: list[torch.Tensor] = []
    seed = 0
    while sum(len(p) for p in pieces) < groups * tokens:
        sample = needle_pocket.make_samples(1, 4000, seed, tokenizer)[0]
        ids = torch.tensor([tokenizer(sample["prompt"])["input_ids"]])[:, :4096]
        with attach(model), torch.no_grad():
            cache = SelectiveCache(model, Full())
            cache.begin([ids.shape[1]])
            model(ids, past_key_values=cache, logits_to_keep=1)
        for layer in cache.layers:
            keys = layer.store.view()[0]  # type: ignore[attr-defined]
            pieces.append(codebook.split(keys, keys.shape[-1] // 64).flatten(0, 1))
        seed += 1
    return torch.cat(pieces)[: groups * tokens].view(groups, tokens, 64).contiguous()


def inertia(x: torch.Tensor, centroids: torch.Tensor) -> float:
    total = 0.0
    for points, centers in zip(x, centroids, strict=True):
        total += torch.cdist(points.double(), centers.double()).square().amin(1).sum().item()
    return total


def bench_kmeans(name: str, x: torch.Tensor, machine: Machine, rounds: int) -> tuple[float, float]:
    """Time and inertia ratios of our K-Means on x (G, N, d)."""
    import faiss
    from sklearn.cluster import KMeans

    g, n, d = x.shape
    c = 2**B
    init = x[:, initial_positions(n, c, 0)].contiguous()
    faiss.omp_set_num_threads(torch.get_num_threads())
    found: dict[str, Any] = {}

    def ours() -> None:
        found["ours"] = kmeans(x, init, ROUNDS, tol=0).centroids

    def sklearn() -> None:
        fits = (
            KMeans(c, init=i.numpy(), n_init=1, max_iter=ROUNDS, tol=0, algorithm="lloyd").fit(p.numpy())
            for p, i in zip(x, init, strict=True)
        )
        found["scikit-learn"] = torch.stack([torch.from_numpy(fit.cluster_centers_) for fit in fits])

    def faiss_kmeans() -> None:
        centers = []
        for points, start in zip(x, init, strict=True):
            run = faiss.Kmeans(d, c, niter=ROUNDS, max_points_per_centroid=n)
            run.train(points.numpy(), init_centroids=start.numpy())
            run.index.search(points.numpy(), 1)  # the codes, which the others return too
            centers.append(torch.from_numpy(run.centroids.copy()))
        found["faiss"] = torch.stack(centers)

    def floor() -> None:
        for _ in range(ROUNDS + 1):
            torch.bmm(x, init.transpose(1, 2))

    calls: dict[str, Callable[[], Any]] = {"ours": ours, "scikit-learn": sklearn, "faiss": faiss_kmeans}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn says that 5 rounds did not converge
        times = interleave({**calls, "matrix products alone": floor}, rounds)
    flops = 2.0 * g * n * d * c * (ROUNDS + 1)
    note = {who: machine.compute(flops, statistics.median(t)) for who, t in times.items()}
    time_ratio = show(
        f"K-Means, {name}: {g} groups of {n} x {d}, {c} centroids, T = {ROUNDS}", times, "ours", list(calls)[1:], note
    )
    values = {who: inertia(x, centers) for who, centers in found.items()}
    quality = values["ours"] / min(values.values())
    print(
        "  inertia "
        + ", ".join(f"{who} {value:.6g}" for who, value in values.items())
        + f"; ratio to the best {quality:.5f}"
    )
    return time_ratio, quality


def bench_score(k: int, candidates: int, machine: Machine, rounds: int) -> float:
    """Ratio of scoring + top-k."""
    import faiss

    gen = torch.Generator().manual_seed(1)
    h_kv, g, d = SHAPE.h_kv, SHAPE.group, SHAPE.d
    keys = torch.randn(1, h_kv, candidates, d, generator=gen)
    q = torch.randn(1, SHAPE.h, 1, d, generator=gen)
    points = codebook.split(keys, M)
    centroids = kmeans(points, points[:, : 2**B], ROUNDS).centroids.view(1, h_kv, M, 2**B, d // M)
    codes = codebook.encode(keys, centroids).to(torch.uint8)
    from pqcache.kernels.codes import top_tokens

    indexes = []
    for head in range(h_kv):
        index = faiss.IndexPQ(d, M, B, faiss.METRIC_INNER_PRODUCT)
        index.train(keys[0, head, :4096].numpy())
        index.add(keys[0, head].numpy())
        indexes.append(index)
    faiss.omp_set_num_threads(torch.get_num_threads())
    grouped = q.view(1, h_kv, g, d)

    def ours() -> torch.Tensor | None:
        return top_tokens(codebook.tables(q, centroids) * d**-0.5, codes, 0, [candidates], [k])

    def exact() -> torch.Tensor:
        logits = (grouped @ keys.transpose(-1, -2)) * d**-0.5
        return logits.softmax(-1).sum(2).topk(k, sorted=False).indices

    def faiss_pq() -> None:
        for head, index in enumerate(indexes):
            index.search(grouped[0, head].numpy(), k)

    peers: dict[str, Callable[[], Any]] = {"exact + group softmax + top-k": exact, "faiss IndexPQ": faiss_pq}
    times = interleave({"ours": ours, **peers}, rounds)
    note = {
        "ours": machine.bandwidth(codes.numel(), statistics.median(times["ours"])) + " (codes)",
        "exact + group softmax + top-k": machine.bandwidth(
            keys.numel() * 4, statistics.median(times["exact + group softmax + top-k"])
        ),
    }
    return show(
        f"Scoring + top-k: k = {k} of {candidates} candidates, {SHAPE.h} query heads", times, "ours", list(peers), note
    )


class Decoder:
    """One layer under PQCache, filled with random K and V."""

    def __init__(self, s: int, budget: Budget) -> None:
        self.gen = torch.Generator().manual_seed(2)
        self.s = s
        self.k, self.v = self.draw(SHAPE.h_kv, s), self.draw(SHAPE.h_kv, s)
        self.ledger = Ledger()
        layer = PQCache(budget=budget, m=M, b=B, n_sink=SINKS).make_layer(0, SHAPE)
        assert isinstance(layer, RetrievalLayer)
        self.layer = layer
        self.length = s
        layer.settle(self.k, self.v, [s], self._context(decode=False))

    def draw(self, heads: int, t: int) -> torch.Tensor:
        return torch.randn(1, heads, t, SHAPE.d, generator=self.gen)

    def _context(self, decode: bool) -> LayerContext:
        self.ledger.decoding = decode
        step = Step(decode, 1, [self.length - (not decode)], [1], [self.length], ends_prompt=not decode, first=False)
        nothing: Any = None
        cache: Any = SimpleNamespace(ledger=self.ledger, lanes=Lanes(), observers=[], watchers=[])
        ctx = LayerContext(0, nothing, cache, nothing, nothing, nothing, None, [], nothing, step)
        ctx.scaling = SHAPE.d**-0.5
        return ctx

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = self.layer.decode(q, k, v, self._context(decode=True))
        self.ledger.end_step()
        self.length += 1
        return out


def bench_decode(s: int, budget: Budget, machine: Machine, rounds: int) -> float:
    """Ratio of one decode attention step of one layer."""
    ours = Decoder(s, budget)
    q, k, v = ours.draw(SHAPE.h, 1), ours.draw(SHAPE.h_kv, 1), ours.draw(SHAPE.h_kv, 1)
    full_k, full_v = ours.k, ours.v
    wide_k, wide_v = (x.repeat_interleave(SHAPE.group, 1) for x in (full_k, full_v))
    grouped = q.view(1, SHAPE.h_kv, SHAPE.group, SHAPE.d)
    scale = SHAPE.d**-0.5

    def products() -> torch.Tensor:
        return ((grouped @ full_k.transpose(-1, -2)) * scale).softmax(-1) @ full_v

    peers: dict[str, Callable[[], Any]] = {
        "SDPA, enable_gqa": lambda: F.scaled_dot_product_attention(q, full_k, full_v, enable_gqa=True),
        "SDPA, heads repeated beforehand": lambda: F.scaled_dot_product_attention(q, wide_k, wide_v),
        "SDPA, group as query tokens": lambda: F.scaled_dot_product_attention(grouped, full_k, full_v),
        "grouped matrix products": products,
    }
    times = interleave({"PQCache": lambda: ours.step(q, k, v), **peers}, rounds)
    plan = ours.layer.plans[0]
    attended = SINKS + plan.local + plan.k + 1
    row = 2 * SHAPE.h_kv * SHAPE.d * 4
    note = {"PQCache": machine.bandwidth(attended * row, statistics.median(times["PQCache"])) + f", {attended} tokens"}
    note |= {who: machine.bandwidth(s * row, statistics.median(times[who])) for who in peers if "repeated" not in who}
    return show(f"Decode step, s = {s}, budget {budget}", times, "PQCache", list(peers), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=["kmeans", "score", "decode"], default=["kmeans", "score", "decode"]
    )
    parser.add_argument("--threads", type=int, default=None, help="default: what torch chooses")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768, 65_536, 131_072], help="decode lengths")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if not kernels.installed():
        print("numba is not installed: plain torch is measured")
    machine = Machine(args.quick)
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"copy {machine.copy:.1f} GB/s, matmul {machine.matmul:.0f} GFLOP/s"
    )
    shrink = 32 if args.quick else 1
    found: dict[str, float] = {}

    def worst(name: str, value: float) -> None:
        found[name] = max(value, found.get(name, 0.0))

    with torch.no_grad():
        if "kmeans" in args.parts:
            tokens = GROUP_TOKENS // shrink
            gaussian = torch.randn(16, tokens, 64, generator=torch.Generator().manual_seed(0))
            for name, data in (("Gaussian", gaussian), ("post-RoPE keys", real_keys(16, tokens))):
                seconds, quality = bench_kmeans(name, data, machine, args.rounds)
                worst("kmeans_time_ratio", seconds)
                worst("kmeans_inertia_ratio", quality)
        if "score" in args.parts:
            for k, candidates in ((1632, 31_008), (3264, 29_376)):
                worst("score_time_ratio", bench_score(k // shrink, candidates // shrink, machine, args.rounds))
        if "decode" in args.parts:
            for s in args.lengths:
                s //= shrink
                worst(f"decode_ratio_{s // 1024}k", bench_decode(s, Budget(ratio=0.1), machine, args.rounds))
                if s >= 2 * 2048:
                    worst(f"decode_ratio_{s // 1024}k_2048", bench_decode(s, Budget(tokens=2048), machine, args.rounds))
    print("\n" + "\n".join(f"{name} {value:.3f}" for name, value in found.items()))
    if args.json:
        found_rounded = {name: round(value, 4) for name, value in found.items()}
        args.json.write_text(json.dumps(found_rounded, indent=2) + "\n")


if __name__ == "__main__":
    main()
