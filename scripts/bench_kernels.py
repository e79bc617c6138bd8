"""The CPU kernels of PQCache against scikit-learn, faiss and full attention, on the same data in the same run.

    python scripts/bench_kernels.py                                    # all parts, Mistral-7B's layer geometry, fp32
    python scripts/bench_kernels.py --threads 2 --rounds 9 --json kernels.json
    python scripts/bench_kernels.py --parts kmeans --quick             # one part; small sizes, to see that it runs
    python scripts/bench_kernels.py --parts dense --threads 2          # how fast dense attention reads the cache

K-Means: one layer's 16 groups (8 KV heads x 2 sub-spaces), 5 rounds, the same init, against scikit-learn's Lloyd and faiss with
every point used; beside them the matrix products alone. Scoring: all 32 query heads' top-k per KV head, against exact products
+ group softmax + top-k and against faiss IndexPQ (which ranks per query head, without groups). Decode: one whole attention step
of PQCache at a budget, index look-up, encoding and storing of the new token included, against attention over the full cache:
torch's forms of it, and our own kernel, which Full uses. Dense: what these read per second, beside a matrix-vector product over
as many bytes. Rounds are interleaved and medians compared, so that a busy machine slows all alike; a ratio is the median over
the rounds of our time / the fastest peer's time in that round. Ratios that miss a bar of BARS are named at the end, and the
exit status is 1 (not with --quick). Needs scikit-learn and faiss (the dev extra).
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
from pqcache.pq import PQCache, codebook
from pqcache.pq.kmeans import initial_positions, kmeans
from pqcache.selective import Budget, SelectiveCache, attach
from pqcache.store.resident import ResidentStore
from scripts.bench.arguments import refuse_below
from scripts.bench.dense import TORCH, attentions, dtype_name
from scripts.bench.layer import AttentionLayer, LayerSize
from scripts.bench.rounds import median_ratio, timed_rounds

# One layer of Mistral-7B; projections are not measured here.
SIZE = LayerSize(h=32, h_kv=8, d=128, hidden=64)
# Sub-spaces, bits and K-Means rounds of PQCache; sink tokens.
M, B, ROUNDS, SINKS = 2, 6, 5, 32
# Tokens of each group that is clustered.
GROUP_TOKENS = 32_640
NATIVE = "native dense"

# What ratios must reach: at most the number, but for rates at least.
BARS = {
    "kmeans_time_ratio": 0.4,
    "kmeans_inertia_ratio": 1.005,
    "score_time_ratio": 0.2,
    "decode_ratio_32k": 0.4,
    "decode_ratio_128k": 0.4,
    "decode_native_32k": 0.55,
    "decode_native_128k": 0.4,
    "dense_read_rate": 0.7,
    "dense_bfloat16_time": 0.65,
}

Calls = dict[str, Callable[[], Any]]


def show(title: str, times: dict[str, list[float]], ours: str, peers: list[str], notes: Mapping[str, str]) -> float:
    """Print a part's table; the median over the rounds of our time / the fastest peer's."""
    ratio = median_ratio(times[ours], [min(others) for others in zip(*(times[p] for p in peers), strict=True)])
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

    index = faiss.IndexPQ(SIZE.d, M, B, faiss.METRIC_INNER_PRODUCT)
    index.train(keys[:4096].numpy())
    index.add(keys.numpy())
    return index


def bench_score(k: int, candidates: int, machine: MachineRates, rounds: int) -> float:
    """Ratio of scoring + top-k."""
    import faiss

    gen = torch.Generator().manual_seed(1)
    h, h_kv, d, _ = SIZE
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


def dense_calls(layer: AttentionLayer, s: int, dtype: torch.dtype) -> tuple[Calls, ResidentStore]:
    """Name -> a call of each dense attention over s tokens of a layer, and the store that they read."""
    store = ResidentStore()  # as Full holds them
    store.append(layer.keys(s, 0).to(dtype), layer.keys(s, 1).to(dtype))
    q, (k, v) = layer.queries(1).to(dtype), store.view()
    return {name: lambda f=f: f(q, k, v, SIZE.d**-0.5) for name, f in attentions(q, k, v).items()}, store


def bench_decode(s: int, budget: Budget, machine: MachineRates, rounds: int) -> tuple[float, float | None]:
    """Ratio of one decode attention step of one layer over s random tokens: to torch's fastest, and to our dense kernel."""
    layer = AttentionLayer.build(SIZE, torch.float32, torch.device("cpu"))
    q, new_k, new_v = layer.queries(1), layer.keys(1, 3), layer.keys(1, 4)
    cache, _ = layer.filled(PQCache(budget=budget, m=M, b=B, n_sink=SINKS), layer.keys(s, 0), layer.keys(s, 1), q)
    peers, _ = dense_calls(layer, s, torch.float32)
    times = timed_rounds({"PQCache": lambda: layer.decode_attention(cache, q, new_k, new_v), **peers}, rounds)
    plan, row = cache.layers[0].plans[0], 2 * SIZE.h_kv * SIZE.d * 4
    attended = SINKS + plan.local + plan.k + 1
    notes = {name: machine.share(s * row, times[name], "copy") for name in peers}
    notes["PQCache"] = machine.share(attended * row, times["PQCache"], "copy") + f", {attended} tokens"
    ratio = show(f"Decode step, s = {s}, budget {budget}", times, "PQCache", list(TORCH), notes)
    if NATIVE not in times:
        return ratio, None
    to_native = median_ratio(times["PQCache"], times[NATIVE])
    print(f"  ratio to {NATIVE}: {to_native:.3f}")
    return ratio, to_native


