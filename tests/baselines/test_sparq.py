"""SparQ: components, temperature, reallocation, the second copy of K, bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from baselines.oracle import Oracle
from baselines.sparq import SparQ, largest_components, partial_logits
from pqcache.selective import Budget, SelectiveCache, attach
from tests.baselines.common import OneLayer, selections
from tests.invariants.drive import Session, logits, tokens


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_components_are_shared_and_the_temperature_is_each_heads_own() -> None:
    """Queries (3, -1) and (-2, 7): |q| sums to (5, 8), so both use component 1; tau^2 = 2 * 1/4 and 2 * 7/9."""
    q = torch.tensor([[[[3.0, -1.0]], [[-2.0, 7.0]]]])
    chosen = largest_components(q, 1, 1)
    assert chosen.tolist() == [[[1]]]
    approximate = partial_logits(q, chosen, torch.ones(1, 1, 1, 1), 2**-0.5)[0, :, 0]
    torch.testing.assert_close(approximate, torch.tensor([-1 / (2 / 4) ** 0.5, 7 / (2 * 7 / 9) ** 0.5]))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), r=st.integers(1, 9), group=st.sampled_from([1, 3]))
def test_equal_query_heads_agree_with_one_head_alone(seed: int, r: int, group: int) -> None:
    q, k = drawn(seed, 2, 2, 1, 8), drawn(seed + 1, 2, 2, 20, 8)
    together = q.repeat_interleave(group, 1)
    chosen = largest_components(together, 2, r)
    assert torch.equal(chosen, largest_components(q, 2, r))
    rows = k.transpose(2, 3).gather(2, chosen[..., None].expand(-1, -1, -1, 20))
    alone = partial_logits(q, chosen, rows, 8**-0.5)
    torch.testing.assert_close(partial_logits(together, chosen, rows, 8**-0.5), alone.repeat_interleave(group, 1))
    if r >= 8:  # every component: exact, temperature sqrt(d)
        torch.testing.assert_close(alone, (q * k).sum(-1) * 8**-0.5)


def test_a_zero_query_ranks_evenly() -> None:
    q = torch.zeros(1, 2, 1, 8)
    chosen = largest_components(q, 1, 3)
    assert chosen.tolist() == [[[0, 1, 2]]]
    assert not partial_logits(q, chosen, torch.randn(1, 1, 3, 5), 8**-0.5).any()


@pytest.mark.parametrize("reduce", ["sum_softmax", "sum_logit", "none"])
@pytest.mark.parametrize("r", [16, 40])
def test_all_components_are_the_oracle(llama: PreTrainedModel, r: int, reduce: str) -> None:
    """Same forced tokens, softmax over all past tokens; r beyond the head dimension counts as all of it."""
    options = {"n_sink": 8, "reduce": reduce, "budget": Budget(ratio=0.2)}
    ours = selections(llama, SparQ(r=r, **options), 120, 12)
    exact = selections(llama, Oracle(scope="all", **options), 120, 12)
    assert len(ours) == len(exact) == 36
    for (_, a), (_, b) in zip(ours, exact, strict=True):
        assert torch.equal(a.indices, b.indices)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(70, 120),
    ratio=st.floats(0.05, 0.9),
    r=st.integers(1, 8),
    group=st.sampled_from([1, 2]),
    reduce=st.sampled_from(["sum_softmax", "none"]),
)
def test_constant_values_survive_reallocation(seed: int, s: int, ratio: float, r: int, group: int, reduce: str) -> None:
    value = drawn(seed, 1, 2, 1, 8)
    method = SparQ(n_sink=4, r=r, reallocate=True, reduce=reduce, budget=Budget(ratio=ratio))
    one = OneLayer(method, drawn(seed + 1, 1, 2, s, 8) * 3, value.expand(-1, -1, s, -1), 2 * group)
    for step in range(3):
        out = one.step(drawn(seed + 2 + step, 1, 2 * group, 1, 8), drawn(seed + 9, 1, 2, 1, 8), value)
        torch.testing.assert_close(out[:, 0], value[:, :, 0].repeat_interleave(group, 1))


def test_reallocation_is_the_published_blend() -> None:
    """share * attention over the kept tokens + (1 - share) * mean value, share = their approximate weight, per query head."""
    k, v, q, new = drawn(1, 1, 2, 100, 8), drawn(2, 1, 2, 100, 8), drawn(3, 1, 4, 1, 8), drawn(4, 1, 2, 1, 8)
    one = OneLayer(SparQ(n_sink=4, r=2, reallocate=True, budget=Budget(ratio=0.2)), k, v, 4)
    out = one.step(q, new, new)[0, 0]
    keys, values = torch.cat([k, new], 2)[0], torch.cat([v, new], 2)[0]
    local = one.layer.selected.local[0]
    for head in range(4):
        kept = sorted({*range(4), *one.selected[0, head // 2].tolist(), *range(100 - local, 101)})
        assert len(kept) == 4 + 19 + 1  # sinks, floor(96 * 0.2), the current token
        part = largest_components(q, 2, 2)[0, head // 2]
        x, query = keys[head // 2], q[0, head, 0]
        tau = (8 * query[part].abs().sum() / query.abs().sum()).sqrt()
        share = (x[:, part] @ query[part] / tau).softmax(0)[kept].sum()
        exact = (x[kept] @ query * 8**-0.5).softmax(0) @ values[head // 2][kept]
        torch.testing.assert_close(out[head], share * exact + (1 - share) * values[head // 2].mean(0))


@torch.no_grad()
def test_second_copy_and_running_mean_follow_the_store(llama: PreTrainedModel) -> None:
    """Rows of different length, 30 steps, a second turn, rows exchanged."""
    for store in ("resident", "host"):
        method = SparQ(n_sink=8, reallocate=True, store=store, budget=Budget(ratio=0.25))
        cache = SelectiveCache(llama, method)
        with attach(llama):
            session = Session(llama, cache, [tokens(n, n) for n in (90, 33, 5)])
            for token in tokens(30, 2):
                session.step([token] * 3)
            session.turn([tokens(20, 7)] * 3)
            session.reorder([1, 2, 0])
            for token in tokens(5, 3):
                session.step([token] * 3)
        for layer in cache.layers:
            keys, values = layer.store.view()
            assert layer.store.lengths == [88, 60, 145]
            for row, length in enumerate(layer.store.lengths):
                copy = layer.index.components.data[row, :, :length].unflatten(0, (2, 16)).transpose(1, 2)
                assert torch.equal(copy, keys[row, :, :length])
                torch.testing.assert_close(layer.index.mean[row], values[row, :, :length].mean(1))


def test_a_budget_beyond_the_prompt_is_dense(llama: PreTrainedModel) -> None:
    prompt, steps = [tokens(80, 1)], [[t] for t in tokens(5, 2)]
    for protocol in ("aligned", "paper"):
        method = SparQ(reallocate=True, protocol=protocol, budget=Budget(tokens=500))
        got, dense = logits(llama, method, prompt, steps[:1]), logits(llama, None, prompt, steps[:1])
        torch.testing.assert_close(got, dense)
