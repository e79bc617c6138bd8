"""InfLLM's blocks: where they are stored, the block cache, and bytes."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.infllm import InfLLM
from baselines.infllm.block_store import HostBlockStore
from pqcache.api.drive import Session, tokens
from pqcache.selective import Budget, SelectiveCache, attach
from pqcache.selective.layer import Step
from tests.baselines.infllm_reference import HALF, Driver, drawn


def test_least_recently_used_blocks_make_room() -> None:
    """Two blocks stay, and all that a step asks for. Blocks of 3 tokens, two heads of 4 numbers: 192 bytes each."""
    moved: dict[str, int] = {"fetch": 0, "write_back": 0}
    count = lambda kind, nbytes: moved.update({kind: moved[kind] + nbytes})  # noqa: E731
    store, (k, v) = HostBlockStore(1, torch.zeros(1, 2, 0, 4), 3, 1, 2, count), drawn(0, 2, 2, 30, 4).float()
    store.put(0, k, v)
    assert moved["write_back"] == 10 * 192
    for blocks, fetched, held in (
        ([0, 1], 2, {0, 1}), ([1, 2], 1, {1, 2}), ([0, 2], 1, {0, 2}), ([0], 0, {0, 2}), ([3], 1, {0, 3}),
        ([4, 5, 6], 3, {4, 5, 6}), ([5], 0, {4, 5, 6}),
    ):  # fmt: skip
        before = moved["fetch"]
        got = store.take(torch.tensor([[blocks]]), range(1), 4)
        assert (moved["fetch"] - before, set(store.recent[0][0])) == (192 * fetched, held)
        at = torch.tensor([b * 3 + i for b in blocks for i in range(3)])
        assert torch.equal(got[0][0], k[:, at]) and torch.equal(got[1][0], v[:, at])


def mistral(store: str = "host", **hyper: Any) -> Driver:
    """8192 keys and values of one Mistral-7B layer in fp16, written straight into the layer; one decode step done."""
    h, h_kv, d, s = 32, 8, 128, 8192
    method = InfLLM(**{"store": store, "budget": Budget(ratio=0.2), **hyper})
    driver = Driver(method, h, h_kv, torch.float16, d)
    layer = driver.layer
    k, v = (torch.randn(1, h_kv, s, d, generator=torch.Generator().manual_seed(i)).half() for i in range(2))
    ctx, _ = driver.context(Step(False, s, [0], [s], [s], True, True), s, 1)
    layer.load(k, v, ctx)
    driver.past, driver.columns = [s], s
    for seed in (5, 5):
        q = torch.randn(1, h, 1, d, generator=torch.Generator().manual_seed(seed)).half()
        driver.feed(q, k[:, :, :1], v[:, :, :1], [1], decode=True)
    return driver


def test_bytes_of_one_mistral_layer() -> None:
    """Nothing is cached at first: 7 blocks of 512 KiB, the worst case of a step; the same query again moves nothing."""
    driver = mistral()
    memory = driver.layer.memory
    plan = memory.plans[0]
    assert (plan.window, plan.topk, plan.exc) == (816, 7, 512)
    assert memory.blocks.counts == [57]
    facts = driver.ledger.facts  # blocks; of the second step all 7 were there, 7 of 57 at random would have been 7 / 57
    assert (facts["cache_lookups"], facts["cache_hits"]) == (14, 7)
    assert facts["cache_chance_hits"] == pytest.approx(7 * 7 / 57)
    assert driver.ledger.moved == {"fetch": 7 * 512 * 1024}  # of both steps together; nothing was written back
    assert driver.ledger.prefill_moved == {"write_back": 57 * 512 * 1024}
    # 8160 - 816 - 57 * 128 = 48 tokens between window and blocks, and the one or two that decode pushes out
    assert driver.ledger.attended(all_layers=True) == 32 + 7 * 128 + 816 + 48 + 1.5


def test_prefill_loads_land_in_the_prefill_table(llama: PreTrainedModel) -> None:
    method = InfLLM(n_init=4, n_local=16, topk=2, block=4, exc_block=8, store="host", max_cached_blocks=2, budget=HALF)
    cache = SelectiveCache(llama, method)
    with attach(llama), torch.no_grad():
        session = Session(llama, cache, [tokens(90, 1)])
        written = 3 * ((90 - 16 - 4) // 4) * 2 * 2 * 4 * 16 * 8
        assert cache.ledger.prefill_moved["write_back"] == written
        assert cache.ledger.prefill_moved["fetch"] > 0 and not cache.ledger.moved
        for token in tokens(8, 2):
            session.step([token])
    assert cache.ledger.moved["write_back"] == 3 * 2 * 2 * 2 * 4 * 16 * 8  # two blocks of four evictions, per layer
