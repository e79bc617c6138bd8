"""Two stages: the limits are the stages alone, only the shortlist is scored, positions and bytes are right."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined.two_stage import TwoStage, TwoStageIndex
from pqcache.api.invariants import attended
from pqcache.registry import method_class
from pqcache.selective import Budget, Method
from pqcache.selective.index import Index
from tests.baselines.common import RETRIEVERS, OneLayer
from tests.baselines.drive import run
from tests.drawn import Pick, drawn, examples

SECOND = ["oracle", "pqcache", "sparq"]


def two(first: str, second: str, **extra: Any) -> TwoStage:
    return TwoStage(
        first=first,
        second=second,
        first_options=RETRIEVERS.get(first, {}),
        second_options=RETRIEVERS[second],
        **{"n_sink": 6, "budget": Budget(ratio=0.2), **extra},
    )


def alone(second: str, **extra: Any) -> Method:
    return method_class(second)(**{"n_sink": 6, "budget": Budget(ratio=0.2), **RETRIEVERS[second], **extra})


def stepped(
    method: Method, seed: int, lengths: list[int], group: int = 2, dtype: torch.dtype = torch.float32, steps: int = 1
) -> tuple[OneLayer, torch.Tensor]:
    """A layer after some steps, and the last query. Two KV heads of 8 dimensions."""
    n, s = len(lengths), max(lengths)
    one = OneLayer(
        method, drawn(seed, n, 2, s, 8, dtype=dtype), drawn(seed + 1, n, 2, s, 8, dtype=dtype), 2 * group, lengths
    )
    for step in range(steps):
        q = drawn(seed + 2 + step, n, 2 * group, 1, 8, dtype=dtype) * 3
        new = drawn(seed + 50 + step, n, 2, 1, 8, dtype=dtype)
        one.step(q, new, new)
    return one, q


def drawn_pair(pick: Pick) -> tuple[str, str, str, dict[str, Any]]:
    """Two stages, how heads are joined, and a layer."""
    layer = {
        "seed": pick.seed,
        "lengths": pick.some(20, 90),
        "group": pick([1, 3]),
        "dtype": pick([torch.float32, torch.bfloat16]),
    }
    return pick([*RETRIEVERS]), pick(SECOND), pick(["sum_softmax", "none", "max_logit"]), layer


@examples(24)
def test_the_choice_is_the_second_stages_best_of_the_shortlist(pick: Pick) -> None:
    """Every selected token is a candidate on its shortlist, and no token left on it scores higher; k of them, if it has k."""
    (first, second, reduce, layer), shortlist = drawn_pair(pick), pick(1.0, 4.0)
    method = two(first, second, reduce=reduce, shortlist=shortlist, store=pick(["resident", "host", "block_cache"]))
    one, q = stepped(method, **layer, steps=pick(1, 9))
    group = layer["group"]
    index, cand, h_kv = one.layer.index, one.layer.selected.candidates, 2
    assert isinstance(index, TwoStageIndex)
    chosen = one.selected
    ctx = one.context(decode=True)
    expected = [
        min(hi - cand.sinks, max(k, -int(-shortlist * k // 1))) for hi, k in zip(cand.ends, cand.k, strict=True)
    ]
    listed = index.shorten(q, cand, expected, h_kv, ctx)
    scores = index.second.score(q, cand.sinks, max(cand.ends), ctx)
    whole = all(w == hi - cand.sinks for w, hi in zip(expected, cand.ends, strict=True))
    for row, hi in enumerate(cand.ends):
        for head in range(chosen.shape[1]):
            mine = [i for i in chosen[row, head].tolist() if i >= 0]
            on_list = [i for i in listed[row, head * listed.shape[1] // chosen.shape[1]].tolist() if i >= 0]
            assert mine == sorted(set(mine)) and on_list == sorted(set(on_list))
            assert all(cand.sinks <= i < hi for i in on_list)
            assert set(mine) <= set(on_list)
            if len(on_list) >= cand.k[row]:
                assert len(mine) == cand.k[row]
            else:  # pages that the window or the sinks cut
                assert first == "quest" and mine == on_list
            if reduce != "sum_softmax" and len(mine) < len(on_list):  # a ranking that no softmax blurs
                group_of = slice(head, head + 1) if reduce == "none" else slice(head * group, head * group + group)
                score = scores[row, group_of].amax(0)
                left = sorted(set(on_list) - set(mine))
                assert score[[i - cand.sinks for i in mine]].min() >= score[[i - cand.sinks for i in left]].max() - 1e-4
            if expected[row] == hi - cand.sinks:
                assert on_list == list(range(cand.sinks, hi))
    again = index.second.select(q, cand, h_kv, ctx) if whole else index.rank(q, listed, cand, h_kv, ctx)
    assert torch.equal(again.indices, chosen)


@examples(16)
def test_everything_shortlisted_is_the_second_stage_alone(pick: Pick) -> None:
    first, second, reduce, layer = drawn_pair(pick)
    one, _ = stepped(two(first, second, reduce=reduce, shortlist=1e6), **layer)
    other, _ = stepped(alone(second, reduce=reduce), **layer)
    if one.layer.selected.indices is None:  # rows that attend everything
        assert other.layer.selected.indices is None
        return
    assert torch.equal(one.selected, other.selected)


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("store", ["resident", "host"])
@pytest.mark.parametrize("heads", ["one", "kv", "query"])
@pytest.mark.rest
def test_scores_of_a_shortlist_are_those_of_the_whole(second: str, store: str, heads: str) -> None:
    one, q = stepped(alone(second, store=store), 3, [80, 61], 3)
    index, ctx = one.layer.index, one.context(decode=True)
    wide = {"one": 1, "kv": 2, "query": 6}[heads]
    generator = torch.Generator().manual_seed(1)
    at = torch.randint(6, 61, (2, wide, 17), generator=generator)
    whole = index.score(q, 6, 81, ctx)
    want = whole.gather(2, at.repeat_interleave(6 // wide, 1) - 6)
    torch.testing.assert_close(index.score_at(q, at, ctx), want)
    torch.testing.assert_close(Index.score_at(index, q, at, ctx), want)
    assert torch.isfinite(index.score_at(q, torch.full_like(at, -1), ctx)).all()


@pytest.mark.parametrize("first", ["clusterkv", "pqcache", "double_sparsity"])
def test_a_token_budget_holds_while_indexes_wait_for_tokens(llama: PreTrainedModel, first: str) -> None:
    method = two(first, "pqcache", shortlist=1.0, budget=Budget(tokens=64))
    for step, now in enumerate(attended(llama, method, 20, 60)):
        assert set(now) == {min(64, 20 + step)}


def test_clusters_do_not_wait_for_the_second_index(llama: PreTrainedModel) -> None:
    methods = two("clusterkv", "pqcache", budget=Budget(tokens=64)), alone("clusterkv", budget=Budget(tokens=64))
    both, one = (run(llama, method, 20, steps=60).layers[0].index for method in methods)
    assert torch.equal(both.first.order, one.order) and torch.equal(both.first.centroids, one.centroids)
