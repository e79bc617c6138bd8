"""KVCrush: signatures, distances, buckets and the split of the budget, around any of its evictors."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from baselines.kvcrush import KVCrush, kmeans_representatives, top_mask
from pqcache.fields import hints_of, literals
from pqcache.selective import Budget, Plan
from tests.baselines.drive import choose, random_scores
from tests.drawn import Pick, examples

ANCHORS = literals(hints_of(KVCrush)["anchor"])
H0, H1 = [8, 1, 7, 2, 6, 3, 5, 4], [1, 8, 2, 7, 3, 6, 4, 5]
H2, H3 = [8, 7, 6, 5, 4, 3, 2, 1], [1, 1, 9, 9, 1, 1, 9, 9]
TOY = torch.tensor([H0, H1, H2, H3], dtype=torch.float32)


def crush(**hyper: Any) -> KVCrush:
    """Over H2O unless said otherwise: its scores are ranked as they are."""
    return KVCrush(**{"base": "h2o", "base_options": {"n_sink": 0}, **hyper})


def test_toy_example_by_hand() -> None:
    """Eight tokens, four query heads, two KV heads; two important tokens and three representatives."""
    bits = top_mask(TOY, 4)
    assert ["".join(map(str, token)) for token in bits.T.int().tolist()] == [
        "1010", "0110", "1011", "0111", "1000", "0100", "1001", "0101",
    ]  # fmt: skip
    assert crush(anchor="alternate").distance(bits, 0).tolist() == [4, 2, 3, 1, 3, 1, 2, 0]
    assert crush(anchor="mean").distance(bits, 0).tolist() == [2, 2, 3, 3, 1, 1, 2, 2]
    method, plan = crush(anchor="alternate", reps=3), Plan(0, 0, 5)
    kept, others = method.choose_candidates(TOY.view(2, 2, 8).mean(1), TOY, torch.zeros(2, 8, 4), plan, 5, 0)
    assert kept.sum(-1).tolist() == [2, 2] and others.sum(-1).tolist() == [3, 3]
    chosen = kept | others
    assert [head.nonzero().flatten().tolist() for head in chosen] == [[0, 1, 4, 5, 7], [0, 1, 2, 3, 7]]


@examples(40)
def test_one_of_every_bucket(pick: Pick) -> None:
    n, reps, how = pick(1, 200), pick(1, 60), pick(["even", "random"])
    got = crush(pick=how, seed=7).spread(n, reps, 0).tolist()
    assert got == sorted(set(got)) and len(got) == min(n, reps) and got[-1] < n
    if n > reps and how == "random":
        assert all(i * n // reps <= at < (i + 1) * n // reps for i, at in enumerate(got))
    if n > reps > 1 and how == "even":
        assert (got[0], got[-1]) == (0, n - 1)


@examples(24)
def test_the_split(pick: Pick) -> None:
    """Sinks, window, the heaviest, and representatives of the rest, near ones first: the plan's total, disjoint, per head."""
    s, sinks, local = pick(20, 80), pick(0, 4), pick(1, 6)
    k = pick(1, s - sinks - local - 1)
    reps = pick(0, k)
    method = crush(reps=reps, anchor=pick(ANCHORS), pick=pick(["even", "random"]))
    scores = random_scores(4, s, pick(0, 99))
    e = scores[:, sinks : s - local]
    distance = method.distance(top_mask(e, e.shape[1] // 2), 2)
    for head, slots in enumerate(choose(method, scores, Plan(sinks, local, k), layer_idx=2)):
        assert len(slots) == sinks + local + k
        assert set(slots) >= {*range(sinks), *range(s - local, s)}
        best = e[2 * head : 2 * head + 2].mean(0).sort(descending=True, stable=True).indices[: k - reps].tolist()
        middle = {slot - sinks for slot in slots if sinks <= slot < s - local}
        assert middle >= set(best)
        rest = sorted(set(range(e.shape[1])) - set(best), key=lambda j: (int(distance[j]), j))
        assert middle - set(best) == {rest[i] for i in method.spread(len(rest), reps, 2).tolist()}


@pytest.mark.parametrize("base", ["h2o", "snapkv", "pyramidkv"])
def test_without_representatives_it_is_its_base(base: str) -> None:
    method = KVCrush(base=base, rep_ratio=0, base_options={"n_sink": 2})
    scores, plan = random_scores(4, 40, 7), Plan(2, 4, 12)
    state = torch.get_rng_state()
    assert choose(method, scores, plan) == choose(method.evictor, scores, plan)
    assert torch.equal(torch.get_rng_state(), state)


@examples(24)
def test_pages_stay_whole(pick: Pick) -> None:
    page, sinks, local = (pick([2, 8, 32]), pick(0, 3), pick(1, 9))
    s = pick(sinks + local + 2, 200)
    k = pick(1, s - sinks - local - 1)
    method = crush(page=page, rep_ratio=pick([0.0, 0.25, 1.0]))
    plan = Plan(sinks, local, k)
    recent = method.recent(s, plan)
    odd = (s - sinks - local) % page
    assert recent <= local or recent - local == min(odd, k)
    for slots in choose(method, random_scores(4, s, pick(0, 99)), plan):
        assert set(slots) >= {*range(sinks), *range(s - recent, s)}
        paged = [slot - sinks for slot in slots if sinks <= slot < s - recent]
        for at in {slot // page for slot in paged}:
            assert set(range(at * page, (at + 1) * page)) <= set(paged)
        assert plan.total - page < len(slots) <= plan.total


def test_paged_h2o_is_pages_by_summed_scores() -> None:
    scores = random_scores(4, 64 + 8, 5)
    sums = scores[:, :64].view(2, 2, 8, 8).mean(1).sum(-1)
    for head, slots in enumerate(choose(crush(page=8, rep_ratio=0), scores, Plan(0, 8, 24))):
        pages = sorted({slot // 8 for slot in slots if slot < 64})
        assert pages == sorted(sums[head].topk(3).indices.tolist())


def test_kmeans_picks_the_member_nearest_to_each_centre() -> None:
    keys = torch.tensor([[0.0], [1.0], [2.0], [50.0], [51.0], [52.0], [90.0]])
    assert sorted(kmeans_representatives(keys, 3).tolist()) == [1, 4, 6]


@pytest.mark.parametrize(
    ("options", "s", "layer", "plan", "representatives"),
    [
        ({"base_options": {"published": "pyramidkv"}}, 8192, 0, Plan(0, 8, 2040), 512),
        ({"base": "pyramidkv"}, 8192, 0, Plan(0, 8, 3978), 3986 // 4),
        ({"base": "pyramidkv"}, 8192, 31, Plan(0, 8, 103), 111 // 4),
        ({"budget": 672, "base": "h2o", "reps": 384, "base_options": {"n_sink": 32, "recent": 128}}, 900, 0,
         Plan(32, 128, 512), 384),
        # H2O has the other 1536 for sinks, heavy hitters and a window of half of them
        ({"protocol": "aligned", "base": "h2o"}, 8192, 0, Plan(32, 752, 1264), 512),
        ({"base": "h2o", "base_options": {"n_sink": 0}}, 8192, 0, Plan(0, 768, 1280), 512),
        ({"protocol": "aligned", "base": "snapkv"}, 8192, 0, Plan(32, 32, 1984), 512),
        ({"base": "snapkv", "base_options": {"n_sink": 0}}, 8192, 0, Plan(0, 32, 2016), 512),
    ],
)  # fmt: skip
def test_published_splits(options: dict[str, Any], s: int, layer: int, plan: Plan, representatives: int) -> None:
    method = KVCrush(**{"protocol": "paper", **options, "budget": Budget(tokens=options.get("budget", 2048))})
    assert method.plan(s, layer, 32) == plan and method.representatives(plan) == representatives


def test_budget_bits_are_the_bases_choice() -> None:
    """With room for 5 important tokens, each query head's bits mark its 5 best."""
    method = crush(bit_quantile="budget", reps=3)
    with patch.object(method, "distance", wraps=method.distance) as distance:
        choose(method, random_scores(4, 50, 2), Plan(0, 2, 8))
    assert distance.call_args_list[0].args[0].sum(-1).tolist() == [5] * 4
