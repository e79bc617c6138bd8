"""Rotation outside the forward pass, on every architecture: what the hooks see is what the model used."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from baselines.full import Full
from pqcache.diagnostics import Capture
from pqcache.selective import SelectiveCache, attach, rope
from pqcache.selective.attach import attention_modules
from pqcache.selective.shape import served
from scripts.try_architectures import FAMILIES
from tests.invariants.cases import ARCHITECTURES, ROTATED, SMALL

# a norm over all heads' queries; a norm of each head's under another name; a gate beside each head's query
PROJECTIONS = {family.kind: family.options for family in FAMILIES if family.kind in ("olmo2", "lfm2", "qwen3_next")}


@pytest.mark.parametrize("architecture", [*ROTATED, "llama-yarn", *PROJECTIONS])
@torch.no_grad()
def test_rotate_unrotate_and_project_query(architecture: str) -> None:
    if architecture == "llama-yarn":  # yarn scales cos and sin: un-rotating must undo that, too
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
        config = LlamaConfig(**SMALL, rope_parameters=scaling)
    elif architecture in PROJECTIONS:
        config = AutoConfig.for_model(architecture, **{**SMALL, **PROJECTIONS[architecture]})
    else:
        config = ARCHITECTURES[architecture]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = SelectiveCache(model, Full())
    cache.watchers.append(seen := Capture())
    with attach(model):
        model(torch.randint(3, 100, (2, 9)), past_key_values=cache)
    assert len(seen.calls) == len(served(config))
    for q, k, ctx in ((call.q, call.k, call.ctx) for call in seen.calls):
        plain = rope.project_query(ctx.module, ctx.hidden)
        torch.testing.assert_close(rope.rotate(ctx.module, plain, ctx.cos, ctx.sin), q)
        torch.testing.assert_close(rope.unrotate(ctx.module, q, ctx.cos, ctx.sin), plain, rtol=1e-4, atol=1e-5)
        cos, sin = rope.tables(ctx.rotary, k, torch.arange(9)[None].expand(2, -1))
        torch.testing.assert_close(
            rope.rotate(ctx.module, rope.unrotate(ctx.module, k, cos, sin), cos, sin), k, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("architecture", ROTATED)
@torch.no_grad()
def test_queries_of_one_token_are_those_of_the_model(architecture: str) -> None:
    """One fp32 token on the CPU is multiplied head by head, two are multiplied by the model's own module."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](), dtype=torch.float32).eval()
    module = attention_modules(model)[-1]
    hidden = torch.randn(2, 1, model.config.get_text_config(decoder=True).hidden_size)
    one = rope.project_query(module, hidden[:1])
    torch.testing.assert_close(one, rope.project_query(module, hidden)[:1], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_queries_of_one_token_see_a_hook() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval()
    module = attention_modules(model)[0]
    hidden = torch.randn(1, 1, model.config.hidden_size)
    plain = rope.project_query(module, hidden)
    with module.q_proj.register_forward_hook(lambda part, args, out: 2 * out):
        torch.testing.assert_close(rope.project_query(module, hidden), 2 * plain)
    torch.testing.assert_close(rope.project_query(module, hidden), plain)
