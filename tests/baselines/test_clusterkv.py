"""ClusterKV: cosine clusters, whole clusters up to the budget, incremental windows, the cache of the last steps, bytes."""

import contextlib

import pytest
import torch
from transformers import PreTrainedModel

from baselines.clusterkv import ClusterKV
from baselines.clusterkv.clusters import cluster, cluster_points, initial
from pqcache import kernels
from pqcache.api.drive import Session, logits, tokens
from pqcache.selective import Budget, SelectiveCache, attach
from tests.baselines.common import OneLayer
from tests.drawn import Pick, drawn, examples
from tests.thin import thin


@examples(12)
def test_assignment_is_by_the_named_distance(pick: Pick) -> None:
    seed, n, c = pick.seed, pick(1, 60), pick(1, 12)
    x, centroids = drawn(seed, 2, n, 6).double(), drawn(seed + 1, 2, c, 6).double()
    scaled = x * (drawn(seed + 2, 2, n, 1).double().abs() + 0.1)
    cosine = torch.nn.functional.cosine_similarity(x[:, :, None], centroids[:, None], dim=-1)
    for distance, closeness in (("cosine", cosine), ("l2", -torch.cdist(x, centroids)), ("ip", x @ centroids.mT)):
        got = cluster_points(x, distance).codes(centroids)
        best = closeness.amax(-1)
        torch.testing.assert_close(closeness.gather(-1, got[..., None])[..., 0], best)
    assert torch.equal(*(cluster_points(keys, "cosine").codes(centroids) for keys in (scaled, x)))


def test_after_the_last_round_keys_belong_to_the_last_centroids() -> None:
    """On a line, by hand: from 0 and 1, round 1 moves the centroids to 0 and 5, and the key at 1 changes sides."""
    x = torch.tensor([0.0, 1.0, 5.0, 9.0])[None, :, None]
    centroids, codes, rounds = cluster(x, x[:, :2], 1, "l2")
    assert rounds == 1 and centroids.flatten().tolist() == [0.0, 5.0]
    assert codes.tolist() == [[0, 0, 1, 1]]
    centroids, codes, rounds = cluster(x, x[:, :2], 20, "l2")
    assert rounds == 2 and centroids.flatten().tolist() == [0.5, 7.0] and codes.tolist() == [[0, 0, 1, 1]]


def test_keys_that_clustering_starts_from() -> None:
    """k-means++ never draws a key at distance 0 while others are left, and draws far ones with their probability."""
    bundles = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])  # two directions, each twice
    for seed in range(20):
        start = initial(bundles[None], 2, "plusplus", seed)
        assert start[0, :, 0].count_nonzero() == 1  # one of each direction
    line = torch.tensor([[0.0], [1.0], [2.0]])
    second = [initial(line.expand(1, 3, 1), 2, "plusplus", seed, "l2")[0, :, 0].tolist() for seed in range(1000)]
    from_zero = [b for a, b in second if a == 0]  # squared distances 1 and 4
    assert from_zero.count(0.0) == 0 and 0.74 < from_zero.count(2.0) / len(from_zero) < 0.86
    assert 290 < len(from_zero) < 380
    keys = drawn(0, 2, 30, 4)
    for how, repeats in (("random", False), ("repeated", True)):
        rows = [len({tuple(k) for k in initial(keys, 25, how, seed)[0].tolist()}) < 25 for seed in range(5)]
        assert all(row == repeats for row in rows)


def test_zero_and_constant_keys_give_no_nan() -> None:
    for x in (torch.zeros(1, 20, 4), torch.ones(1, 20, 4)):
        for distance in ("cosine", "l2", "ip"):
            centroids, codes, _ = cluster(x, x[:, :5], 20, distance)
            assert torch.equal(centroids, x[:, :5])
            assert not codes.any()


