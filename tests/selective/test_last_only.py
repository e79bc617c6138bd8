"""A pass asked for the last token's logits only: its last layer works on that token alone, and nothing else changes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from baselines.full import Full
from pqcache.diagnostics import Capture
from pqcache.selective import SelectiveCache, attach
from tests.invariants.cases import ARCHITECTURES
from tests.invariants.conftest import build

IDS = torch.arange(2 * 70).view(2, 70) * 37 % 101 + 1
MASK = torch.ones_like(IDS)
MASK[1, :9] = 0


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@contextmanager
def rows_of(model: PreTrainedModel) -> Iterator[list[list[int]]]:
    """Rows that each layer's output projection and MLP were given, pass by pass."""
    seen: list[list[int]] = [[] for _ in model.get_decoder().layers]
    with ExitStack() as hooks:
        for rows, layer in zip(seen, model.get_decoder().layers, strict=True):
            note = lambda _, args, out, rows=rows: rows.append(args[0].shape[1])  # noqa: E731
            for module in (layer.self_attn.o_proj, layer.mlp):
                hooks.enter_context(module.register_forward_hook(note))
        yield seen


def run(model: nn.Module, cache: SelectiveCache, ids: torch.Tensor = IDS, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True, **kwargs)


def state(cache: SelectiveCache) -> list[torch.Tensor]:
    return [x for layer in cache.served for x in layer.store.view()]


@pytest.mark.rest
def test_logits_are_the_same_and_keys_bit_by_bit(model: PreTrainedModel) -> None:
    with attach(model), rows_of(model) as seen:
        whole, last = SelectiveCache(model, Full()), SelectiveCache(model, Full())
        expected = run(model, whole, attention_mask=MASK).logits[:, -1:]
        result = run(model, last, attention_mask=MASK, logits_to_keep=1).logits
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        assert seen[-1] == [70, 70, 1, 1]
        assert all(rows == [70] * 4 for rows in seen[:-1])
        assert all(torch.equal(a, b) for a, b in zip(state(whole), state(last), strict=True))
        longer = torch.cat([MASK, MASK[:, -1:]], 1)
        a, b = (
            run(model, cache, IDS[:, :1], attention_mask=longer, logits_to_keep=1).logits for cache in (whole, last)
        )
        assert torch.equal(a, b)


@pytest.mark.parametrize("kwargs", [{}, {"logits_to_keep": 2}, {"logits_to_keep": 1, "output_hidden_states": True}])
def test_whoever_asks_for_more_gets_all_rows(llama: PreTrainedModel, kwargs: dict) -> None:
    with attach(llama), rows_of(llama) as seen:
        out = run(llama, SelectiveCache(llama, Full()), **kwargs)
    assert seen[-1] == [70, 70]
    if "output_hidden_states" in kwargs:
        stock = llama(IDS, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(out.hidden_states[-1], stock, rtol=1e-12, atol=1e-12)


def test_the_bare_decoder_and_watched_passes_compute_all_rows(llama: PreTrainedModel) -> None:
    with attach(llama):
        expected = llama(IDS, use_cache=False, logits_to_keep=1).logits
        hidden = run(llama.model, SelectiveCache(llama, Full())).last_hidden_state
        torch.testing.assert_close(llama.lm_head(hidden[:, -1:]), expected, rtol=1e-12, atol=1e-12)
        cache = SelectiveCache(llama, Full())
        cache.watchers.append(capture := Capture())
        run(llama, cache, logits_to_keep=1)
    assert capture.calls and not any((call.out == 0).all(-1).any() for call in capture.calls)


def test_a_failed_pass_leaves_the_next_one_whole(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(llama):
        cache = SelectiveCache(llama, Full())
        with monkeypatch.context() as patch:
            patch.setattr(llama.model.norm, "forward", Mock(side_effect=RuntimeError("on the way")))
            with pytest.raises(RuntimeError, match="on the way"):
                run(llama, cache, logits_to_keep=1)
        cache.begin([70, 70])
        hidden = run(llama.model, cache).last_hidden_state
        assert llama.get_decoder().layers[-1].mlp(hidden).shape[1] == 70
    torch.testing.assert_close(hidden, llama.model(IDS).last_hidden_state, rtol=1e-12, atol=1e-12)
