"""SparQ: components, temperature, reallocation, the second copy of K, bytes."""

from functools import partial
from typing import Any

import pytest
import torch

from baselines.oracle import Oracle
from baselines.sparq import SparQ, largest_components, partial_logits
from pqcache.selective import Budget
from pqcache.selective.group import group_reduce
from tests.baselines.common import OneLayer
from tests.drawn import Pick, examples
from tests.drawn import drawn as drawn_in

drawn = partial(drawn_in, dtype=torch.float64)


def test_components_are_shared_and_the_temperature_is_each_heads_own() -> None:
    """Queries (3, -1) and (-2, 7): |q| sums to (5, 8), so both use component 1; tau^2 = 2 * 1/4 and 2 * 7/9."""
    q = torch.tensor([[[[3.0, -1.0]], [[-2.0, 7.0]]]])
    chosen = largest_components(q, 1, 1)
    assert chosen.tolist() == [[[1]]]
    approximate = partial_logits(q, chosen, torch.ones(1, 1, 1, 1), 2**-0.5)[0, :, 0]
    torch.testing.assert_close(approximate, torch.tensor([-1 / (2 / 4) ** 0.5, 7 / (2 * 7 / 9) ** 0.5]))


def test_a_zero_query_ranks_evenly() -> None:
    q = torch.zeros(1, 2, 1, 8)
    chosen = largest_components(q, 1, 3)
    assert chosen.tolist() == [[[0, 1, 2]]]
    assert not partial_logits(q, chosen, torch.randn(1, 1, 3, 5), 8**-0.5).any()


@pytest.mark.parametrize("make", [partial(SparQ, r=8), partial(SparQ, r=40), partial(Oracle, scope="all")])
@examples(6)
def test_all_components_choose_the_heaviest_tokens_of_every_row(make: Any, pick: Pick) -> None:
    """As the oracle; grouped or not, in 16 bits or 32, rows of different length: nothing heavier than the choice is left."""
    seed, s, cut, n, group = pick.seed, pick(60, 130), pick(0, 50), pick(1, 3), pick([1, 3])
    dtype, store = pick([torch.float32, torch.bfloat16]), pick(["resident", "host"])
    options = {"reduce": pick(["sum_softmax", "sum_logit", "none"]), "store": store}
    lengths = [s - cut * r // 2 for r in range(n)]
    k, v = drawn(seed, n, 2, s, 8).to(dtype), drawn(seed + 1, n, 2, s, 8).to(dtype)
    q, new = drawn(seed + 2, n, 2 * group, 1, 8).to(dtype), drawn(seed + 3, n, 2, 1, 8).to(dtype)
    method = make(n_sink=4, budget=Budget(ratio=0.3), **options)
    one = OneLayer(method, k, v, 2 * group, lengths)
    one.step(q, new, new)
    cand = one.layer.selected.candidates
    for row, length in enumerate(lengths):
        keys = torch.cat([k[row, :, :length], new[row]], 1).double().repeat_interleave(group, 0)
        exact = (q[row].double() * keys).sum(-1)[None] * 8**-0.5
        weights = group_reduce(exact, 2, options["reduce"])[0, :, 4 : cand.ends[row]]
        assert cand.k[row] == method.plan(length, 0, 1).k
        for head, chosen in enumerate(one.selected[row]):
            picked = chosen[chosen >= 0] - 4
            assert len(set(picked.tolist())) == len(picked) == cand.k[row]
            left = weights[head].clone()
            left[picked] = -torch.inf
            assert left.max() <= weights[head][picked].min() + 1e-5


@pytest.mark.parametrize("budget", [0.2, 0.02])  # 0.02: a window of one token, and nothing is chosen
def test_reallocation_is_the_published_blend(budget: float) -> None:
    """share * attention over the kept tokens + (1 - share) * mean value, share = their approximate weight, per query head."""
    k, v, q, new = drawn(1, 1, 2, 100, 8), drawn(2, 1, 2, 100, 8), drawn(3, 1, 4, 1, 8), drawn(4, 1, 2, 1, 8)
    one = OneLayer(SparQ(n_sink=4, r=2, reallocate=True, budget=Budget(ratio=budget)), k, v, 4)
    out = one.step(q, new, new)[0, 0]
    keys, values = torch.cat([k, new], 2)[0], torch.cat([v, new], 2)[0]
    local = one.layer.selected.local[0]
    for head in range(4):
        kept = sorted({*range(4), *one.selected[0, head // 2].tolist(), *range(100 - local, 101)})
        assert len(kept) == 4 + int(96 * budget) + 1  # sinks, budget, the current token
        part = largest_components(q, 2, 2)[0, head // 2]
        x, query = keys[head // 2], q[0, head, 0]
        tau = (8 * query[part].abs().sum() / query.abs().sum()).sqrt()
        share = (x[:, part] @ query[part] / tau).softmax(0)[kept].sum()
        exact = (x[kept] @ query * 8**-0.5).softmax(0) @ values[head // 2][kept]
        torch.testing.assert_close(out[head], share * exact + (1 - share) * values[head // 2].mean(0))
