"""Copies and index builds beside the model, slowed down at random: the same bits, nothing stale, nothing left behind."""

import gc
import random
import threading
import time
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import Session, logits, tokens
from pqcache.pq import PQCache
from pqcache.registry import method_class
from pqcache.selective import Budget, Method, SelectiveCache, attach, generate
from pqcache.store.host import HostStore
from pqcache.store.lanes import BUILD, THREAD_PREFIX, TO_HOST, Lanes, ThreadLanes
from tests.invariants.cases import BY_ID
from tests.thin import thin

CACHE: dict[str, Any] = {"store": "block_cache", "cache_block": 8, "cache_tokens": 40, "cache_topk": 4}
SMALL: dict[str, Any] = {"n_sink": 8, "b": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pqcache": ("pqcache", SMALL),
    "pqcache host": ("pqcache", {**SMALL, "store": "host"}),
    "pqcache lru": ("pqcache", {**SMALL, **CACHE}),
    "pqcache lfu": ("pqcache", {**SMALL, **CACHE, "cache_policy": "lfu"}),
    "pqcache far": ("pqcache", {**SMALL, "store": "host", "codes_store": "host"}),
    "oracle host": ("oracle", {"n_sink": 8, "store": "host"}),
    "sparq lru": ("sparq", {"n_sink": 8, "r": 2, **CACHE}),
    "infinigen lru": ("infinigen", {"calibration_tokens": 32, **CACHE}),
    "infinigen host": ("infinigen", {"calibration_tokens": 32, "store": "host"}),
    "clusterkv recent": ("clusterkv", {**BY_ID["clusterkv-1"].hyper, "window_clusters": 2, "cache_steps": 2}),
    "two_stage host": ("two_stage", {**BY_ID["two_stage"].hyper, "store": "host"}),
    "pqcache paying": ("pqcache", {**SMALL, **CACHE, "cache_policy": "paying"}),
    "infinigen paying": ("infinigen", {"calibration_tokens": 32, **CACHE, "cache_policy": "paying"}),
}
METHODS = {
    name: partial(method_class(kind), budget=Budget(ratio=0.25), **options) for name, (kind, options) in CASES.items()
}


def slow(seed: int, most_ms: float = 3.0, workers: int = 2) -> ThreadLanes:
    """Lanes whose every piece of work begins late, some of it much later than the model wants it."""
    draw, lock = random.Random(seed), threading.Lock()

    def pause(kind: str) -> None:
        with lock:
            delay = draw.choice((0.0, draw.random(), 1.0)) * most_ms
        time.sleep(delay / 1e3)

    return ThreadLanes(workers, pause)


def left_behind() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)]


@torch.no_grad()
def run(model: PreTrainedModel, method: Method, lanes: Lanes, seed: int) -> tuple[torch.Tensor, SelectiveCache]:
    """Three padded rows, one of them shorter than the sinks; steps, a reorder, a new turn, steps."""
    cache = SelectiveCache(model, method, lanes=lanes)
    prompt = [tokens(90, seed), tokens(61, seed + 1), tokens(6, seed + 2)]
    with attach(model):
        session = Session(model, cache, prompt)
        out = [session.step([token] * 3) for token in tokens(4, seed + 3)]
        session.reorder([1, 0, 0])
        out += [session.step([token] * 3) for token in tokens(3, seed + 4)]
        out.append(session.turn([tokens(40, seed + 5)] * 3))
        out += [session.step([token] * 3) for token in tokens(4, seed + 6)]
    cache.wait()
    return torch.stack(out), cache


@pytest.mark.parametrize("name", thin(METHODS, 8))
@pytest.mark.rest
def test_slow_lanes_change_no_bit_and_no_byte(llama: PreTrainedModel, name: str) -> None:
    expected, plain = run(llama, METHODS[name](), Lanes(), 1)
    for seed in range(2):
        out, cache = run(llama, METHODS[name](), slow(seed), 1)
        assert torch.equal(out, expected)
        assert dict(cache.ledger.moved) == dict(plain.ledger.moved)
        assert dict(cache.ledger.prefill_moved) == dict(plain.ledger.prefill_moved)
        assert cache.resident_bytes() == plain.resident_bytes()
        counts = {k: v for k, v in cache.ledger.reported().items() if not k.endswith("_s")}
        assert counts == {k: v for k, v in plain.ledger.reported().items() if not k.endswith("_s")}
        cache.lanes.close()
    assert not left_behind()


