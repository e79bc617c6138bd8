"""The CPU kernels of PQCache's index against scikit-learn and faiss, on the same data in the same run.

    python scripts/bench_kernels.py                                    # both parts, Mistral-7B's layer geometry, fp32
    python scripts/bench_kernels.py --threads 2 --rounds 9 --json kernels.json
    python scripts/bench_kernels.py --parts kmeans --quick             # one part; small sizes, to see that it runs

K-Means: one layer's 16 groups (8 KV heads x 2 sub-spaces), 5 rounds, the same init, against scikit-learn's Lloyd and faiss with
every point used; beside them the matrix products alone. Scoring: all 32 query heads' top-k per KV head, against exact products
+ group softmax + top-k and against faiss IndexPQ (which ranks per query head, without groups). Rounds are interleaved and
medians compared, so that a busy machine slows all alike; a ratio is the median over the rounds of our time / the fastest peer's
time in that round. Ratios that miss a bar of BARS are named at the end, and the exit status is 1 (not with --quick). Needs
scikit-learn and faiss (the dev extra). Decode steps and dense attention: scripts/bench_methods.py.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baselines.full import Full
from pqcache import kernels
from pqcache.embedded import load_model, load_tokenizer, needle_pocket
from pqcache.kernels.codes import top_tokens
from pqcache.measure.machine import device_caption
from pqcache.pq import codebook
from pqcache.pq.kmeans import initial_positions, kmeans
from pqcache.selective import SelectiveCache, attach
from scripts.bench.arguments import refuse_below
from scripts.bench.rounds import ratios, timed_rounds

# Query heads, KV heads and head dimension of one layer of Mistral-7B.
HEADS, KV_HEADS, DIM = 32, 8, 128
# Sub-spaces, bits and K-Means rounds of PQCache.
M, B, ROUNDS = 2, 6, 5
# Tokens of each group that is clustered.
GROUP_TOKENS = 32_640

# What ratios must reach at most.
BARS = {"kmeans_time_ratio": 0.4, "kmeans_inertia_ratio": 1.005, "score_time_ratio": 0.2}

Calls = dict[str, Callable[[], Any]]


def show(title: str, times: dict[str, list[float]], ours: str, peers: list[str], notes: Mapping[str, str]) -> float:
    """Print a part's table; the median over the rounds of our time / the fastest peer's."""
    fastest = [min(others) for others in zip(*(times[p] for p in peers), strict=True)]
    ratio = statistics.median(ratios(times[ours], fastest))
    print(f"\n{title}")
    for name, values in times.items():
        print(f"  {name:<34} {1e3 * statistics.median(values):>10.2f} ms   {notes.get(name, '')}")
    print(f"  ratio to the fastest of {', '.join(peers)}: {ratio:.3f}")
    return ratio


class MachineRates:
    """The machine's own rates, which measured ones are compared with: copy in GB/s, matmul in GFLOP/s."""

    def __init__(self, quick: bool) -> None:
        size, side = 1 << (22 if quick else 26), 512 if quick else 2048
        source, target, a = torch.ones(size), torch.empty(size), torch.randn(side, side)
        times = timed_rounds({"copy": lambda: target.copy_(source), "matmul": lambda: a @ a}, 5)
        self.copy = 2 * 4 * size / min(times["copy"]) / 1e9
        self.matmul = 2 * side**3 / min(times["matmul"]) / 1e9

    def share(self, amount: float, times: list[float], of: str) -> str:
        """The rate of so many bytes (of = copy) or operations (of = matmul) in the median time, and its share of that rate."""
        rate, unit = amount / statistics.median(times) / 1e9, {"copy": "GB/s", "matmul": "GFLOP/s"}[of]
        return f"{rate:6.1f} {unit}, {100 * rate / getattr(self, of):4.0f} % of {of}"


def real_keys(groups: int, tokens: int) -> torch.Tensor:
    """Post-RoPE keys of the embedded model on its own prompts, all layers and heads in turn: (groups, tokens, 64)."""
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
    """Sum of squared distances of all points to their nearest centroid, in fp64."""
    total = 0.0
    for points, centers in zip(x, centroids, strict=True):
        total += torch.cdist(points.double(), centers.double()).square().amin(1).sum().item()
    return total


def lloyd_by_sklearn(x: torch.Tensor, init: torch.Tensor) -> torch.Tensor:
    """Centroids (G, C, d) after ROUNDS rounds from the centroids `init`."""
    from sklearn.cluster import KMeans

    fits = (
        KMeans(init.shape[1], init=i.numpy(), n_init=1, max_iter=ROUNDS, tol=0, algorithm="lloyd").fit(p.numpy())
        for p, i in zip(x, init, strict=True)
    )
    return torch.stack([torch.from_numpy(fit.cluster_centers_) for fit in fits])


def lloyd_by_faiss(x: torch.Tensor, init: torch.Tensor) -> torch.Tensor:
    """The same by faiss."""
    import faiss

    centers = []
    for points, start in zip(x, init, strict=True):
        run = faiss.Kmeans(x.shape[2], init.shape[1], niter=ROUNDS, max_points_per_centroid=x.shape[1])
        run.train(points.numpy(), init_centroids=start.numpy())
        # The others return codes, too.
        run.index.search(points.numpy(), 1)
        centers.append(torch.from_numpy(run.centroids.copy()))
    return torch.stack(centers)


