"""H2O and H2O(C): sums as defined, real drops step by step, closed-form budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from baselines.h2o import H2O
from baselines.h2o_c import H2OC
from pqcache.selective import Budget, NotApplicable, Plan, SelectiveCache, attach
from tests.baselines.drive import choose, full_keys, held, random_scores, run
from tests.invariants.drive import Session, tokens


def eager_probs(model: PreTrainedModel, ids: list[int]) -> list[torch.Tensor]:
    """(h, s, s) per layer, as transformers itself computes them."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return [p[0] for p in model(torch.tensor([ids]), output_attentions=True).attentions]
    finally:
        model.set_attn_implementation("sdpa")


def test_budgets() -> None:
    assert H2O(budget=Budget(ratio=0.2), protocol="paper").plan(8192, 0, 32) == Plan(sinks=0, local=819, k=819)
    assert H2O(budget=Budget(ratio=0.2)).plan(8192, 0, 32) == Plan(sinks=32, local=816, k=816)
    long_bench = H2O(budget=Budget(tokens=2048), protocol="paper", mode="static", recent=8)
    assert long_bench.plan(8192, 0, 32) == Plan(sinks=0, local=8, k=2040)


@pytest.mark.parametrize("wrong", [{"mode": "drop"}, {"recent_ratio": 1.5}, {"recent": 0}, {"n_sink": -1}])
def test_bad_values_are_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        H2O(**wrong)


def test_a_budget_without_room_is_refused() -> None:
    with pytest.raises(NotApplicable, match="32 sinks"):
        H2O(budget=Budget(tokens=64), recent=32)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.integers(0, 6), st.integers(1, 6), st.integers(1, 20))
def test_the_heaviest_stay(seed: int, sinks: int, local: int, k: int) -> None:
    scores = random_scores(4, 40, seed)
    for head, chosen in enumerate(choose(H2O(), scores, Plan(sinks, local, k))):
        best = scores[2 * head : 2 * head + 2, sinks : 40 - local].sum(0).sort(descending=True, stable=True).indices[:k]
        assert chosen == [*range(sinks), *sorted((best + sinks).tolist()), *range(40 - local, 40)]


def test_equal_scores_keep_the_earliest() -> None:
    assert choose(H2O(), torch.ones(4, 12), Plan(1, 2, 3)) == [[0, 1, 2, 3, 10, 11]] * 2


@pytest.mark.parametrize("chunk", [None, 13])
def test_sums_are_the_column_sums_of_the_attention_matrix(llama: PreTrainedModel, chunk: int | None) -> None:
    method = H2O(budget=Budget(ratio=0.3), n_sink=4)
    cache = run(llama, method, 90, chunk=chunk)
    for layer, probs in zip(cache.layers, eager_probs(llama, tokens(90, 1)), strict=True):
        scores = probs.sum(1)
        kept = choose(method, scores, method.plan(90, 0, 3))
        assert held(layer) == kept
        for head, slots in enumerate(kept):
            want = scores[2 * head : 2 * head + 2].mean(0)[slots]
            torch.testing.assert_close(layer.scorer.sums.view(len(slots))[0, head], want.to(torch.float64))


@torch.no_grad()
def test_every_step_drops_the_lightest_for_good(llama: PreTrainedModel) -> None:
    """Never more than the budget, nothing returns, window and sinks stay, sums never fall, entries keep their own K and V."""
    method = H2O(budget=Budget(ratio=0.25), n_sink=4)
    plan = method.plan(100, 0, 3)
    assert plan == Plan(sinks=4, local=12, k=12)
    steps = tokens(40, 2)
    cache, reference = SelectiveCache(llama, method), full_keys(llama, 100, 40)
    gone: list[set[int]] = [set() for _ in range(6)]
    before: list[dict[int, float]] = [{} for _ in range(6)]
    with attach(llama):
        session = Session(llama, cache, [tokens(100, 1)])
        for step, token in enumerate([None, *steps]):
            if token is not None:
                session.step([token])
            seen = 100 + step
            for index, layer in enumerate(cache.layers):
                assert layer.store.lengths == [28]
                for head in range(2):
                    at = index * 2 + head
                    positions = layer.positions.view(28)[0, head].tolist()
                    sums = dict(zip(positions, layer.scorer.sums.view(28)[0, head].tolist(), strict=True))
                    assert len(sums) == 28
                    assert set(sums) >= {0, 1, 2, 3, *range(seen - 12, seen)}
                    assert not gone[at] & set(sums)
                    if before[at]:
                        assert all(sums[p] >= mass for p, mass in before[at].items() if p in sums)
                        (dropped,) = {*before[at], seen - 1} - set(sums)
                        rivals = [p for p in sums if 4 <= p < seen - 12]
                        assert all(sums[p] >= before[at][dropped] for p in rivals)
                    gone[at] |= set(range(seen)) - set(sums)
                    before[at] = sums
    first = cache.layers[0]
    for head in range(2):
        positions = first.positions.view(28)[0, head].long()
        for got, whole in zip(first.store.view(), reference[0].store.view(), strict=True):
            torch.testing.assert_close(got[0, head], whole[0, head, positions])