@torch.no_grad()
@pytest.mark.parametrize("store", ["host", "block_cache"])
@pytest.mark.rest
def test_a_prompt_does_not_wait_for_copies_and_clustering(llama: PreTrainedModel, store: str) -> None:
    """Nothing may begin before the prompt's logits are there; the first step then waits for what it needs."""
    gate = threading.Event()
    lanes = ThreadLanes(1, lambda kind: None if gate.wait(120) else pytest.fail("never opened"))
    method = PQCache(budget=Budget(ratio=0.25), store=store, **SMALL)
    prompt, fed = tokens(90, 1), tokens(3, 2)
    expected = logits(llama, method, [prompt], [[t] for t in fed])
    cache = SelectiveCache(llama, method, lanes=lanes)
    with attach(llama):
        session = Session(llama, cache, [prompt])
        assert torch.equal(session.last, expected[:, 0])
        for layer in cache.layers:
            assert isinstance(layer.store, HostStore)
            assert layer.index.building is not None and not layer.store.host[0].data.any()
        threading.Timer(0.05, gate.set).start()
        for i, token in enumerate(fed):
            assert torch.equal(session.step([token]), expected[:, i + 1])
    assert all(layer.index.building is None for layer in cache.layers)
    assert cache.ledger.index_build_s > 0  # the first step's wait
    lanes.close()


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("name", ["pqcache", "pqcache host", "pqcache lru"])
def test_an_exception_in_mid_prefill_leaves_nothing_behind(llama: PreTrainedModel, name: str) -> None:
    """No thread, no future, no stale row: the same lanes then serve another prompt as fresh ones do."""
    lanes = ThreadLanes(1, lambda kind: time.sleep(0.01))
    ids = torch.tensor([tokens(100, 1)])
    with llama.model.layers[2].mlp.register_forward_pre_hook(Mock(side_effect=Broken)), pytest.raises(Broken):
        generate(llama, METHODS[name](), ids, max_new_tokens=4, lanes=lanes)
    assert not left_behind()
    expected = generate(llama, METHODS[name](), ids[:, :77], max_new_tokens=6).token_ids
    assert generate(llama, METHODS[name](), ids[:, :77], max_new_tokens=6, lanes=lanes).token_ids == expected
    assert not left_behind()


@pytest.mark.parametrize("lane", [BUILD, TO_HOST])
def test_what_goes_wrong_beside_the_model_is_raised_where_it_is_needed(llama: PreTrainedModel, lane: str) -> None:
    def pause(kind: str) -> None:
        if kind == lane:
            raise Broken(lane)

    lanes = ThreadLanes(2, pause)
    with pytest.raises(Broken, match=lane):
        generate(llama, METHODS["pqcache host"](), torch.tensor([tokens(80, 1)]), max_new_tokens=3, lanes=lanes)
    assert not left_behind()


def test_a_lane_that_failed_does_nothing_more() -> None:
    lanes, done = ThreadLanes(), []
    first = lanes.copy(TO_HOST, lambda: 1 / 0)
    second = lanes.copy(TO_HOST, lambda: done.append(1))
    for work in (first, second):
        with pytest.raises(ZeroDivisionError):
            work.finish()
    lanes.close()
    assert not done
    lanes.copy(TO_HOST, lambda: done.append(2)).finish()  # and can be used again
    assert done == [2]
    lanes.close()


def test_closing_waits_for_what_runs_and_drops_what_does_not() -> None:
    lanes, done, gate, begun = ThreadLanes(1), [], threading.Event(), threading.Event()
    copied = lanes.copy(TO_HOST, lambda: gate.wait(60))

    def build() -> None:  # one that waits for a copy
        begun.set()
        copied.finish()
        done.append("built")

    lanes.build(build)
    assert begun.wait(60)
    later = lanes.build(lambda: done.append("never"))
    later.future.add_done_callback(lambda _: gate.set())  # type: ignore[attr-defined]
    lanes.close()
    assert done == ["built"] and not left_behind()
    assert later.future.cancelled()  # type: ignore[attr-defined]


def test_a_dropped_cache_takes_its_threads_with_it(llama: PreTrainedModel) -> None:
    cache = SelectiveCache(llama, METHODS["pqcache host"](), lanes=slow(0))
    with attach(llama), torch.no_grad():
        Session(llama, cache, [tokens(80, 1)]).step([4])
    assert left_behind()
    del cache
    gc.collect()
    deadline = time.monotonic() + 5
    while left_behind() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left_behind()


def test_one_token_is_reported_with_its_index(llama: PreTrainedModel) -> None:
    """No decode step ever waits for it; figures are final all the same."""
    ids = torch.tensor([tokens(90, 4)])
    one = generate(llama, METHODS["pqcache lru"](), ids, max_new_tokens=1)
    other = generate(llama, METHODS["pqcache lru"](), ids, max_new_tokens=1, lanes=slow(2))
    assert other.resident_bytes == one.resident_bytes
    assert other.extra["kmeans_iterations"] == one.extra["kmeans_iterations"] > 0


def test_under_inference_mode(llama: PreTrainedModel) -> None:
    """Its tensors may be written to only where the mode is on, which is a matter of each thread."""
    with torch.inference_mode():
        expected = logits(llama, METHODS["pqcache lru"](), [tokens(90, 1)], [[5], [6], [7]])
        cache = SelectiveCache(llama, METHODS["pqcache lru"](), lanes=slow(1))
        out = logits(llama, METHODS["pqcache lru"](), [tokens(90, 1)], [[5], [6], [7]], cache=cache)
    assert torch.equal(out, expected)
    cache.lanes.close()