def bench_kmeans(name: str, x: torch.Tensor, machine: MachineRates, rounds: int) -> tuple[float, float]:
    """Time and inertia ratios of our K-Means on x (G, N, d)."""
    import faiss

    g, n, d = x.shape
    c = 2**B
    init = x[:, initial_positions(n, c, 0)].contiguous()
    faiss.omp_set_num_threads(torch.get_num_threads())
    centroids: dict[str, torch.Tensor] = {}

    def keep(who: str, cluster: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        return lambda: centroids.update({who: cluster(x, init)})

    def products() -> None:
        for _ in range(ROUNDS + 1):
            torch.bmm(x, init.transpose(1, 2))

    calls: Calls = {
        "ours": keep("ours", lambda x, init: kmeans(x, init, ROUNDS, tol=0).centroids),
        "scikit-learn": keep("scikit-learn", lloyd_by_sklearn),
        "faiss": keep("faiss", lloyd_by_faiss),
    }
    with warnings.catch_warnings():
        # scikit-learn warns that 5 rounds did not converge.
        warnings.simplefilter("ignore")
        times = timed_rounds({**calls, "matrix products alone": products}, rounds)
    notes = {who: machine.share(2.0 * g * n * d * c * (ROUNDS + 1), each, "matmul") for who, each in times.items()}
    title = f"K-Means, {name}: {g} groups of {n} x {d}, {c} centroids, T = {ROUNDS}"
    time_ratio = show(title, times, "ours", list(calls)[1:], notes)
    values = {who: inertia(x, centers) for who, centers in centroids.items()}
    quality = values["ours"] / min(values.values())
    each = ", ".join(f"{who} {value:.6g}" for who, value in values.items())
    print(f"  inertia {each}; ratio to the best {quality:.5f}")
    return time_ratio, quality


def faiss_index(keys: torch.Tensor) -> Any:
    """A faiss IndexPQ over the keys (candidates, d) of one head."""
    import faiss

    index = faiss.IndexPQ(DIM, M, B, faiss.METRIC_INNER_PRODUCT)
    index.train(keys[:4096].numpy())
    index.add(keys.numpy())
    return index


def bench_score(k: int, candidates: int, machine: MachineRates, rounds: int) -> float:
    """Ratio of scoring + top-k."""
    import faiss

    gen = torch.Generator().manual_seed(1)
    h, h_kv, d = HEADS, KV_HEADS, DIM
    keys = torch.randn(1, h_kv, candidates, d, generator=gen)
    q = torch.randn(1, h, 1, d, generator=gen)
    points = codebook.split(keys, M)
    centroids = kmeans(points, points[:, : 2**B], ROUNDS).centroids.view(1, h_kv, M, 2**B, d // M)
    codes = codebook.encode(keys, centroids).to(torch.uint8)
    indexes = [faiss_index(head) for head in keys[0]]
    faiss.omp_set_num_threads(torch.get_num_threads())
    grouped = q.view(1, h_kv, h // h_kv, d)

    def ours() -> torch.Tensor | None:
        return top_tokens(codebook.tables(q, centroids) * d**-0.5, codes, 0, [candidates], [k])

    def exact() -> torch.Tensor:
        logits = (grouped @ keys.transpose(-1, -2)) * d**-0.5
        return logits.softmax(-1).sum(2).topk(k, sorted=False).indices

    def faiss_pq() -> None:
        for head, index in enumerate(indexes):
            index.search(grouped[0, head].numpy(), k)

    peers: Calls = {"exact + group softmax + top-k": exact, "faiss IndexPQ": faiss_pq}
    times = timed_rounds({"ours": ours, **peers}, rounds)
    notes = {"ours": machine.share(codes.numel(), times["ours"], "copy") + " (codes)"}
    return show(
        f"Scoring + top-k: k = {k} of {candidates} candidates, {h} query heads", times, "ours", list(peers), notes
    )


def measure(args: argparse.Namespace, machine: MachineRates) -> dict[str, float]:
    """Print the tables of all parts; the worst ratio of each."""
    shrink = 32 if args.quick else 1
    worst: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        worst[name] = max(value, worst.get(name, 0.0))

    if "kmeans" in args.parts:
        tokens = GROUP_TOKENS // shrink
        gaussian = torch.randn(16, tokens, 64, generator=torch.Generator().manual_seed(0))
        for name, data in (("Gaussian", gaussian), ("post-RoPE keys", real_keys(16, tokens))):
            time_ratio, quality = bench_kmeans(name, data, machine, args.rounds)
            add("kmeans_time_ratio", time_ratio)
            add("kmeans_inertia_ratio", quality)
    if "score" in args.parts:
        for k, candidates in ((1632, 31_008), (3264, 29_376)):
            add("score_time_ratio", bench_score(k // shrink, candidates // shrink, machine, args.rounds))
    return worst


def missed(figures: Mapping[str, float]) -> list[str]:
    """A line for each measured figure that misses its bar."""
    return [
        f"missed: {name} {figures[name]:.3f}, the bar is at most {bar}"
        for name, bar in BARS.items()
        if figures.get(name, 0) > bar
    ]


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Run the parts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["kmeans", "score"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--threads", type=int, default=None, help="default: what torch chooses")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    refuse_below(parser, args, rounds=1)
    if args.threads:
        torch.set_num_threads(args.threads)
    if not kernels.usable():
        print("no CPU kernels: plain torch is measured")
    machine = MachineRates(args.quick)
    print(
        f"{device_caption('cpu')}, torch {torch.__version__};"
        f" copy {machine.copy:.1f} GB/s, matmul {machine.matmul:.0f} GFLOP/s"
    )
    worst = measure(args, machine)
    print("\n" + "\n".join(f"{name} {value:.3f}" for name, value in worst.items()))
    if args.json:
        args.json.write_text(json.dumps({name: round(value, 4) for name, value in worst.items()}, indent=2) + "\n")
    failures = [] if args.quick else missed(worst)
    print("".join(f"{line}\n" for line in failures), end="")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
