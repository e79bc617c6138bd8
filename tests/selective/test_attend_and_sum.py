"""A long prompt's attention and its column sums from the same logits: as apart, and only where the layer wants it."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import logits, tokens
from pqcache.selective import Method, SelectiveCache, column_sums, dense, generate
from pqcache.selective.column_sums import attend_and_sum
from pqcache.selective.shared_prefill import record
from tests.baselines.common import made

PROMPT, FED = tokens(150, 1), [[token] for token in tokens(3, 2)]


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
        (lambda: made("h2o", 0.25), True),
        (lambda: made("h2o", 0.25, repeat_kv=True), True),
        (lambda: made("mikv", 0.25), True),
        (lambda: made("infllm", block=8, dense_prefill=True, budget=0.25), True),
        (lambda: made("snapkv", 0.25), False),
        (lambda: made("zipcache", 0.25), True),
        (lambda: made("zipcache", 0.25, probes="recent", norm="full"), True),
        (lambda: made("zipcache", 0.25, probes="random"), False),
        (lambda: made("zipcache", 0.25, protocol="release"), True),
        (lambda: made("coded", policy="pqcache", codec="zipcache", budget=0.25), True),
        (lambda: made("coded", policy="h2o", codec="zipcache", budget=0.25), True),
        (lambda: made("h2o", 1.0), False),
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
    assert answers(llama, made("h2o", 0.25), monkeypatch, 100, attn="standard")[2] == 0
    monkeypatch.setattr(column_sums, "LONG", 100)
    monkeypatch.setattr(dense, "attend_and_sum", lambda *args: pytest.fail("the attention was recorded"))
    prefill = record(llama, torch.tensor([PROMPT]))
    result = generate(llama, made("h2o", 0.25), torch.tensor([PROMPT]), max_new_tokens=3, prefill=prefill)
    assert len(result.token_ids) == 3