def bench_dense(s: int, rounds: int) -> dict[str, float]:
    """The native kernel's read rate over s tokens to torch.mv's, and its 16-bit times to its fp32 time; empty without it."""
    layer = AttentionLayer.build(SIZE, torch.float32, torch.device("cpu"))
    calls: Calls = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        of_dtype, store = dense_calls(layer, s, dtype)
        matrices = [buffer.data.view(-1, 2048) for buffer in (store.k, store.v) if buffer is not None]
        vector = torch.ones(2048, dtype=dtype)
        of_dtype["torch.mv"] = lambda matrices=matrices, vector=vector: [torch.mv(m, vector) for m in matrices]
        calls |= {f"{name}, {dtype_name(dtype)}": call for name, call in of_dtype.items()}
    times = timed_rounds(calls, rounds)
    print(f"\nDense attention over {s} tokens, {SIZE.h} query heads, {SIZE.h_kv} KV heads of {SIZE.d}")
    for label, each in times.items():
        median, size = statistics.median(each), 4 if label.endswith("float32") else 2
        print(f"  {label:<34} {1e3 * median:>10.2f} ms   {2 * s * SIZE.h_kv * SIZE.d * size / median / 1e9:6.1f} GB/s")
    base = times.get(f"{NATIVE}, float32")
    if base is None:
        return {}
    ratios = {"dense_read_rate": median_ratio(times["torch.mv, float32"], base)}
    for name in ("bfloat16", "float16"):
        if label := times.get(f"{NATIVE}, {name}"):
            ratios[f"dense_{name}_time"] = median_ratio(label, base)
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in ratios.items()))
    return ratios


def measure(args: argparse.Namespace, machine: MachineRates) -> dict[str, float]:
    """Print the tables of all parts; the worst ratio of each."""
    shrink = 32 if args.quick else 1
    worst: dict[str, float] = {}

    def add(name: str, value: float | None) -> None:
        if value is not None:
            worst[name] = max(value, worst.get(name, 0.0))

    def decode(s: int, budget: Budget, end: str = "") -> None:
        ratio, to_native = bench_decode(s, budget, machine, args.rounds)
        add(f"decode_ratio_{s // 1024}k{end}", ratio)
        add(f"decode_native_{s // 1024}k{end}", to_native)

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
    if "decode" in args.parts:
        for s in (length // shrink for length in args.lengths):
            decode(s, Budget(ratio=0.1))
            if s >= 2 * 2048:
                decode(s, Budget(tokens=2048), "_2048")
    if "dense" in args.parts:
        worst |= bench_dense(32_768 // shrink, args.rounds)
    return worst


def missed(figures: Mapping[str, float]) -> list[str]:
    """A line for each measured figure that misses its bar."""
    lines = []
    for name, bar in BARS.items():
        each = {key: value for key, value in figures.items() if key in (name, f"{name}_2048")}
        at_least = name.endswith("_rate")
        for key, value in each.items():
            if value < bar if at_least else value > bar:
                lines.append(f"missed: {key} {value:.3f}, the bar is {'at least' if at_least else 'at most'} {bar}")
    return lines


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Run the parts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["kmeans", "score", "decode", "dense"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--threads", type=int, default=None, help="default: what torch chooses")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768, 65_536, 131_072], help="decode lengths")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    refuse_below(parser, args, rounds=1, lengths=1)
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
