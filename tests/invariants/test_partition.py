"""Sinks, local window and candidates split the past exactly, at every step, in every layer; kept tokens are the right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.oracle import Oracle
from baselines.sparq import SparQ
from baselines.streaming import StreamingLLM
from pqcache.pq import PQCache
from pqcache.selective import Budget, SelectiveCache, attach, partition_plan
from pqcache.selective.eviction import EvictionLayer
from pqcache.selective.index import Selected
from pqcache.selective.retrieval import RetrievalLayer
from tests.invariants.drive import Session, tokens

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


@torch.no_grad()
@pytest.mark.parametrize("name", [n for n in RETRIEVAL if n != "oracle"])
def test_gathered_tokens_are_the_ones_named(llama: PreTrainedModel, name: str) -> None:
    """What attention reads at each step is K and V of exactly sinks, selected, local and current, in every layer."""
    method, reference = RETRIEVAL[name](budget=Budget(ratio=0.2)), RETRIEVAL["oracle"]()
    prompt, steps = tokens(PROMPT, 1), tokens(STEPS, 2)
    cache, whole = SelectiveCache(llama, method), SelectiveCache(llama, reference)
    checked = 0

    def observe(layer: RetrievalLayer, q: torch.Tensor, selected: Selected) -> None:
        """Layer 0's keys depend on nothing but the tokens: the full cache of the same tokens has the true ones."""
        nonlocal checked
        if layer.layer_idx:
            return
        keys, values = layer.store.read(SINKS, selected.indices, selected.local[0] + 1, 2)
        stored = whole.layers[0].store
        past = stored.lengths[0] - 1
        for head in range(keys.shape[1]):
            per = keys.shape[1] // 2
            at = [*range(SINKS), *selected.indices[0, head].tolist(), *range(past - selected.local[0], past + 1)]
            for got, buffer in ((keys, stored.k), (values, stored.v)):
                torch.testing.assert_close(got[0, head], buffer.data[0, head // per, at])
        checked += 1

    cache.observers.append(observe)
    with attach(llama):
        full, session = Session(llama, whole, [prompt]), Session(llama, cache, [prompt])
        for token in steps:
            full.step([token])
            session.step([token])
    assert checked == STEPS


@torch.no_grad()
def test_host_rows_and_window_hold_the_right_tokens(llama: PreTrainedModel) -> None:
    """After 300 steps (the window's buffer slid more than once) host row i of layer 0 is the token at n_sink + i."""
    prompt, steps = tokens(PROMPT, 1), tokens(300, 3)
    caches = [
        SelectiveCache(llama, PQCache(n_sink=SINKS, b=4, store=store, budget=Budget(ratio=0.2)))
        for store in ("host", "resident")
    ]
    with attach(llama):
        sessions = [Session(llama, cache, [prompt]) for cache in caches]
        for token in steps:
            for session in sessions:
                session.step([token])
    host, resident = (cache.layers[0].store for cache in caches)
    end = PROMPT + 300
    assert host.lengths == resident.lengths == [end]
    for i, buffer in enumerate((resident.k, resident.v)):
        torch.testing.assert_close(host.host[i].view(end - SINKS), buffer.data[:, :, SINKS:end])
        torch.testing.assert_close(host.sinks[i], buffer.data[:, :, :SINKS])
        window = host.local[i].data[:, :, host.columns - 12 : host.columns]
        torch.testing.assert_close(window, buffer.data[:, :, end - 12 : end])


@torch.no_grad()
def test_codes_of_every_token_are_its_own(llama: PreTrainedModel) -> None:
    """Each stored code is the nearest centroid of that very key, generated tokens included."""
    from pqcache.pq import codebook

    cache = SelectiveCache(llama, PQCache(n_sink=SINKS, b=4, budget=Budget(ratio=0.2)))
    with attach(llama):
        session = Session(llama, cache, [tokens(PROMPT, 1)])
        for token in tokens(STEPS, 2):
            session.step([token])
    for layer in cache.layers:
        keys = layer.store.view()[0][:, :, SINKS:]
        codes = layer.index.codes.view(keys.shape[2])
        assert torch.equal(codes.long(), codebook.encode(keys, layer.index.centroids).flatten(1, 2))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["static", "dynamic", "rolling"])
def test_streaming_keeps_sinks_and_the_most_recent(llama: PreTrainedModel, mode: str) -> None:
    cache = SelectiveCache(llama, StreamingLLM(n_sink=4, mode=mode, budget=Budget(ratio=0.25)))
    kept = 4 + 29  # floor((120 - 4) / 4) recent tokens
    with attach(llama):
        session = Session(llama, cache, [tokens(PROMPT, 1)])
        for step, token in enumerate([None, *tokens(STEPS, 2)]):
            if token is not None:
                session.step([token])
            length = PROMPT + step
            recent = 29 + step if mode == "static" else 29
            for layer in cache.layers:
                assert isinstance(layer, EvictionLayer)
                assert layer.store.lengths == [4 + recent]
                held = layer.held_positions()
                assert held is not None
                positions = held[0].sort(-1).values
                want = torch.tensor([*range(4), *range(length - recent, length)])
                assert torch.equal(positions, want.expand(2, -1).to(positions.dtype))
    assert kept == 33
