"""A long prompt's attention and its column sums from the same logits: as apart, and only where the layer wants it."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined import Coded
from baselines.h2o import H2O
from baselines.infllm import InfLLM
from baselines.snapkv import SnapKV
from baselines.zipcache import MiKV, ZipCache
from pqcache.api.drive import logits, tokens
from pqcache.selective import Budget, Method, SelectiveCache, column_sums, dense, generate
from pqcache.selective.column_sums import attend_and_sum
from pqcache.selective.shared_prefill import record

PROMPT, FED = tokens(150, 1), [[token] for token in tokens(3, 2)]
QUARTER = Budget(ratio=0.25)


def answers(
    model: PreTrainedModel, method: Method, monkeypatch: pytest.MonkeyPatch, long: int, **options: Any
) -> tuple[torch.Tensor, SelectiveCache, int]:
    """Logits, the cache after them, and how many layers attended and summed at once where `long` tokens are a long prompt."""
    counted = Mock(wraps=attend_and_sum)
    with monkeypatch.context() as patch:
        patch.setattr(column_sums, "LONG", long)
        patch.setattr(dense, "attend_and_sum", counted)
        cache = SelectiveCache(model, method, **options)
        return logits(model, method, [PROMPT], FED, cache=cache), cache, counted.call_count


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: H2O(budget=QUARTER), True),
        (lambda: H2O(budget=QUARTER, repeat_kv=True), True),
        (lambda: MiKV(budget=QUARTER), True),
        (lambda: InfLLM(block=8, dense_prefill=True, budget=QUARTER), True),
        (lambda: SnapKV(budget=QUARTER), False),
        (lambda: ZipCache(budget=QUARTER), True),
        (lambda: ZipCache(budget=QUARTER, probes="recent", norm="full"), True),
        (lambda: ZipCache(budget=QUARTER, probes="random"), False),
        (lambda: ZipCache(budget=QUARTER, protocol="release"), True),
        (lambda: Coded(policy="pqcache", codec="zipcache", budget=QUARTER), True),
        (lambda: Coded(policy="h2o", codec="zipcache", budget=QUARTER), True),
        (lambda: H2O(budget=Budget(ratio=1.0)), False),
    ],
    ids="h2o h2o-repeat mikv infllm snapkv zipcache recent random release coded coded-h2o h2o-noop".split(),
)
def test_a_model_answers_as_with_both_apart(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, make: Any, wanted: bool
) -> None:
    """All layers but the last, which attends for one token only; other methods keep the attention they have."""
    expected, _, none = answers(llama, make(), monkeypatch, 10**6)
    got, cache, calls = answers(llama, make(), monkeypatch, 100)
    assert none == 0 and calls == (len(cache.layers) - 1 if wanted else 0)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_recorded_and_standard_attention_stay_what_they_are(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(llama, H2O(budget=QUARTER), monkeypatch, 100, attn="standard")[2] == 0
    monkeypatch.setattr(column_sums, "LONG", 100)
    monkeypatch.setattr(dense, "attend_and_sum", lambda *args: pytest.fail("the attention was recorded"))
    prefill = record(llama, torch.tensor([PROMPT]))
    result = generate(llama, H2O(budget=QUARTER), torch.tensor([PROMPT]), max_new_tokens=3, prefill=prefill)
    assert len(result.token_ids) == 3
