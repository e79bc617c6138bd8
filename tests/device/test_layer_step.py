"""A decoder layer's step by fused kernels: the stock layer's numbers, for every cache; the stock layer wherever it is needed."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

from baselines.full import Full
from pqcache.device.switch import interpreted
from pqcache.device.triton_model import ModelParts, Sizes
from pqcache.selective import SelectiveCache, attach
from pqcache.selective.layer_step import is_stock

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}


def parts_of(n: int, hidden: int, d: int, dtype: torch.dtype) -> ModelParts:
    return ModelParts(Sizes(n, hidden, 4, 2, d, dtype, torch.device("cpu")))


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [16, 24])
def test_rotation_is_the_models_own_bit_by_bit(d: int, dtype: torch.dtype) -> None:
    n = 3
    q, k = drawn(n, 4, 1, d, dtype=dtype), drawn(n, 2, 1, d, dtype=dtype, seed=1)
    for rows in (1, n):  # one position for all rows, or one each
        angle = drawn(rows, 1, d // 2, dtype=torch.float32, seed=2).repeat(1, 1, 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        rotated = parts_of(n, 64, d, dtype).rotate(q.view(n, 1, -1), k.view(n, 1, -1), cos, sin)
        for ours, own in zip(rotated, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert torch.equal(ours, own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 4096])
def test_a_norm_is_the_models_own_but_for_the_order_of_its_sum(hidden: int, dtype: torch.dtype) -> None:
    """The sum before it has one rounding and is equal; of the norms, one number in a thousand may be a rounding step off."""
    n, norm = 3, LlamaRMSNorm(hidden, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(drawn(hidden, dtype=dtype))
        x, add = drawn(n, 1, hidden, dtype=dtype, seed=1), drawn(n, 1, hidden, dtype=dtype, seed=2)
        parts = parts_of(n, hidden, 16, dtype)
        total, normed = parts.add_norm(x, add, norm.weight, 1e-5)
        assert torch.equal(total, x + add)
        for ours, own in ((parts.norm(x, norm.weight, 1e-5), norm(x)), (normed, norm(x + add))):
            step = torch.finfo(dtype).eps * own.abs().float()
            assert ((ours.float() - own.float()).abs() <= (4 if dtype == torch.float32 else 1) * step).all()
            if dtype != torch.float32:
                assert (ours != own).sum() <= own.numel() / 1000


def small(name: str, dtype: torch.dtype, layers: int = 2) -> nn.Module:
    config = CONFIGS[name](
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter.float()) * 0.3)
    return model


def answers(model: nn.Module, cache: object, steps: int = 3) -> torch.Tensor:
    """Logits of a prompt of two rows, one of them padded, and of steps after it."""
    ids, mask = torch.arange(20).view(2, 10) % 64, torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    outs = []
    with torch.no_grad():
        for _ in range(steps + 1):
            out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
            outs.append(out.logits[:, -1])
            ids, mask = out.logits[:, -1].argmax(-1, keepdim=True), torch.cat([mask, mask[:, :1] * 0 + 1], 1)
    return torch.stack(outs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("mistral", torch.float16, marks=pytest.mark.rest),
        ("qwen2", torch.bfloat16),
    ],
)
def test_steps_of_any_cache_are_the_stock_models(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own cache, and Full's: what one method's model does, every method's does."""
    model, fused = small(name, dtype), []
    rotate = ModelParts.rotate
    monkeypatch.setattr(ModelParts, "rotate", lambda *args: fused.append(1) or rotate(*args))
    with attach(model):
        stock = [answers(model, DynamicCache(config=model.config)), answers(model, SelectiveCache(model, Full()))]
        assert not fused
        with interpreted():
            ours = answers(model, DynamicCache(config=model.config)), answers(model, SelectiveCache(model, Full()))
    assert len(fused) == 2 * 2 * 3  # caches, layers, steps
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(stock, ours, strict=True):
        assert (a - b).abs().max() <= close * a.abs().max()
    assert "forward" not in model.model.layers[0].__dict__  # nothing stays behind


def test_hooks_outputs_gradients_and_prompts_get_the_stock_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fused = small("llama", torch.float32), []
    rotate = ModelParts.rotate
    monkeypatch.setattr(ModelParts, "rotate", lambda *args: fused.append(1) or rotate(*args))
    token = torch.tensor([[3]])

    def step(**kwargs: object) -> object:
        cache = DynamicCache(config=model.config)
        with interpreted(), torch.no_grad():
            model(input_ids=torch.arange(5)[None], past_key_values=cache)
            return model(input_ids=token, past_key_values=cache, **kwargs)

    with attach(model):
        step()
        assert len(fused) == 2
        fused.clear()
        seen: list[torch.Tensor] = []
        handle = model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: seen.append(out))
        step()
        assert len(seen) == 2 and not fused  # the prompt and the step
        handle.remove()
        assert len(step(output_hidden_states=True).hidden_states) == 3 and not fused  # type: ignore[attr-defined]
        with interpreted(), torch.enable_grad():
            model(input_ids=token).logits.sum().backward()
        assert model.model.layers[0].mlp.up_proj.weight.grad is not None and not fused
    step()
    assert not fused


def test_only_layers_that_are_known_are_replaced() -> None:
    layer = small("llama", torch.float32, layers=1).model.layers[0]

    class Adapted(nn.Linear):
        """As an adapter or a quantized product would be."""

    assert is_stock(layer)
    plain, layer.mlp.up_proj = layer.mlp.up_proj, Adapted(32, 48, bias=False)
    assert not is_stock(layer)
    layer.mlp.up_proj = plain
    layer.self_attn.__dict__["forward"] = layer.self_attn.forward  # as accelerate does
    assert not is_stock(layer)
