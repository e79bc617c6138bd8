"""The bytes that a cell is said to need, against what runs really hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pqcache.harness.launch import estimate
from pqcache.harness.run import memory
from pqcache.measure.geometries import geometry
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, generate, record
from pqcache.selective.ledger import unique_bytes

PROMPT, NEW = 1900, 3
UNSHOWN = ("replay", "infinigen", "double_sparsity")  # need prepared data; they count as Full
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=4096,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *((name, 0.2) for name in METHODS if name not in UNSHOWN),
        *((name, 256) for name in ("snapkv", "coded", "quest")),
    ],
)
def test_the_cache_is_what_a_run_holds(model: LlamaForCausalLM, name: str, budget: float) -> None:
    method = method_class(name)(budget=Budget.parse(budget))
    ids = torch.randint(16, 64, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    run = generate(model, method, ids, max_new_tokens=NEW)
    predicted = estimate.cache_bytes(CONFIG, method, PROMPT, NEW, "float32")
    assert sum(predicted.values()) == pytest.approx(sum(run.resident_bytes.values()), rel=0.25)


def test_repeated_keys_and_values_are_counted_as_often(model: LlamaForCausalLM) -> None:
    ids = torch.randint(16, 64, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    for name in ("h2o", "snapkv", "kvcrush"):
        method = method_class(name)(budget=Budget.parse(0.2), repeat_kv=True)
        predicted = sum(estimate.cache_bytes(CONFIG, method, PROMPT, NEW, "float32").values())
        held = generate(model, method, ids, max_new_tokens=NEW).resident_bytes
        assert predicted == pytest.approx(sum(held.values()), rel=0.25), name


@pytest.mark.rest
@pytest.mark.parametrize("store", ["host", "block_cache"])
def test_the_host_holds_the_rest(model: LlamaForCausalLM, store: str) -> None:
    method = method_class("oracle")(budget=Budget.parse(0.2), store=store, cache_tokens=256)
    ids = torch.randint(16, 64, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    run = generate(model, method, ids, max_new_tokens=NEW)
    predicted = estimate.cache_bytes(CONFIG, method, PROMPT, NEW, "float32")
    assert predicted.keys() == run.resident_bytes.keys()
    assert predicted["host"] == pytest.approx(run.resident_bytes["host"], rel=0.25)


def test_weights_and_recording_are_exact(model: LlamaForCausalLM) -> None:
    need = estimate.memory(CONFIG, None, prompt_tokens=100, new_tokens=1, dtype="float32")
    assert need.weights == unique_bytes(model.parameters())
    prefill = record(model, torch.arange(100)[None] % 64)
    assert need.recording == sum(t.numel() * t.element_size() for call in prefill.calls for t in call.tensors())
    assert need.on_device(shared=True) - need.on_device() == need.recording
    assert need.on_host(shared=True, recording_on_host=True) == need.recording


def test_a_known_model() -> None:
    config = geometry("mistral-7b-instruct-v0.2")
    assert estimate.parameter_count(config) == 7_241_732_096  # the model card's 7.24 B
    assert estimate.words(estimate.recording_bytes(config, 32_768, "float16")) == "30.1 GB"
    full = estimate.cache_bytes(config, None, 32_760, 8, "float16")
    assert full == {"device": 2 * 8 * 128 * 2 * 32_768 * 32}
    whole = estimate.prefill_bytes(config, 4096, "float16", attn="standard")
    assert whole - estimate.prefill_bytes(config, 4096, "float16") > 2 * 32 * 4096**2 * 4 * 0.9


@pytest.mark.rest
def test_temporaries_are_those_of_a_forward_pass() -> None:
    """The most that torch holds at once beside weights and cache in a pass over one layer, by its own count."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.weak import WeakIdKeyDictionary

    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    class Peak(TorchDispatchMode):
        live, most = WeakIdKeyDictionary(), 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.live[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
            self.most = max(self.most, sum(self.live.values()))
            return out

    tokens = 2048
    ids = torch.randint(64, (1, tokens))
    with torch.no_grad(), Peak() as peak:
        generate(model, method_class("full")(), ids, max_new_tokens=1)
    cache = sum(estimate.cache_bytes(config, None, tokens, 1, "float32").values())
    assert estimate.prefill_bytes(config, tokens, "float32") == pytest.approx(peak.most - cache, rel=0.35)


def test_this_machine_has_memory(tmp_path: Path) -> None:
    free = estimate.device_memory("cpu")
    assert free is not None and 2**26 < free < 2**50
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert memory.group_limit(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.group_limit(tmp_path) is None
