"""Models that mix layers of full attention with sliding-window layers: answers of transformers, windows of the right size."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from baselines import infinigen
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, Method, NotApplicable, SelectiveCache, attach, generate, record
from pqcache.selective.layer import WatchedCall, Watcher
from pqcache.selective.lockstep import lockstep
from pqcache.selective.sliding import SlidingLayer

WINDOW, S = 16, 52  # prompts of more than three windows
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.fixture(scope="module", params=["gemma3_text", "olmo3", "exaone4"])
def mixed(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        request.param, vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, layer_types=KINDS, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="sdpa",
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double().eval()


def prompt(n: int = 1, s: int = S) -> torch.Tensor:
    return torch.randint(3, 96, (n, s), generator=torch.Generator().manual_seed(n + s))


def full(ratio: float = 1.0, name: str = "full") -> Method:
    return method_class(name)(budget=Budget(ratio=ratio))


def logits(
    model: PreTrainedModel, cache: object, ids: torch.Tensor, chunk: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """Of every position: a prompt in chunks, then the last ten tokens one by one."""
    out, start, end = [], 0, ids.shape[1]
    sizes = [min(chunk, end - 10 - at) for at in range(0, end - 10, chunk)] + [1] * 10
    for size in sizes:
        block, how = ids[:, start : start + size], {}
        if mask is not None:
            at = (mask.cumsum(-1) - 1).clamp_min(0)[:, start : start + size]
            how = {"attention_mask": mask[:, : start + size], "position_ids": at}
        out.append(model(input_ids=block, past_key_values=cache, use_cache=True, **how).logits)
        start += size
    return torch.cat(out, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [S, 7, WINDOW])
@torch.no_grad()
def test_logits_are_those_of_transformers(mixed: PreTrainedModel, chunk: int, padded: bool) -> None:
    """One token too many or too few in a window changes them."""
    ids, mask = prompt(2), torch.ones((2, S), dtype=torch.long)
    if padded:
        mask[0, :21] = 0
    real = mask.bool()
    theirs = logits(mixed, DynamicCache(config=mixed.config), ids, S, mask if padded else None)[real]
    with attach(mixed):
        cache = SelectiveCache(mixed, full())
        cache.begin([int(row.sum()) - 10 for row in mask], left_padded=True)
        ours = logits(mixed, cache, ids, chunk, mask if padded else None)[real]
    assert (ours - theirs).abs().max() < 1e-9
    windows = [layer for layer in cache.layers if isinstance(layer, SlidingLayer)]
    assert [layer.k.shape[2] for layer in windows if layer.k is not None] == [WINDOW] * 3
    assert (
        cache.other_bytes() == 3 * 2 * 2 * 2 * WINDOW * 8 * 8
    )  # layers, K and V, rows, KV heads, ..., d, bytes of a number


def test_plain_generate(mixed: PreTrainedModel) -> None:
    ids, mask = prompt(2), torch.ones((2, S), dtype=torch.long)
    mask[1, :9] = 0
    for how in ({"num_beams": 3}, {"prefill_chunk_size": 20}, {}):
        if "prefill_chunk_size" in how:
            own: tuple[torch.Tensor, torch.Tensor | None] = ids[:1], None
        else:
            own = ids, mask
        call = partial(mixed.generate, own[0], attention_mask=own[1], max_new_tokens=24, do_sample=False, **how)
        theirs = call()
        with attach(mixed):
            cache = SelectiveCache(mixed, full())
            if "prefill_chunk_size" in how:
                cache.begin([S])
            assert torch.equal(call(past_key_values=cache), theirs), how


@pytest.mark.parametrize("mixed", ["gemma3_text"], indirect=True)
def test_every_method_serves_the_other_layers(mixed: PreTrainedModel) -> None:
    """Shared prefills and joint steps change nothing; bytes and tokens are of the served layers."""
    ids = prompt()
    prefill, chunked = record(mixed, ids), record(mixed, ids, prefill_chunk=15)
    for one, other in zip(prefill.calls, chunked.calls, strict=True):
        assert all(torch.allclose(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))
    whole = generate(mixed, full(), ids, max_new_tokens=8)
    assert whole.attended_tokens == S + 4  # of layers of full attention
    assert (
        whole.extra["content_bytes"] == 2 * 2 * 2 * (S + 7) * 8 * 8
    )  # layers, K and V, KV heads, tokens, d, bytes of a number
    assert (whole.extra["served_layers"], whole.extra["model_layers"]) == (2, 5)
    works, alone = {}, {}
    for name in METHODS:
        own = None if name in ("infllm", "streaming") else chunked
        try:
            method = full(0.3, name)
            method.prepare(mixed, ids.repeat(1, 8), None)
            torch.manual_seed(0)
            alone[name] = generate(mixed, method, ids, max_new_tokens=8)
            works[name] = partial(generate, mixed, method, ids, max_new_tokens=8, prefill=own)
        except (NotApplicable, ValueError):
            continue
    assert {"pqcache", "snapkv", "quest", "h2o", "pyramidkv", "infinigen"} <= works.keys()
    torch.manual_seed(0)
    for mine, (name, other) in zip(lockstep(mixed, list(works.values())), alone.items(), strict=True):
        assert getattr(mine, "token_ids", mine) == other.token_ids, name
        assert mine.attended_tokens == other.attended_tokens and mine.resident_bytes == other.resident_bytes, name


@pytest.mark.parametrize("mixed", ["gemma3_text"], indirect=True)
def test_infinigen_speculates_with_its_own_layers_angles(
    mixed: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 rotates by another base in layers with a window, and the layer before is one."""
    ahead: list[torch.Tensor] = []
    rotate = infinigen.rotate
    monkeypatch.setattr(
        infinigen, "rotate", lambda module, x, cos, sin: (ahead.append(cos), rotate(module, x, cos, sin))[1]
    )

    class Angles(Watcher):
        seen: list[torch.Tensor] = []

        def watch(self, call: WatchedCall) -> None:
            if call.ctx.step.decode and call.layer.layer_idx == 1:
                self.seen.append(call.ctx.cos)

    method = infinigen.InfiniGen(budget=Budget(ratio=0.3), dense_layers=1)
    method.prepare(mixed, None, None)
    del ahead[:]
    generate(mixed, method, prompt(), max_new_tokens=4, watchers=[watcher := Angles()])
    assert len(ahead) == len(watcher.seen) == 3
    assert all(torch.allclose(a, b) for a, b in zip(ahead, watcher.seen, strict=True))
