"""Quest: page bounds, page sets, incremental pages, bytes."""

import torch

from baselines.quest import Quest, page_bound
from pqcache.selective import Budget
from tests.baselines.common import OneLayer
from tests.drawn import Pick, drawn, examples


def extremes(k: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page minima and maxima of k (n, h_kv, s, d), one page after the other."""
    pages = k.split(page, dim=2)
    return torch.stack([p.amin(2) for p in pages], 2), torch.stack([p.amax(2) for p in pages], 2)


def pages_of(indices: torch.Tensor, page: int) -> list[list[set[int]]]:
    return [[{i // page for i in head.tolist() if i >= 0} for head in row] for row in indices]


@examples(16)
def test_the_bound_holds_and_ignores_the_order_inside_a_page(pick: Pick) -> None:
    seed, s, page, h_kv, group = pick.seed, pick(1, 70), pick(1, 17), pick([1, 2]), pick([1, 3])
    dtype = pick([torch.float32, torch.bfloat16])
    k, q = drawn(seed, 2, h_kv, s, 8).to(dtype), drawn(seed + 1, 2, h_kv * group, 1, 8).to(dtype)
    bound = page_bound(q, *extremes(k, page))
    exact = (q.float() * k.float().repeat_interleave(group, 1)).sum(-1)
    best = torch.stack([p.amax(-1) for p in exact.split(page, dim=2)], 2)
    assert (bound >= best - 1e-4).all()
    shuffled = torch.cat([p.flip(2) for p in k.split(page, dim=2)], 2)
    assert torch.equal(page_bound(q, *extremes(shuffled, page)), bound)


@examples(12)
def test_every_row_has_its_last_page_and_the_best_others(pick: Pick) -> None:
    """Grouped or not, in 16 bits or 32, rows of different length, seven steps; the last page counts inside the budget."""
    seed, s, cut, n, page, group = pick.seed, pick(60, 140), pick(0, 50), pick(1, 3), pick(1, 20), pick([1, 3])
    dtype, reduce = pick([torch.float32, torch.bfloat16]), pick(["none", "sum_logit"])
    store = pick(["resident", "host"])
    lengths = [s - cut * r // 2 for r in range(n)]
    k = drawn(seed, n, 2, s, 8).to(dtype)
    past = [k[row : row + 1, :, :length] for row, length in enumerate(lengths)]
    one = OneLayer(Quest(page=page, reduce=reduce, store=store, budget=Budget(ratio=0.4)), k, k, 2 * group, lengths)
    for step in range(7):
        q, new = drawn(seed + 1 + step, n, 2 * group, 1, 8).to(dtype), drawn(seed + 50 + step, n, 2, 1, 8).to(dtype)
        one.step(q, new, new)
        for row, length in enumerate(lengths):
            bound = page_bound(q[row : row + 1], *extremes(past[row], page)) * 8**-0.5
            bound = bound if reduce == "none" else bound.view(1, 2, group, -1).sum(2)
            expected = max(1, int(length * 0.4 + 1e-6) // page)
            for head, chosen in enumerate(pages_of(one.selected[row : row + 1], page)[0]):
                whole = {i for p in chosen for i in range(p * page, min(length + step, p * page + page))}
                assert sorted(i for i in one.selected[row, head].tolist() if i >= 0) == sorted(whole)
                assert len(chosen) == expected and bound.shape[2] - 1 in chosen
                others = sorted(chosen - {bound.shape[2] - 1})
                left = bound[0, head].clone()
                left[[*others, -1]] = -torch.inf
                assert not others or left.max() <= bound[0, head][others].min() + 1e-4
        past = [torch.cat([keys, new[row : row + 1]], 2) for row, keys in enumerate(past)]


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
