"""Sinks, local window and candidates split the past exactly, at every step, in every layer; kept tokens are the right ones."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import Session, tokens
from pqcache.selective import Budget, SelectiveCache, attach, partition_plan
from pqcache.selective.index import Selected
from tests.invariants.cases import BY_ID

PROMPT, STEPS, SINKS = 120, 40, 8


@torch.no_grad()
@pytest.mark.parametrize("name", ["oracle", "pqcache", "pqcache-1", "pqcache-2", "sparq-1"])
def test_partition_is_exact_at_every_step_in_every_layer(llama: PreTrainedModel, name: str) -> None:
    """40 steps with a window of 11 tokens: every generated token leaves the window and becomes a candidate in its turn."""
    method: Any = BY_ID[name].make(budget=Budget(ratio=0.2))
    plan = partition_plan(method.budget, PROMPT, SINKS, 0.5)
    assert (plan.sinks, plan.local, plan.k) == (8, 11, 11)
    cache = SelectiveCache(llama, method)
    calls: list[tuple[int, Selected]] = []
    cache.observers.append(lambda layer, q, selected: calls.append((layer.layer_idx, selected)))
    with attach(llama):
        session = Session(llama, cache, [tokens(PROMPT, 1)])
        for step, token in enumerate(tokens(STEPS, 2)):
            calls.clear()
            session.step([token])
            past = PROMPT + step
            assert [layer for layer, _ in calls] == [0, 1, 2]
            for _, selected in calls:
                (hi,), (local,) = selected.candidates.ends, selected.local
                assert selected.sinks + (hi - selected.candidates.sinks) + local == past
                assert (selected.candidates.sinks, hi, local) == (SINKS, past - plan.local, plan.local)
                assert selected.indices is not None
                for head in selected.indices[0]:
                    assert len(set(head.tolist())) == plan.k
                    assert int(head.min()) >= SINKS and int(head.max()) < hi
    assert cache.ledger.attended(all_layers=False) == 8 + 11 + 11 + 1
