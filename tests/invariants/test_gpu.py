"""The same invariants on a CUDA device: what the CPU cannot show (pinned memory, streams, two devices)."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.pq import PQCache
from pqcache.selective import Budget, generate
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
    there = generate(on_gpu, case.make(), ids.to("cuda"), max_new_tokens=40)
    here = generate(build("llama"), case.make(), ids, max_new_tokens=40)
    assert there.token_ids == here.token_ids
    assert there.resident_bytes == here.resident_bytes
    assert there.bytes_per_step == here.bytes_per_step


@pytest.mark.parametrize("kmeans_device", ["cpu", "cuda", "auto"])
def test_host_store_equals_resident_store(on_gpu: PreTrainedModel, kmeans_device: str) -> None:
    ids = torch.tensor([tokens(1500, 2)], device="cuda")
    results = [
        generate(
            on_gpu, PQCache(budget=Budget(ratio=0.2), store=store, kmeans_device=kmeans_device), ids, max_new_tokens=200
        ).token_ids
        for store in ("host", "resident")
    ]
    assert results[0] == results[1]
