"""Layers with a sliding window or a state, which no method serves: transformers' own answers, and methods beside them."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from baselines import infinigen
from pqcache.diagnostics import Capture
from pqcache.registry import METHODS
from pqcache.selective import Budget, NotApplicable, SelectiveCache, attach, generate, record
from pqcache.selective.hybrid import READS_STATES, tensors
from pqcache.selective.lockstep import lockstep
from pqcache.selective.shape import served
from pqcache.selective.sliding import SlidingLayer
from scripts.try_architectures import FAMILIES, SMALL
from tests.baselines.common import made
from tests.thin import thin

WINDOW, S = 16, 52  # prompts of more than three windows
SLIDING = ("gemma3_text", "olmo3", "exaone4")
ALL_SLIDE = ("mistral", "starcoder2")
LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOWS: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW, "layer_types": LAYERS, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "sdpa",
}  # fmt: skip
# convolutions; gated attention; attention beside a state in each layer; no rotation; one module per layer; three states a layer
HYBRID = (
    () if not READS_STATES else ("lfm2", "qwen3_next", "falcon_h1", "granitemoehybrid", "nemotron_h", "kimi_linear")
)
OPTIONS = {family.kind: {**SMALL, **family.options} for family in FAMILIES if family.kind in HYBRID}
OPTIONS |= dict.fromkeys(SLIDING, WINDOWS)
OPTIONS |= dict.fromkeys(ALL_SLIDE, {key: value for key, value in WINDOWS.items() if key != "layer_types"})


def small(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **OPTIONS[kind])
    experts = {"experts_implementation": "eager"} if kind in HYBRID else {}
    model = AutoModelForCausalLM.from_config(config, **experts).double().eval()
    for weight in model.parameters():
        weight.data *= 3 if weight.ndim > 1 and kind in HYBRID else 1
    return model


@pytest.fixture(scope="module", params=thin([*SLIDING, *HYBRID, *ALL_SLIDE], 3))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small(request.param)


def prompt(pad: int = 21) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the first one left-padded, and their mask."""
    ids = torch.randint(3, 96, (2, S), generator=torch.Generator().manual_seed(1))
    ids[0, :pad] = 0
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
    "sizes",
    [
        pytest.param([42, *[1] * 10], id="whole", marks=pytest.mark.rest),
        pytest.param([WINDOW, 7, 19, *[1] * 10], id="chunks"),
        pytest.param([42, 1, 1, 8], id="turns"),
    ],
)
def test_logits_are_those_of_transformers(model: PreTrainedModel, sizes: list[int]) -> None:
    """One token too many or too few in a window changes them; so does padding in a state, also if only `begin` tells of it."""
    stock = DynamicCache(config=model.config)
    theirs = logits(model, stock, sizes, masked=True)
    for masked in (True, False):
        with attach(model):
            cache = SelectiveCache(model, made("full"))
            cache.begin([21, 42], left_padded=True)
            ours = logits(model, cache, sizes, masked)
        assert (ours - theirs).abs().max() < 1e-9
    windows = [layer for layer in cache.layers if isinstance(layer, SlidingLayer)]
    assert [layer.k.shape[2] for layer in windows if layer.k is not None] == [WINDOW] * len(windows)
    # layers, K and V, rows, KV heads, tokens, d, bytes of a number
    kept = len(windows) * 2 * 2 * 2 * WINDOW * 8 * 8 if windows else sum(x.nbytes for x in tensors(stock))
    if model.config.model_type in ALL_SLIDE:  # served
        assert (len(windows), cache.other_bytes(), cache.resident_bytes()) == (5, 0, {"device": kept})
    else:
        assert (len(windows) in (0, 3), cache.other_bytes()) == (True, kept)


@pytest.mark.parametrize("how", thin([{"num_beams": 3}, {"prefill_chunk_size": 20}], 2), ids=["beams", "chunks"])
@pytest.mark.rest
def test_generate(model: PreTrainedModel, how: dict[str, int]) -> None:
    """States and windows follow their rows."""
    ids, mask = prompt(0 if "prefill_chunk_size" in how else 13)
    call = partial(model.generate, ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **how)
    theirs = call()
    with attach(model):
        cache = SelectiveCache(model, made("full"))
        if "prefill_chunk_size" in how:
            cache.begin([S, S])
        assert torch.equal(call(past_key_values=cache), theirs)


FEW = ("full", "pqcache", "h2o", "pyramidkv", "infllm", "int8")
SOME = [pytest.param(kind, FEW, marks=pytest.mark.rest if i % 2 else ()) for i, kind in enumerate((*SLIDING, *HYBRID))]


