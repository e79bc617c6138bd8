"""The same invariants on a CUDA device: what the CPU cannot show (pinned memory, streams, recorded steps)."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from baselines.snapkv import SnapKV
from pqcache.api.drive import tokens
from pqcache.pq import PQCache
from pqcache.registry import method_class
from pqcache.selective import Budget, SelectiveCache, attach, generate
from pqcache.selective.captured import CapturedSteps
from pqcache.selective.method import Method
from tests.invariants.cases import Case
from tests.invariants.conftest import build

pytestmark = pytest.mark.gpu
RECORDED = {
    "full": Full,
    "pqcache": lambda: PQCache(budget=Budget(ratio=0.2), kmeans_device="cuda"),
    "snapkv": lambda: SnapKV(budget=Budget(ratio=0.3)),
}


@pytest.fixture(scope="module")
def on_gpu() -> PreTrainedModel:
    return copy.deepcopy(build("llama")).to("cuda")


@pytest.fixture(scope="module")
def half() -> PreTrainedModel:
    return copy.deepcopy(build("llama")).half().to("cuda")


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_noop_tokens_equal_stock(on_gpu: PreTrainedModel, case: Case, kernels: str) -> None:
    ids = torch.tensor([tokens(300, 1)], device="cuda")
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    stock = on_gpu.generate(ids, **options)[0, 300:].tolist()
    assert generate(on_gpu, case.noop(), ids, max_new_tokens=20, kernels=kernels).token_ids == stock


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_tokens_equal_those_of_the_cpu(on_gpu: PreTrainedModel, case: Case, kernels: str) -> None:
    ids = torch.tensor([tokens(300, 1)])
    there = generate(on_gpu, case.make(), ids.to("cuda"), max_new_tokens=40, kernels=kernels)
    here = generate(build("llama"), case.make(), ids, max_new_tokens=40)
    assert there.token_ids == here.token_ids and there.bytes_per_step == here.bytes_per_step
    if kernels == "torch":  # steps by kernels have tables of their own
        assert there.resident_bytes == here.resident_bytes


@pytest.mark.parametrize("kmeans_device", ["cpu", "cuda", "auto"])
def test_host_store_equals_resident_store(on_gpu: PreTrainedModel, kmeans_device: str) -> None:
    ids = torch.tensor([tokens(1500, 2)], device="cuda")
    results = []
    for where in ({"store": "host"}, {"store": "resident"}, {"store": "host", "codes_store": "host"}):
        method = PQCache(budget=Budget(ratio=0.2), kmeans_device=kmeans_device, **where)
        results.append([generate(on_gpu, method, ids, max_new_tokens=200).token_ids for _ in range(2)])
    assert results[0] == results[1] == results[2] and results[0][0] == results[0][1]


@pytest.mark.parametrize("method", ["clusterkv", "retroinfer"])
def test_clusters_are_the_same_in_every_run(half: PreTrainedModel, method: str) -> None:
    """Sums on a GPU come in any order, unless they are sorted first."""
    ids = torch.tensor([tokens(1500, 2)], device="cuda")
    runs = [generate(half, method_class(method)(budget=Budget(ratio=0.2)), ids, max_new_tokens=60) for _ in range(3)]
    assert all(run.token_ids == runs[0].token_ids for run in runs)


def started(model: PreTrainedModel, method: Method, s: int = 700) -> tuple[SelectiveCache, torch.Tensor]:
    """A prompt and two decode steps, which make and compile what later steps reuse; and the next step's input."""
    cache = SelectiveCache(model, method, kernels="auto")
    cache.begin([s])
    token = torch.tensor([tokens(s, 3)], device=model.device)
    for _ in range(3):
        token = step(model, cache, token)
    return cache, token


def step(model: PreTrainedModel, cache: SelectiveCache, token: torch.Tensor) -> torch.Tensor:
    return model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)


@pytest.mark.parametrize("name", RECORDED)
def test_a_decode_step_by_kernels_never_waits_for_the_device(half: PreTrainedModel, name: str) -> None:
    with attach(half), torch.no_grad():
        cache, token = started(half, RECORDED[name]())
        assert all(layer.substitute is not None for layer in cache.layers)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                token = step(half, cache, token)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("replays", [1, 5, 40])
def test_recorded_steps_equal_ordinary_ones(half: PreTrainedModel, name: str, replays: int) -> None:
    """And ordinary steps go on after them."""
    with attach(half), torch.no_grad():
        cache, token = started(half, RECORDED[name]())
        ordinary = []
        for _ in range(40):
            token = step(half, cache, token)
            ordinary.append(token.item())
        recorded, token = started(half, RECORDED[name]())
        steps, got = CapturedSteps(half, recorded, token, 40), []
        for i in range(40):
            token = steps.replay().clone() if i < replays else step(half, recorded, token)
            got.append(token.item())
    assert got == ordinary and recorded.past == cache.past
    assert recorded.ledger.attended(all_layers=True) == pytest.approx(cache.ledger.attended(all_layers=True))