@torch.no_grad()
def test_a_step_adds_its_own_probabilities(llama: PreTrainedModel) -> None:
    """At a budget that nothing exceeds, prompt and steps together give the sums of one long prompt."""
    cache = run(llama, H2O(budget=Budget(tokens=200), n_sink=4), 60, steps=20)
    for layer, probs in zip(cache.layers, eager_probs(llama, tokens(60, 1) + tokens(20, 2)), strict=True):
        want = probs.sum(1).view(2, 2, 80).mean(1).to(torch.float64)
        torch.testing.assert_close(layer.scorer.sums.view(80)[0], want)


def test_static_grows(llama: PreTrainedModel) -> None:
    cache = run(llama, H2O(budget=Budget(ratio=0.25), n_sink=4, mode="static"), 100, steps=9)
    assert [layer.store.lengths for layer in cache.layers] == [[37]] * 3
    for layer in cache.layers:
        assert all(set(head) >= set(range(88, 109)) for head in held(layer))


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_new_turn_adds_to_the_sums(llama: PreTrainedModel, mode: str) -> None:
    """All columns of the turn's queries are added: the total mass grows by one per query while everything fits."""
    method = H2O(budget=Budget(tokens=300), n_sink=4, mode=mode)
    layer: Any
    for layer in run(llama, method, 60, steps=10, turn=25).layers:
        length = layer.store.lengths[0]
        mass = layer.scorer.sums.view(length)[0].sum(-1)
        counted = 60 + 25 + (10 if mode == "dynamic" else 0)
        torch.testing.assert_close(mass, torch.full((2,), float(counted), dtype=mass.dtype))
    cut = H2O(budget=Budget(ratio=0.25), n_sink=4, mode=mode)
    for layer in run(llama, cut, 100, steps=10, turn=25).layers:
        assert layer.store.lengths == [4 + 32]  # a quarter of the 131 tokens after the sinks
        assert all(set(head) >= {0, 1, 2, 3, *range(119, 135)} for head in held(layer))


def test_a_prompt_of_sinks_only_keeps_them(llama: PreTrainedModel) -> None:
    for layer in run(llama, H2O(budget=Budget(ratio=0.25), n_sink=8), 5, steps=6).layers:
        assert held(layer) == [[0, 1, 2, 3, 4, 10]] * 2


def test_a_short_prompt_fills_a_token_budget_first(llama: PreTrainedModel) -> None:
    cache = run(llama, H2O(budget=Budget(tokens=64), n_sink=4), 20, steps=60)
    for layer in cache.layers:
        assert layer.store.lengths == [64]
        assert all(set(head) >= {0, 1, 2, 3, *range(50, 80)} for head in held(layer))


# -- H2O(C) ------------------------------------------------------------------------------------------------------------


def test_closed_form_of_the_compensation() -> None:
    def tokens_held(ratio: float, **more: Any) -> int:
        return H2OC(budget=Budget(ratio=ratio), protocol="paper", **more).plan(8192, 0, 32).total

    assert tokens_held(1 / 5) == 1702
    assert tokens_held(1 / 10) == 883
    assert tokens_held(1 / 5, comm_base="k") == 1670
    assert tokens_held(1 / 5, comm_base="bytes") == 1662
    assert tokens_held(1 / 5, comm_ratio=0) == 1638
    plan = H2OC(budget=Budget(ratio=0.2), protocol="paper").plan(8192, 0, 32)
    assert (plan.local, plan.k) == (851, 851)
    assert H2OC(budget=Budget(ratio=0.2)).plan(8192, 0, 32) == Plan(sinks=32, local=848, k=848)
    assert H2OC(budget=Budget(tokens=2048), protocol="paper").plan(8192, 0, 32).total == 2048 + 64


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20000), st.floats(0.01, 1.0), st.sampled_from(["kv", "k", "bytes"]))
def test_compensation_adds_and_never_exceeds_the_prompt(s: int, ratio: float, base: str) -> None:
    plain, more = (cls(budget=Budget(ratio=ratio)).plan(s, 0, 32).total for cls in (H2O, H2OC))
    assert plain <= more <= s
    none = H2OC(budget=Budget(ratio=ratio), comm_base=base, comm_ratio=0)
    if base != "bytes":
        assert none.plan(s, 0, 32) == H2O(budget=Budget(ratio=ratio)).plan(s, 0, 32)


def test_bytes_follow_the_models_head_dimension(llama: PreTrainedModel) -> None:
    method = H2OC(budget=Budget(ratio=0.25), comm_base="bytes", n_sink=4)
    layer = run(llama, method, 400).layers[0]
    assert layer.store.lengths == [4 + 99 + int(400 * 12 / (2 * 16 * 16))]