@examples(8)
def test_exactly_the_budget_is_selected_cluster_by_cluster(pick: Pick) -> None:
    """Rows of different length, MHA and GQA, every distance: budgets, permutations, prefixes, whole clusters in rank order.

    By the CPU's kernel or in plain torch.
    """
    seed, lengths, per, group = pick.seed, pick.some(120, 200), pick(3, 30), pick([1, 2])
    reduce, distance = pick(["none", "sum_softmax", "max_logit"]), pick(["cosine", "l2", "ip"])
    dtype, switch = pick([torch.float32, torch.bfloat16]), pick([contextlib.nullcontext, kernels.plain_torch])
    n = len(lengths)
    k, q = drawn(seed, n, 2, max(lengths), 8).to(dtype), drawn(seed + 1, n, 2 * group, 1, 8).to(dtype)
    new = drawn(seed + 2, n, 2, 1, 8).to(dtype)
    before = None
    for budget in (64, 65, 66, 90):
        method = ClusterKV(
            n_sink=6, tokens_per_cluster=per, reduce=reduce, distance=distance, budget=Budget(tokens=budget)
        )
        one = OneLayer(method, k, k, 2 * group, lengths)
        with switch():
            one.step(q, new, new)
        index = one.layer.index
        assert index.counts == [s // per for s in lengths] and index.sizes.shape[2] == max(index.counts)
        for row, s in enumerate(lengths):
            assert (index.sizes[row].sum(-1) == s - 6).all() and not index.sizes[row, :, index.counts[row] :].any()
            want = torch.arange(6, s, dtype=torch.int32).expand(2, -1)
            assert torch.equal(index.order[row, :, : s - 6].sort(-1).values, want)
        chosen = one.selected
        heads = 2 * group if reduce == "none" else 2
        assert chosen.shape == (n, heads, budget - 6)
        weights = index.weights(q, 2, 8**-0.5)
        for row in range(n):
            for head in range(heads):
                picked = set(chosen[row, head].tolist())
                assert len(picked) == budget - 6
                assert before is None or before[row][head] <= picked
                _check_clusters(index, weights, row, head, head // (heads // 2), picked)
        before = [[set(head.tolist()) for head in row] for row in chosen]


def _check_clusters(index, weights: torch.Tensor, row: int, head: int, kv: int, picked: set[int]) -> None:
    """In order of weight every cluster is in whole, but the last one touched, of which the earliest tokens are."""
    sizes, left = index.sizes[row, kv].tolist(), len(picked)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for i in weights[row, head].argsort(descending=True, stable=True).tolist():
        members = index.order[row, kv, starts[i] : starts[i] + sizes[i]].tolist()
        assert members == sorted(members)
        assert set(members) & picked == set(members[:left])
        left = max(0, left - len(members))
    assert left == 0


@torch.no_grad()
@pytest.mark.parametrize("store", ["resident", "host"])
@pytest.mark.rest
def test_windows_are_clustered_among_themselves(llama: PreTrainedModel, store: str) -> None:
    """Rows of different length, one shorter than the sinks; windows of 12 tokens, a second turn, rows exchanged."""
    method = ClusterKV(
        n_sink=8, tokens_per_cluster=10, window=12, window_clusters=3, store=store, budget=Budget(ratio=0.25)
    )
    cache = SelectiveCache(llama, method)
    lengths = [90, 33, 5]
    with attach(llama):
        session = Session(llama, cache, [tokens(n, n) for n in lengths])
        index = cache.layers[0].index
        assert (index.counts, index.ends) == ([9, 3, 0], [90, 33, 8])
        for step, token in enumerate(tokens(30, 2)):
            session.step([token] * 3)
            done = step // 12  # the window is complete when the token after it arrives
            assert (index.counts[:2], index.ends[:2]) == (
                [9 + 3 * done, 3 + 3 * done],
                [90 + 12 * done, 33 + 12 * done],
            )
        _check_whole(cache, [114, 57, None])
        session.turn([tokens(20, 7)] * 3)
        assert index.ends == [140, 83, 55]
        assert index.counts == [15 + 2, 9 + 2, 5]  # 26 tokens: two clusters of ten and a bit
        session.reorder([1, 2, 0])
        for token in tokens(14, 3):
            session.step([token] * 3)
        _check_whole(cache, [83 + 12, 55 + 12, 140 + 12])


def _check_whole(cache: SelectiveCache, ends: list[int | None]) -> None:
    """Every clustered position stands in `order` once, and every centroid is the mean of its keys."""
    for layer in cache.layers:
        index, keys = layer.index, layer.store.view()[0]
        for row, end in enumerate(ends):
            assert end is None or index.ends[row] == end
            total = index.ends[row] - 8
            assert index.sizes[row].sum(-1).tolist() == [total, total]
            for head in range(2):
                order = index.order[row, head, :total].tolist()
                assert sorted(order) == list(range(8, index.ends[row]))
                at = 0
                for c, size in enumerate(index.sizes[row, head].tolist()):
                    mean = keys[row, head, order[at : at + size]].mean(0)
                    if size:
                        torch.testing.assert_close(index.centroids[row, head, c].double(), mean, rtol=1e-4, atol=1e-5)
                    at += size


@pytest.mark.parametrize("reduce", ["none", "sum_softmax"])
@pytest.mark.parametrize("steps", thin([3, 1], 2))
@pytest.mark.rest
def test_the_cache_of_the_last_steps_changes_bytes_only(llama: PreTrainedModel, reduce: str, steps: int) -> None:
    hyper = {"n_sink": 8, "tokens_per_cluster": 10, "window": 12, "store": "host", "reduce": reduce}
    prompt, fed = [tokens(120, 1), tokens(50, 2)], [[t, t] for t in tokens(30, 3)]
    caches = []
    results = []
    for cache_steps in (0, steps):
        method = ClusterKV(**hyper, cache_steps=cache_steps, budget=Budget(ratio=0.2))
        caches.append(SelectiveCache(llama, method))
        results.append(logits(llama, method, prompt, fed, cache=caches[-1]))
    assert torch.equal(*results)
    plain, cached = (cache.ledger.moved["fetch"] for cache in caches)
    facts = caches[1].ledger.facts
    token = 2 * 16 * 8  # K and V of one head in float64
    assert plain == facts["cache_lookups"] * token
    assert cached == (facts["cache_lookups"] - facts["cache_hits"]) * token
    assert 0 < facts["cache_hit_rate"] < 1
    assert facts["cache_hit_rate"] == facts["cache_hits"] / facts["cache_lookups"]


@examples(6)
def test_hit_rates_of_clusters(pick: Pick) -> None:
    """Against sets, as the paper's simulator counts them."""
    seed, lengths, group, memory = pick.seed, pick.some(100, 160), pick([1, 3]), pick(1, 3)
    n, k = len(lengths), drawn(seed, len(lengths), 2, max(lengths), 8)
    method = ClusterKV(
        n_sink=6, tokens_per_cluster=7, window=5, window_clusters=2, store="host", cache_steps=memory,
        reduce=pick(["none", "sum_softmax"]), budget=Budget(tokens=64), budget_rule="prompt",
    )  # fmt: skip
    one = OneLayer(method, k, k, 2 * group, lengths)
    clusters: list[list[set[int]]] = []
    rates = []
    for step in range(7):
        q, new = drawn(seed + 1 + step, n, 2 * group, 1, 8), drawn(seed + 20 + step, n, 2, 1, 8)
        one.step(q, new, new)
        index, now = one.layer.index, []
        weights = index.weights(q, 2, 8**-0.5)
        heads = weights.shape[1]
        for row in range(n):
            ranked, counts = [], []
            for head in range(heads):
                sizes = index.sizes[row, head * 2 // heads].tolist()
                order = weights[row, head].argsort(descending=True, stable=True).tolist()
                order = [c for c in order if sizes[c]]
                filled = [sum(sizes[c] for c in order[: i + 1]) for i in range(len(order))]
                counts.append(next(i for i, f in enumerate(filled) if f >= 58) + 1)
                ranked.append(order)
            now += [set(order[: max(counts)]) for order in ranked]
        if step >= memory:
            before = [set().union(*(old[i] for old in clusters[-memory:])) for i in range(len(now))]
            rates += [len(mine & known) / len(mine) for mine, known in zip(now, before, strict=True)]
        clusters.append(now)
    assert one.ledger.reported()["cluster_hit_rate"] == pytest.approx(sum(rates) / len(rates))


def test_the_released_evaluation_attends_every_generated_token() -> None:
    k, new = drawn(1, 1, 2, 700, 8), drawn(2, 1, 2, 1, 8)
    one = OneLayer(ClusterKV(protocol="release", budget=Budget(tokens=64), dense_layers=0), k, k, 4)
    assert one.layer.index.counts == [400]
    for step in range(330):
        one.step(drawn(step, 1, 4, 1, 8), new, new)
        assert one.layer.selected.local == [step] and one.selected.shape == (1, 4, 48)
    assert one.layer.index.counts == [400] and one.layer.index.ends == [700]
