"""Centroids and codes on the host: the same choice, bytes that cross at every step, a copy that is begun a layer ahead."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined.two_stage import TwoStage
from pqcache.api.drive import Session, tokens
from pqcache.pq import PQCache
from pqcache.selective import Budget, Method, SelectiveCache, attach
from pqcache.selective.retrieval import RetrievalLayer
from pqcache.store.lanes import TO_DEVICE, Lanes, Work
from tests.store.test_lanes import run
from tests.thin import thin


def pqcache(codes_store: str, **hyper: Any) -> PQCache:
    return PQCache(budget=Budget(ratio=0.25), n_sink=8, codes_store=codes_store, **{"b": 3, **hyper})


def two_stage(codes_store: str, **hyper: Any) -> TwoStage:
    second = {"b": 3, "codes_store": codes_store}
    return TwoStage(budget=Budget(ratio=0.25), n_sink=8, first_options={"page": 4}, second_options=second, **hyper)


@pytest.mark.parametrize("make", thin([pqcache, two_stage], 2))
@pytest.mark.parametrize("store", thin(["host", "resident", "block_cache"], 3))
def test_outputs_do_not_depend_on_where_codes_lie(
    llama: PreTrainedModel, make: Callable[..., Method], store: str
) -> None:
    """Padded rows, one shorter than the sinks; steps, a reorder, a new turn, steps."""
    (expected, near), (out, far) = (run(llama, make(where, store=store), Lanes(), 1) for where in ("resident", "host"))
    assert torch.equal(out, expected)
    assert far.ledger.moved.keys() - near.ledger.moved.keys() <= {"codes", "centroids", "write_back"}
    there, here = far.resident_bytes(), near.resident_bytes()
    assert there["device"] < here["device"] and sum(there.values()) == sum(here.values())


def test_bytes_of_a_step(llama: PreTrainedModel) -> None:
    """All codes and centroids there, the new token's codes back, per layer."""
    cache = SelectiveCache(llama, pqcache("host", b=6, max_iter=1))
    s, m, size = 150, 2, 1
    with attach(llama), torch.no_grad():
        session = Session(llama, cache, [tokens(s, 1)])
        for step in range(3):
            before = dict(cache.ledger.moved)
            session.step([5])
            moved = {kind: n - before.get(kind, 0) for kind, n in cache.ledger.moved.items()}
            layers, heads, d = cache.shape.n_layers, cache.shape.h_kv, cache.shape.d
            assert moved["codes"] == layers * heads * m * (s + step - 8) * size
            assert moved["centroids"] == layers * heads * 2**6 * d * 4
            assert moved["write_back"] == layers * heads * m * size
    assert cache.ledger.bytes_per_step()["selection"] == pytest.approx(
        (cache.ledger.moved["codes"] + cache.ledger.moved["centroids"]) / 3
    )


def test_codes_are_sent_while_the_layer_before_runs(llama: PreTrainedModel) -> None:
    """The first layer has none before it: its own projections hide them. Nothing of a step stays on the device."""
    seen: list[str] = []

    class Watched(Lanes):
        def copy(self, lane: str, work: Callable[[], Any], *sources: torch.Tensor) -> Work[Any]:
            if lane == TO_DEVICE:
                seen.append("copy")
            return super().copy(lane, work, *sources)

    cache = SelectiveCache(llama, pqcache("host"), lanes=Watched())
    with attach(llama), torch.no_grad(), ExitStack() as hooks:
        session = Session(llama, cache, [tokens(90, 1)])
        for i, layer in enumerate(llama.model.layers):
            note = lambda *_, i=i: seen.append(f"layer {i}")  # noqa: E731
            hooks.enter_context(layer.self_attn.q_proj.register_forward_pre_hook(note))
        for _ in range(2):
            seen.clear()
            session.step([4])
            last = len(cache.layers) - 1
            expected = ["copy", "copy", "layer 0"]
            expected += [x for i in range(1, last) for x in ("copy", f"layer {i}")] + [f"layer {last}"]
            assert seen == expected
    for layer in cache.layers:
        assert isinstance(layer, RetrievalLayer)
        assert layer.index.far.near is None and layer.index.far.coming is None
