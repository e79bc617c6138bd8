"""InfLLM's blocks: where they are stored, the block cache, and bytes."""

import pytest
import torch
from transformers import PreTrainedModel

from baselines.infllm import InfLLM
from baselines.infllm.block_store import HostBlockStore
from tests.baselines.drive import run
from tests.baselines.infllm_reference import HALF
from tests.drawn import drawn


def test_least_recently_used_blocks_make_room() -> None:
    """Two blocks stay, and all that a step asks for. Blocks of 3 tokens, two heads of 4 numbers: 192 bytes each."""
    moved: dict[str, int] = {"fetch": 0, "write_back": 0}
    count = lambda kind, nbytes: moved.update({kind: moved[kind] + nbytes})  # noqa: E731
    store, (k, v) = HostBlockStore(1, torch.zeros(1, 2, 0, 4), 3, 1, 2, count), drawn(0, 2, 2, 30, 4)
    store.put(0, k, v)
    assert moved["write_back"] == 10 * 192
    there = 0  # blocks of ten, of which as many chosen at random would have found theirs
    for blocks, fetched, held in (
        ([0, 1], 2, {0, 1}), ([1, 2], 1, {1, 2}), ([0, 2], 1, {0, 2}), ([0], 0, {0, 2}), ([3], 1, {0, 3}),
        ([4, 5, 6], 3, {4, 5, 6}), ([5], 0, {4, 5, 6}),
    ):  # fmt: skip
        before = moved["fetch"]
        got = store.take(torch.tensor([[blocks]]), range(1), 4)
        assert (moved["fetch"] - before, set(store.recent[0][0])) == (192 * fetched, held)
        assert store.served == (len(blocks), len(blocks) - fetched, pytest.approx(len(blocks) * there / 10))
        there = len(held)
        at = torch.tensor([b * 3 + i for b in blocks for i in range(3)])
        assert torch.equal(got[0][0], k[:, at]) and torch.equal(got[1][0], v[:, at])


def test_prefill_loads_land_in_the_prefill_table(llama: PreTrainedModel) -> None:
    method = InfLLM(n_init=4, n_local=16, topk=2, block=4, exc_block=8, store="host", max_cached_blocks=2, budget=HALF)
    prompt, ledger = (run(llama, method, 90, steps).ledger for steps in (0, 8))
    assert prompt.prefill_moved["write_back"] == 3 * ((90 - 16 - 4) // 4) * 2 * 2 * 4 * 16 * 8
    assert prompt.prefill_moved["fetch"] > 0 and not prompt.moved
    assert ledger.moved["write_back"] == 3 * 2 * 2 * 2 * 4 * 16 * 8  # two blocks of four evictions, per layer
    assert 0 < ledger.facts["cache_chance_rate"] < 1
