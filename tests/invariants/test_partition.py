"""Sinks, local window and candidates split the past exactly, at every step, in every layer; kept tokens are the right ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.oracle import Oracle
from baselines.sparq import SparQ
from pqcache.api.drive import Session, tokens
from pqcache.pq import PQCache
from pqcache.selective import Budget, SelectiveCache, attach, partition_plan
from pqcache.selective.index import Selected

PROMPT, STEPS, SINKS = 120, 40, 8
RETRIEVAL: dict[str, Callable[..., Any]] = {
    "oracle": lambda **kw: Oracle(n_sink=SINKS, **kw),
    "pqcache-resident": lambda **kw: PQCache(n_sink=SINKS, b=4, **kw),
    "pqcache-host": lambda **kw: PQCache(n_sink=SINKS, b=4, store="host", **kw),
    "sparq-host": lambda **kw: SparQ(n_sink=SINKS, r=2, store="host", **kw),
    "pqcache-per-query-head": lambda **kw: PQCache(n_sink=SINKS, b=4, store="host", reduce="none", **kw),
}


@torch.no_grad()
@pytest.mark.parametrize("name", RETRIEVAL)
def test_partition_is_exact_at_every_step_in_every_layer(llama: PreTrainedModel, name: str) -> None:
    """40 steps with a window of 11 tokens: every generated token leaves the window and becomes a candidate in its turn."""
    method = RETRIEVAL[name](budget=Budget(ratio=0.2))
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
