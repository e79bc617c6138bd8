"""A prompt that is computed in chunks: the same answers, one recording for all, and never a mask of chunk by prompt."""

import functools
import importlib
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from pqcache.api.drive import tokens
from pqcache.selective import GenerationResult, Likelihood, attach, blocks, generate, likelihood, record
from tests.invariants.cases import CASES, Case, each_kind

NEW = 8
CHUNK = 23
IDS = torch.tensor([tokens(90, seed=3)])
in_chunks = functools.cache(functools.partial(record, input_ids=IDS, prefill_chunk=CHUNK))


@each_kind
def test_as_in_one_block(llama: PreTrainedModel, kind: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**options: Any) -> GenerationResult:
        torch.manual_seed(0)
        return generate(llama, kind.make(), IDS, max_new_tokens=NEW, **options)

    whole = run()
    module = importlib.import_module("pqcache.selective.attach")  # the package's name for it is the function's
    monkeypatch.setattr(module, "sdpa_mask", lambda *_, **__: pytest.fail("a mask was made"))
    chunked = [run(prefill_chunk=CHUNK)]
    if not kind.sparse_prefill:
        chunked.append(run(prefill=in_chunks(llama), prefill_chunk=CHUNK))
    for result in chunked:
        assert result.token_ids == whole.token_ids
        assert result.budget_tokens == whole.budget_tokens
        assert result.attended_tokens == pytest.approx(whole.attended_tokens)


def test_a_recording_in_chunks_is_the_recording(llama: PreTrainedModel) -> None:
    whole, chunked = record(llama, IDS), record(llama, IDS, prefill_chunk=CHUNK)
    torch.testing.assert_close(chunked.logits, whole.logits)
    for one, other in zip(chunked.calls, whole.calls, strict=True):
        torch.testing.assert_close(one.tensors(), other.tensors())
        for table in ("cos", "sin", "position_ids"):
            torch.testing.assert_close(getattr(one.ctx, table), getattr(other.ctx, table))


@pytest.mark.rest
@each_kind
def test_log_likelihoods_as_in_one_block(llama: PreTrainedModel, kind: Case) -> None:
    def run(chunk: int | None) -> Likelihood:
        torch.manual_seed(0)
        return likelihood(llama, kind.make(), IDS, first=30, prefill=80, prefill_chunk=chunk)

    whole, chunked = run(None), run(CHUNK)
    kind.close(torch.tensor(chunked.logprobs), torch.tensor(whole.logprobs))
    assert chunked.greedy == whole.greedy
    assert len(chunked.result.step_s) == len(whole.result.step_s)


def test_other_caches_in_chunks(llama: PreTrainedModel) -> None:
    """Inside `attach` a cache of transformers still gets its mask, also after a pass that had ours."""
    with torch.no_grad(), attach(llama):
        whole = llama(input_ids=IDS).logits[:, -1]
        generate(llama, CASES[0].cls(), IDS, max_new_tokens=2, prefill_chunk=CHUNK)
        cache = DynamicCache(config=llama.config)
        for block in IDS.split(CHUNK, 1):
            out = llama(input_ids=block, past_key_values=cache, use_cache=True)
    torch.testing.assert_close(out.logits[:, -1], whole)


@pytest.mark.parametrize(
    ("h", "h_kv", "t", "m"), [(4, 2, 17, 90), (4, 4, 5, 6), (8, 1, 64, 300), (4, 2, 1, 9), (4, 2, 9, 9)]
)
def test_attention_of_a_block(h: int, h_kv: int, t: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, h, t, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, h_kv, m, 16, dtype=torch.float64)
    seen = torch.ones(t, m, dtype=torch.bool).tril(m - t)
    full = [x.repeat_interleave(h // h_kv, 1) for x in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *full, attn_mask=seen, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(blocks.lower_right(q, k, v, 0.3), expected)
    monkeypatch.setattr(blocks, "_joined", lambda *_: pytest.fail("not by the CPU's kernel"))
    wide = torch.cat([v, v], -1)  # values of another width go the way of a GPU
    torch.testing.assert_close(blocks.lower_right(q, k, wide, 0.3), torch.cat([expected, expected], -1))
