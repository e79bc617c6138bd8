"""Hybrid models: transformers' own answers, states that follow the rows, and methods that serve the layers of attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from pqcache.registry import method_class
from pqcache.selective import Budget, NotApplicable, SelectiveCache, attach, generate, record
from pqcache.selective.hybrid import tensors
from pqcache.selective.lockstep import lockstep
from pqcache.selective.shape import served
from pqcache.selective.support import unrotated
from scripts.try_architectures import FAMILIES, SMALL

S = 40
FULL = method_class("full")
OPTIONS = {family.kind: family.options for family in FAMILIES}
# convolutions; gated attention; attention beside a state in each layer; no rotation; one module per layer; three states a layer
KINDS = ("lfm2", "qwen3_next", "falcon_h1", "granitemoehybrid", "nemotron_h", "kimi_linear")


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small(request.param)


def small(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **OPTIONS[kind]})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    for weight in model.parameters():
        weight.data *= 3 if weight.ndim > 1 else 1
    return model


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the first one left-padded, and their mask."""
    ids = torch.randint(3, 128, (2, S), generator=torch.Generator().manual_seed(1))
    ids[0, :13] = 0
    return ids, (ids != 0).long()


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, sizes: list[int], masked: bool) -> torch.Tensor:
    """Of every position of blocks of these sizes."""
    ids, mask = prompt()
    positions, out, end = (mask.cumsum(-1) - 1).clamp_min(0), [], 0
    for size in sizes:
        start, end = end, end + size
        how = {"attention_mask": mask[:, :end]} if masked else {}
        block = {"input_ids": ids[:, start:end], "position_ids": positions[:, start:end]}
        out.append(model(**block, past_key_values=cache, use_cache=True, **how).logits)
    return torch.cat(out, 1)[mask.bool()]


@pytest.mark.parametrize(
    "sizes", [[30, *[1] * 10], [17, 13, *[1] * 10], [30, 1, 1, 8]], ids=["whole", "chunks", "turns"]
)
def test_logits_are_those_of_transformers(hybrid: PreTrainedModel, sizes: list[int]) -> None:
    """Also where nothing but `begin` says what is padding, which states must not see."""
    stock = DynamicCache(config=hybrid.config)
    theirs = logits(hybrid, stock, sizes, masked=True)
    kept = sum(x.nbytes for x in tensors(stock))
    for masked in (True, False):
        with attach(hybrid):
            cache = SelectiveCache(hybrid, FULL())
            cache.begin([17, 30], left_padded=True)
            ours = logits(hybrid, cache, sizes, masked)
        assert (ours - theirs).abs().max() < 1e-9
    assert cache.other_bytes() == kept > 0


def test_beams(hybrid: PreTrainedModel) -> None:
    """States follow their rows."""
    ids, mask = prompt()
    call = partial(hybrid.generate, ids, attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=3)
    theirs = call()
    with attach(hybrid):
        assert torch.equal(call(past_key_values=SelectiveCache(hybrid, FULL())), theirs)


def test_methods_serve_the_layers_of_attention(hybrid: PreTrainedModel) -> None:
    """A prefill in common and steps in common give what each method gives alone; a request leaves nothing to the next."""
    ids, names = prompt()[0][1:], ("full", "pqcache", "h2o", "pyramidkv", "infllm", "int8")
    plain = hybrid.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)[0, S:].tolist()
    prefill = record(hybrid, ids, prefill_chunk=16, device="cpu")
    alone, works = [], []
    for name in names:
        try:
            method = method_class(name)(budget=Budget(ratio=0.3))
            alone.append(generate(hybrid, method, ids, max_new_tokens=5))
        except NotApplicable:
            assert name == "infllm" and unrotated(hybrid.config)
            continue
        works.append(
            partial(generate, hybrid, method, ids, max_new_tokens=5, prefill=prefill if name != "infllm" else None)
        )
    assert alone[0].token_ids == plain
    for mine, other in zip(lockstep(hybrid, works), alone, strict=True):
        assert (mine.token_ids, mine.attended_tokens, mine.resident_bytes) == (
            other.token_ids, other.attended_tokens, other.resident_bytes,
        )  # fmt: skip
        assert mine.extra["other_layers_bytes"] == other.extra["other_layers_bytes"] > 0
        assert mine.extra["served_layers"] == len(served(hybrid.config))


@torch.no_grad()
def test_a_refused_pass_is_not_continued() -> None:
    """Layers before the first attention have taken its tokens in."""
    model, ids = small("lfm2"), prompt()[0][1:]
    with attach(model):
        cache = SelectiveCache(model, FULL())
        cache.begin([8])
        with pytest.raises(ValueError, match="crosses the end"):
            model(ids[:, :9], past_key_values=cache, use_cache=True)
        with pytest.raises(RuntimeError, match="did not finish"):
            model(ids[:, :8], past_key_values=cache, use_cache=True)
        cache.begin([8])
        model(ids[:, :8], past_key_values=cache, use_cache=True)
