"""The same invariants on a CUDA device: what the CPU cannot show (pinned memory, streams, two devices)."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from pqcache.pq import PQCache
from pqcache.selective import Budget, SelectiveCache, attach, generate
from pqcache.selective.captured import CapturedSteps
from pqcache.selective.method import Method
from tests.device.tables import counted_tables
from tests.invariants.cases import Case
from tests.invariants.conftest import build
from tests.invariants.drive import tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu() -> PreTrainedModel:
    return copy.deepcopy(build("llama")).to("cuda")


def test_noop_tokens_equal_stock(on_gpu: PreTrainedModel, case: Case) -> None:
    ids = torch.tensor([tokens(300, 1)], device="cuda")
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    stock = on_gpu.generate(ids, **options)[0, 300:].tolist()
    assert generate(on_gpu, case.noop(), ids, max_new_tokens=20).token_ids == stock


def test_tokens_equal_those_of_the_cpu(on_gpu: PreTrainedModel, case: Case) -> None:
    ids = torch.tensor([tokens(300, 1)])
    with counted_tables() as tables:  # of decode steps by kernels
        there = generate(on_gpu, case.make(), ids.to("cuda"), max_new_tokens=40)
    here = generate(build("llama"), case.make(), ids, max_new_tokens=40)
    assert there.token_ids == here.token_ids
    on_device = here.resident_bytes["device"] + tables.bytes
    assert there.resident_bytes == {**here.resident_bytes, "device": on_device}
    assert there.bytes_per_step == here.bytes_per_step


@pytest.mark.parametrize("kmeans_device", ["cpu", "cuda", "auto"])
def test_host_store_equals_resident_store(on_gpu: PreTrainedModel, kmeans_device: str) -> None:
    ids = torch.tensor([tokens(1500, 2)], device="cuda")
    results = []
    for where in ({"store": "host"}, {"store": "resident"}, {"store": "host", "codes_store": "host"}):
        method = PQCache(budget=Budget(ratio=0.2), kmeans_device=kmeans_device, **where)
        results.append(generate(on_gpu, method, ids, max_new_tokens=200).token_ids)
    assert results[0] == results[1] == results[2]


@pytest.fixture(scope="module")
def half() -> PreTrainedModel:
    return copy.deepcopy(build("llama")).half().to("cuda")


def started(model: PreTrainedModel, method: Method, s: int = 700) -> tuple[SelectiveCache, torch.Tensor]:
    """A prompt and one decode step, which makes and compiles what later steps reuse; and the next step's input."""
    cache = SelectiveCache(model, method)
    ids = torch.tensor([tokens(s, 3)], device="cuda")
    cache.begin([s])
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    return cache, token


def pqcache(store: str) -> PQCache:
    """With a block cache of four blocks, so that they come and go."""
    return PQCache(
        budget=Budget(ratio=0.2), store=store, kmeans_device="cuda", cache_block=32, cache_tokens=128, cache_topk=4
    )


@pytest.mark.parametrize("store", ["resident", "host", "block_cache"])
def test_a_decode_step_never_waits_for_the_device(half: PreTrainedModel, store: str) -> None:
    method = pqcache(store)
    with attach(half), torch.no_grad():
        cache, token = started(half, method)
        assert all(layer.substitute is not None for layer in cache.layers)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                token = half(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["full", "resident", "host", "block_cache"])
def test_recorded_steps_equal_ordinary_ones(half: PreTrainedModel, method: str) -> None:
    def make() -> Method:
        return Full() if method == "full" else pqcache(method)

    with attach(half), torch.no_grad():
        cache, token = started(half, make())
        if method == "full":
            for layer in cache.layers:
                layer.prepare_capture(800)  # the same kernels
        ordinary = []
        for _ in range(40):
            token = half(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            ordinary.append(token.item())
        recorded, token = started(half, make())
        steps = CapturedSteps(half, recorded, token, 40)
        assert [steps.replay().item() for _ in range(40)] == ordinary
        with pytest.raises(ValueError, match="no room"):
            steps.replay()
    for one in (cache, recorded):
        one.wait()
    assert recorded.past == cache.past and recorded.ledger.moved == cache.ledger.moved
    assert recorded.ledger.attended(all_layers=True) == pytest.approx(cache.ledger.attended(all_layers=True))


@pytest.mark.parametrize("store", ["resident", "host", "block_cache"])
def test_ordinary_steps_go_on_after_recorded_ones(half: PreTrainedModel, store: str) -> None:
    method = pqcache(store)
    with attach(half), torch.no_grad():
        runs = []
        for replays in (0, 1, 5):
            cache, token = started(half, method)
            steps = CapturedSteps(half, cache, token, 8) if replays else None
            got = []
            for i in range(10):
                if steps is not None and i < replays:
                    token = steps.replay().clone()
                else:
                    token = half(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
                got.append(token.item())
            cache.wait()
            runs.append((got, cache.past, dict(cache.ledger.moved)))
            if steps is not None:
                with pytest.raises(RuntimeError, match="something else"):
                    steps.replay()
    assert runs[0] == runs[1] == runs[2]


def test_the_block_cache_changes_no_token_and_holds_no_stale_block(half: PreTrainedModel) -> None:
    """Steps by kernels over both stores, a reorder, steps; then every cached block is that of the host rows, hits add up."""
    with attach(half), torch.no_grad():
        runs = []
        for store in ("host", "block_cache"):
            cache, token = started(half, pqcache(store))
            got = []
            for i in range(80):
                if i == 40:
                    cache.map_rows(torch.tensor([0], device="cuda"))
                token = half(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
                got.append(token.item())
            cache.wait()
            runs.append((got, cache))
    (expected, host), (got, cache) = runs
    assert got == expected
    facts, layers = cache.ledger.reported(), cache.layers
    token_bytes = 2 * cache.shape.d * 2
    assert facts["cache_hits"] * token_bytes == host.ledger.moved["fetch"] - cache.ledger.moved["fetch"] > 0
    for layer in layers:
        layer.take_back()
        store = layer.store
        for slot, block in enumerate(store.content[0].tolist()):
            if block >= 0:
                for buffer, rows in zip(store.cache, store.host, strict=True):
                    ours, theirs = buffer.data[0, :, slot * 32 :][:, :32].cpu(), rows.data[0, :, block * 32 :][:, :32]
                    assert torch.equal(ours, theirs)