@pytest.mark.parametrize(
    ("model", "names"),
    [*SOME, pytest.param("gemma3_text", METHODS, marks=pytest.mark.rest)],
    indirect=["model"],
    ids=lambda x: x if isinstance(x, str) else len(x),
)
def test_methods_serve_the_layers_of_attention(model: PreTrainedModel, names: tuple[str, ...]) -> None:
    """A prefill in common and steps in common give what each method gives alone; a request leaves nothing to the next."""
    ids = prompt()[0][1:]
    plain = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)[0, S:].tolist()
    prefill, works, alone = record(model, ids, prefill_chunk=15, device="cpu"), [], {}
    for name in names:
        try:
            one = made(name, 1.0 if name == "full" else 0.3)
            one.prepare(model, ids.repeat(1, 8), None)
            torch.manual_seed(0)
            alone[name] = generate(model, one, ids, max_new_tokens=5)
        except (NotApplicable, ValueError):
            continue
        own = None if name in ("infllm", "streaming") else prefill
        works.append(partial(generate, model, one, ids, max_new_tokens=5, prefill=own))
    assert alone["full"].token_ids == plain and alone["full"].attended_tokens == S + 2.5
    assert {"pqcache", "h2o", "pyramidkv", "int8"} <= alone.keys() and (names is FEW or "infinigen" in alone)
    torch.manual_seed(0)
    for mine, (name, other) in zip(lockstep(model, works), alone.items(), strict=True):
        assert getattr(mine, "token_ids", mine) == other.token_ids, name
        assert (mine.attended_tokens, mine.resident_bytes) == (other.attended_tokens, other.resident_bytes), name
        assert mine.extra["other_layers_bytes"] == other.extra["other_layers_bytes"] > 0
        assert mine.extra["served_layer_numbers"] == " ".join(map(str, served(model.config)))


@pytest.mark.parametrize("model", ALL_SLIDE, indirect=True)
def test_full_keeps_windows_where_all_layers_slide(model: PreTrainedModel) -> None:
    """Beyond the window no method has anything to choose; Full counts what it attends, and crops what has not left it."""
    ids = prompt()[0][1:]
    plain = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)[0, S:].tolist()
    one = generate(model, made("full"), ids, max_new_tokens=5)
    assert (one.token_ids, one.attended_tokens) == (plain, WINDOW)
    with pytest.raises(NotApplicable, match="beyond it method=full alone applies"):
        generate(model, made("pqcache", 0.3), ids, max_new_tokens=5)
    with attach(model), torch.no_grad():
        cache = SelectiveCache(model, made("full"))
        model(ids[:, :10], past_key_values=cache, use_cache=True)
        cache.crop(-3)
        for end in range(8, 18):
            last = model(ids[:, end - 1 : end], past_key_values=cache, use_cache=True).logits
        assert (last[:, -1] - model(ids[:, :17]).logits[:, -1]).abs().max() < 1e-9
        held = cache.served[0].held_positions()
        assert held is not None and sorted(held[0, 0].tolist()) == list(range(1, 17))
        with pytest.raises(NotImplementedError, match="cannot be cropped"):
            cache.crop(-1)


@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
def test_infinigen_speculates_with_its_own_layers_angles(model: PreTrainedModel) -> None:
    """Gemma 3 rotates by another base in layers with a window, and the layer before is one."""
    one = infinigen.InfiniGen(budget=Budget(ratio=0.3), dense_layers=1)
    one.prepare(model, None, None)
    with patch.object(infinigen, "rotate", wraps=infinigen.rotate) as rotate:
        generate(model, one, prompt()[0][1:], max_new_tokens=4, watchers=[capture := Capture()])
    ahead = [call.args[2] for call in rotate.call_args_list]
    seen = [call.ctx.cos for call in capture.calls if call.ctx.step.decode and call.layer.layer_idx == 1]
    assert len(ahead) == 3
    assert all(torch.allclose(a, b) for a, b in zip(ahead, seen, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("model", ["lfm2"], indirect=True)
def test_a_refused_pass_is_not_continued(model: PreTrainedModel) -> None:
    """Layers before the first attention have taken its tokens in."""
    ids = prompt()[0][1:]
    with attach(model):
        cache = SelectiveCache(model, made("full"))
        cache.begin([8])
        with pytest.raises(ValueError, match="crosses the end"):
            model(ids[:, :9], past_key_values=cache, use_cache=True)
        with pytest.raises(RuntimeError, match="did not finish"):
            model(ids[:, :8], past_key_values=cache, use_cache=True)
        cache.begin([8])
        model(ids[:, :8], past_key_values=cache, use_cache=True)
