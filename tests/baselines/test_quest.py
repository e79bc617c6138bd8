"""Quest: page bounds, page sets, incremental pages, bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from baselines.quest import Quest, page_bound
from pqcache.selective import Budget, SelectiveCache, attach
from tests.baselines.common import OneLayer, selections
from tests.invariants.drive import Session, tokens


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def extremes(k: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page minima and maxima of k (n, h_kv, s, d), one page after the other."""
    pages = k.split(page, dim=2)
    return torch.stack([p.amin(2) for p in pages], 2), torch.stack([p.amax(2) for p in pages], 2)


def pages_of(indices: torch.Tensor, page: int) -> list[list[set[int]]]:
    return [[{i // page for i in head.tolist() if i >= 0} for head in row] for row in indices]


@settings(max_examples=16, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(1, 70),
    page=st.integers(1, 17),
    h_kv=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_bound_holds_and_ignores_the_order_inside_a_page(
    seed: int, s: int, page: int, h_kv: int, group: int, dtype: torch.dtype
) -> None:
    k, q = drawn(seed, 2, h_kv, s, 8).to(dtype), drawn(seed + 1, 2, h_kv * group, 1, 8).to(dtype)
    bound = page_bound(q, *extremes(k, page))
    exact = (q.float() * k.float().repeat_interleave(group, 1)).sum(-1)
    best = torch.stack([p.amax(-1) for p in exact.split(page, dim=2)], 2)
    assert (bound >= best - 1e-4).all()
    shuffled = torch.cat([p.flip(2) for p in k.split(page, dim=2)], 2)
    assert torch.equal(page_bound(q, *extremes(shuffled, page)), bound)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(64, 100),
    lengths=st.lists(st.integers(101, 160), min_size=1, max_size=3),
    h_kv=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_pages_of_one_token_are_the_exact_top_tokens(
    seed: int, budget: int, lengths: list[int], h_kv: int, group: int, dtype: torch.dtype
) -> None:
    n = len(lengths)
    k = drawn(seed, n, h_kv, max(lengths), 16).to(dtype)
    q, new = drawn(seed + 1, n, h_kv * group, 1, 16).to(dtype), drawn(seed + 2, n, h_kv, 1, 16).to(dtype)
    one = OneLayer(Quest(page=1, budget=Budget(tokens=budget)), k, k, h_kv * group, lengths)
    one.step(q, new, new)
    for row, length in enumerate(lengths):
        exact = (q[row].double() * k[row, :, :length].double().repeat_interleave(group, 0)).sum(-1)
        exact[:, -1] = torch.inf  # the newest past token is the last page
        chosen = exact.gather(1, one.selected[row]).sort(descending=True).values
        torch.testing.assert_close(chosen, exact.topk(budget).values)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(130, 200), min_size=1, max_size=3),
    group=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    reduce=st.sampled_from(["none", "sum_logit"]),
)
@pytest.mark.rest
def test_more_pages_keep_the_ones_before(
    seed: int, lengths: list[int], group: int, dtype: torch.dtype, reduce: str
) -> None:
    n = len(lengths)
    k, q = drawn(seed, n, 2, max(lengths), 8).to(dtype), drawn(seed + 1, n, 2 * group, 1, 8).to(dtype)
    new = drawn(seed + 2, n, 2, 1, 8).to(dtype)
    before = None
    for pages in (16, 17, 18, 25):
        one = OneLayer(Quest(page=4, reduce=reduce, budget=Budget(tokens=4 * pages)), k, k, 2 * group, lengths)
        one.step(q, new, new)
        chosen = pages_of(one.selected, 4)
        for row, heads in enumerate(chosen):
            for head, pages_chosen in enumerate(heads):
                assert len(pages_chosen) == pages
                assert (lengths[row] - 1) // 4 in pages_chosen
                assert before is None or before[row][head] <= pages_chosen
        before = chosen


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(60, 140),
    cut=st.integers(0, 50),
    n=st.integers(1, 3),
    page=st.integers(1, 20),
    group=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    reduce=st.sampled_from(["none", "sum_logit"]),
    store=st.sampled_from(["resident", "host"]),
)
def test_every_row_has_its_last_page_and_the_best_others(
    seed: int, s: int, cut: int, n: int, page: int, group: int, dtype: torch.dtype, reduce: str, store: str
) -> None:
    """Grouped or not, in 16 bits or 32, rows of different length, two steps; the last page counts inside the budget."""
    lengths = [s - cut * r // 2 for r in range(n)]
    k = drawn(seed, n, 2, s, 8).to(dtype)
    past = [k[row : row + 1, :, :length] for row, length in enumerate(lengths)]
    one = OneLayer(Quest(page=page, reduce=reduce, store=store, budget=Budget(ratio=0.4)), k, k, 2 * group, lengths)
    for step in range(2):
        q, new = drawn(seed + 1 + step, n, 2 * group, 1, 8).to(dtype), drawn(seed + 5 + step, n, 2, 1, 8).to(dtype)
        one.step(q, new, new)
        for row, length in enumerate(lengths):
            bound = page_bound(q[row : row + 1], *extremes(past[row], page)) * 8**-0.5
            bound = bound if reduce == "none" else bound.view(1, 2, group, -1).sum(2)
            expected = max(1, int(length * 0.4 + 1e-6) // page)
            for head, chosen in enumerate(pages_of(one.selected[row : row + 1], page)[0]):
                assert len(chosen) == expected and bound.shape[2] - 1 in chosen
                others = sorted(chosen - {bound.shape[2] - 1})
                left = bound[0, head].clone()
                left[[*others, -1]] = -torch.inf
                assert not others or left.max() <= bound[0, head][others].min() + 1e-4
        past = [torch.cat([keys, new[row : row + 1]], 2) for row, keys in enumerate(past)]


@torch.no_grad()
@pytest.mark.parametrize("page", [4, 16])
def test_incremental_pages_equal_recomputed_ones(llama: PreTrainedModel, page: int) -> None:
    """Rows of different length, one of them shorter than a page, and 40 generated tokens."""
    cache = SelectiveCache(llama, Quest(page=page, budget=Budget(ratio=0.25)))
    with attach(llama):
        session = Session(llama, cache, [tokens(n, n) for n in (90, 33, 3)])
        for token in tokens(40, 2):
            session.step([token] * 3)
    for layer in cache.layers:
        for row, length in enumerate(layer.store.lengths):
            low, high = extremes(layer.store.k.data[row : row + 1, :, :length], page)
            assert torch.equal(layer.index.low.data[row, :, : low.shape[2]], low[0])
            assert torch.equal(layer.index.high.data[row, :, : high.shape[2]], high[0])


def test_every_selection_is_whole_pages_within_the_budget(llama: PreTrainedModel) -> None:
    for step, (_, selected) in enumerate(selections(llama, Quest(page=4, budget=Budget(ratio=0.25)), 120, 20)):
        past = 120 + step // 3
        assert selected.sinks == 0 and selected.local == [0] and selected.candidates.ends == [past]
        for head in selected.indices[0].tolist():
            chosen = {i // 4 for i in head}
            assert len(chosen) == 7  # floor(30 / 4)
            assert set(head) == {i for p in chosen for i in range(4 * p, min(4 * p + 4, past))}
            assert len(set(head)) == len(head)
            assert (past - 1) // 4 in chosen


def test_protocols_and_refusals() -> None:
    assert Quest().dense_layers == 0
    assert Quest(protocol="paper").dense_layers == 2
    for hyper in ({"page": 0}, {"reduce": "mean"}):
        with pytest.raises(ValueError, match="allowed is"):
            Quest(**hyper)


def test_the_released_evaluation_takes_three_pages_and_does_not_force_the_newest() -> None:
    """Pages of 4 with one strong key each; bounds 5, 1, 4, 3, 2 and a weak newest page."""
    strength = torch.tensor([5.0, 1.0, 4.0, 3.0, 2.0, 0.5]).repeat_interleave(4)
    k = torch.zeros(1, 1, 24, 2)
    k[0, 0, :, 0] = strength
    q, new = torch.tensor([[[[1.0, 0.0]]]]), torch.zeros(1, 1, 1, 2)
    for protocol, budget, pages in (
        ("paper", 64, {0, 1, 2, 3, 4, 5}),
        ("release", 64, {0, 1, 2, 3, 4, 5}),
        ("release", None, {0, 2, 3}),
        ("paper", None, {5}),
    ):
        size = Budget(ratio=0.2) if budget is None else Budget(tokens=budget)  # 0.2 of 24 tokens: one page
        one = OneLayer(Quest(protocol=protocol, page=4, dense_layers=0, budget=size), k, k, 1)
        one.step(q, new, new)
        chosen = one.layer.selected.indices
        got = set(range(24)) if chosen is None else {i for i in chosen.flatten().tolist() if i >= 0}
        assert got == {i for p in pages for i in range(4 * p, 4 * p + 4)}
    release = Quest(protocol="release")
    assert (release.least_pages, release.newest, release.dense_layers) == (3, False, 2)
    with pytest.raises(ValueError, match="least_pages=0: allowed is null or an int >= 1"):
        Quest(least_pages=0)


def test_a_newest_page_that_is_cut_and_not_forced() -> None:
    """The newest page has two tokens: chosen, it adds two; not chosen, all pages are whole. Heads differ."""
    k = torch.zeros(1, 1, 22, 2)
    k[0, 0, :4, 0], k[0, 0, 20:, 1] = 1.0, 1.0
    q, new = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]]), torch.zeros(1, 1, 1, 2)
    method = Quest(page=4, least_pages=3, newest=False, budget=Budget(ratio=0.2))
    one = OneLayer(method, k, k, 2)
    one.step(q, new, new)
    first, second = ({i for i in head.tolist() if i >= 0} for head in one.selected[0])
    assert first == set(range(12)) and second == {*range(8), 20, 21}
