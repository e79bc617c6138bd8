"""SnapKV: what stays is the window and the best pooled tokens before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from baselines.snapkv import SnapKV
from pqcache.selective import Budget, NotApplicable, Plan
from tests.baselines.drive import choose, full_keys, held, random_scores, run


def test_the_published_parameter_sets() -> None:
    plain = SnapKV(budget=Budget(tokens=1024), protocol="paper")
    assert (plain.w, plain.kernel, plain.pooling, plain.n_sink) == (32, 7, "max", 0)
    assert plain.plan(8192, 0, 32) == Plan(sinks=0, local=32, k=992)
    small = SnapKV(budget=Budget(tokens=2048), protocol="paper", published="pyramidkv")
    assert (small.w, small.kernel, small.pooling) == (8, 7, "max")
    assert small.plan(8192, 0, 32) == Plan(sinks=0, local=8, k=2040)
    listing = SnapKV(published="listing", w=16)
    assert (listing.w, listing.kernel, listing.pooling, listing.n_sink) == (16, 5, "avg", 32)


def test_the_aligned_budget_is_everyone_elses() -> None:
    plan = SnapKV(budget=Budget(ratio=0.2)).plan(8192, 0, 32)
    assert plan == Plan(sinks=32, local=32, k=1632 - 32)
    assert SnapKV(budget=Budget(ratio=0.2), protocol="paper").plan(8192, 0, 32).total == 1638


@pytest.mark.parametrize(
    "wrong", [{"w": 0}, {"kernel": 4}, {"pooling": "mean"}, {"n_sink": -1}, {"published": "paper"}]
)
def test_bad_values_are_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SnapKV(**wrong)


def test_a_budget_within_the_window_is_refused() -> None:
    with pytest.raises(NotApplicable, match="window of 64"):
        SnapKV(budget=Budget(tokens=64), w=64, n_sink=0)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_kernel_1_is_plain_top_k_of_the_group_mean(data: st.DataObject) -> None:
    s, w = data.draw(st.integers(10, 60)), data.draw(st.integers(1, 5))
    k = data.draw(st.integers(1, s - w - 1))
    scores = random_scores(4, s, data.draw(st.integers(0, 99)))
    got = choose(SnapKV(kernel=1, w=w, n_sink=0), scores, Plan(0, w, k))
    for head, chosen in enumerate(got):
        best = scores[2 * head : 2 * head + 2, : s - w].mean(0).sort(descending=True, stable=True).indices[:k]
        assert chosen == sorted(best.tolist()) + list(range(s - w, s))
        assert len(chosen) == k + w


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 39), st.sampled_from([3, 5, 7]))
def test_a_dominant_key_brings_its_neighbours(at: int, kernel: int) -> None:
    scores = random_scores(2, 48, 1) * 0.01
    scores[:, at] = 1.0
    scores[:, 40:] = 5.0  # the window's own columns never vote for what is before it
    half = kernel // 2
    want = set(range(max(0, at - half), min(40, at + half + 1)))
    got = choose(SnapKV(kernel=kernel, w=8, n_sink=0), scores, Plan(0, 8, len(want)), h_kv=1)[0]
    assert set(got) == want | set(range(40, 48))


def test_pooling_by_hand() -> None:
    scores = torch.tensor([[4.0, 1.0, 1.0, 7.0, 1.0, 9.0]])
    assert SnapKV(kernel=3, pooling="max").smooth(scores, 5).tolist() == [[4, 4, 7, 7, 7, 9]]
    assert SnapKV(kernel=3, pooling="avg").smooth(scores, 5).tolist() == [[2.5, 2, 3, 3, 4, 9]]


def test_equal_scores_keep_the_earliest() -> None:
    assert choose(SnapKV(w=2, n_sink=1), torch.ones(4, 12), Plan(1, 2, 3)) == [[0, 1, 2, 3, 10, 11]] * 2


def test_repeated_query_heads_change_nothing() -> None:
    scores = random_scores(2, 40, 3)
    method, plan = SnapKV(w=4, n_sink=2), Plan(2, 4, 9)
    assert choose(method, scores, plan) == choose(method, scores.repeat_interleave(3, 0), plan)


def test_kept_entries_are_the_prompts_own(llama: PreTrainedModel) -> None:
    """Window and sinks are there, exactly the budget is held, and keys and values are those positions' bits; then it grows."""
    method = SnapKV(budget=Budget(tokens=64), budget_rule="prompt", w=8, n_sink=4)
    cache, whole = run(llama, method, 150), full_keys(llama, 150)
    for layer in cache.layers:
        for head in held(layer):
            assert len(head) == 64
            assert set(head) >= {0, 1, 2, 3, *range(142, 150)}
    first = cache.layers[0]
    for head, positions in enumerate(held(first)):
        for got, reference in zip(first.store.view(), whole[0].store.view(), strict=True):
            assert torch.equal(got[0, head], reference[0, head, positions])
    assert [layer.store.lengths for layer in run(llama, method, 150, steps=9).layers] == [[73]] * 3


def test_scores_are_the_last_queries_attention(llama: PreTrainedModel) -> None:
    """The choice of layer 0 equals one made from the probabilities transformers itself computes."""
    from tests.invariants.drive import tokens

    llama.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            probs = llama(torch.tensor([tokens(90, 1)]), output_attentions=True).attentions
    finally:
        llama.set_attn_implementation("sdpa")
    method = SnapKV(budget=Budget(ratio=0.3), w=8, n_sink=0)
    cache = run(llama, method, 90)
    for layer, p in zip(cache.layers, probs, strict=True):
        assert held(layer) == choose(method, p[0, :, -8:].sum(1), method.plan(90, 0, 3))


def test_a_new_turn_prunes_again_with_its_own_queries(llama: PreTrainedModel) -> None:
    method = SnapKV(budget=Budget(tokens=64), budget_rule="prompt", w=8, n_sink=4)
    cache = run(llama, method, 120, steps=10, turn=30)
    for layer in cache.layers:
        for head in held(layer):
            assert len(head) == 64 and set(head) >= {0, 1, 2, 3, *range(152, 160)}
        assert layer.scorer.tensors() == {}
