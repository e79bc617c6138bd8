"""H2O and H2O(C): sums as defined, real drops step by step, closed-form budgets."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.h2o import H2O
from baselines.h2o_c import H2OC
from pqcache.api.drive import Session, tokens
from pqcache.selective import Budget, SelectiveCache, attach
from tests.baselines.drive import choose, eager_probs, held, run


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
    """Of the entries between sinks and window; the sums of those that stay never fall."""
    cache = SelectiveCache(llama, H2O(budget=Budget(ratio=0.25), n_sink=4))  # 4 sinks, 12 recent tokens, 12 heavy ones
    before: dict[tuple[int, int], dict[int, float]] = {}
    with attach(llama):
        session = Session(llama, cache, [tokens(100, 1)])
        for seen, token in enumerate(tokens(40, 2), 101):
            session.step([token])
            for at, layer in enumerate(cache.layers):
                for head in range(2):
                    positions = layer.positions.view(28)[0, head].tolist()
                    sums = dict(zip(positions, layer.scorer.sums.view(28)[0, head].tolist(), strict=True))
                    assert len(sums) == 28 and set(sums) >= {0, 1, 2, 3, *range(seen - 12, seen)}
                    if old := before.get((at, head)):
                        assert all(sums[p] >= mass for p, mass in old.items() if p in sums)
                        (dropped,) = {*old, seen - 1} - set(sums)
                        assert all(sums[p] >= old[dropped] for p in sums if 4 <= p < seen - 12)
                    before[at, head] = sums


@torch.no_grad()
def test_a_step_adds_its_own_probabilities(llama: PreTrainedModel) -> None:
    """At a budget that nothing exceeds, prompt and steps together give the sums of one long prompt."""
    cache = run(llama, H2O(budget=Budget(tokens=200), n_sink=4), 60, steps=20)
    for layer, probs in zip(cache.layers, eager_probs(llama, tokens(60, 1) + tokens(20, 2)), strict=True):
        want = probs.sum(1).view(2, 2, 80).mean(1).to(torch.float64)
        torch.testing.assert_close(layer.scorer.sums.view(80)[0], want)


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


def test_bytes_follow_the_models_head_dimension(llama: PreTrainedModel) -> None:
    method = H2OC(budget=Budget(ratio=0.25), comm_base="bytes", n_sink=4)
    layer = run(llama, method, 400).layers[0]
    assert layer.store.lengths == [4 + 99 + int(400 * 12 / (2 * 16 * 16))]
