"""Several prompts at once: in float64 every row's answer is the one it gets alone, for every method."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import logits, pad_left, tokens
from pqcache.registry import method_class
from pqcache.selective import Method, NonFinite, Request, SelectiveCache, attach, generate, generate_batch, time_batch
from tests.invariants.cases import CASES, Case, each_kind, every_kind

# (prompt tokens, new tokens, question tokens): rows end one after the other, and are dropped
ROWS = ((61, 2, 0), (33, 9, 3), (9, 4, 1))
CHUNK = 23


def requests() -> list[Request]:
    ends = {7, 11}
    return [
        Request(tokens(s, 30 + s), new, ends, lambda answer: answer[-2:] == [5, 5], question, ends if question else ())
        for s, new, question in ROWS
    ]


def alone(model: PreTrainedModel, method: Method, one: Request, **more: Any) -> list[int]:
    return generate(
        model, method, torch.tensor([one.ids]), max_new_tokens=one.max_new_tokens, eos_token_ids=one.eos_token_ids,
        stop=one.stop, question_tokens=one.question_tokens, not_first=one.not_first, sampling=one.sampling, **more,
    ).token_ids  # fmt: skip


@every_kind
def test_rows_of_a_batch_equal_rows_alone(llama: PreTrainedModel, kind: Case) -> None:
    batch = requests()
    for one, result in zip(batch, generate_batch(llama, kind.make(), batch), strict=True):
        assert not isinstance(result, NonFinite)
        assert result.token_ids == alone(llama, kind.make(), one)
        assert result.prompt_tokens == len(one.ids)
        assert result.prefill_s is None and result.tt2t_s is None and not result.step_s
        assert not result.resident_bytes and result.attended_tokens is None


@pytest.mark.rest
@each_kind
def test_rows_in_chunks(llama: PreTrainedModel, kind: Case) -> None:
    """A row may still be all padding when the first chunks come."""
    batch = requests()
    if kind.whole_chunks:
        with pytest.raises(ValueError, match="takes prompts of one length in chunks"):
            generate_batch(llama, kind.make(), batch, prefill_chunk=CHUNK)
        batch = [Request(tokens(61, seed), 5) for seed in (1, 2)]
    results = generate_batch(llama, kind.make(), batch, prefill_chunk=CHUNK)
    assert [r.token_ids for r in results if not isinstance(r, NonFinite)] == [
        alone(llama, kind.make(), one) for one in batch
    ]


@torch.no_grad()
def test_padding_without_a_mask_is_announced(llama: PreTrainedModel) -> None:
    rows = [tokens(40, 1), tokens(17, 2)]
    method = CASES[0].cls()
    ids, mask = pad_left(rows)
    prompt = {"input_ids": ids, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    cache = SelectiveCache(llama, method)
    with attach(llama):
        cache.begin([40, 17])
        with pytest.raises(ValueError, match="no attention_mask says where the padding is"):
            llama(**prompt, past_key_values=cache)
        cache.begin([40, 17], left_padded=True)
        found = llama(**prompt, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, logits(llama, method, rows, [])[:, 0])


def test_stops_are_each_rows_own(llama: PreTrainedModel) -> None:
    method = method_class("full")()
    free = generate_batch(llama, method, [Request(tokens(n, n), 8) for n in (40, 20, 30)])
    answers = [r.token_ids for r in free if not isinstance(r, NonFinite)]
    assert [len(answer) for answer in answers] == [8, 8, 8]
    at = max(answers[1].index(token) for token in answers[1])
    assert 0 < at < 7
    end = answers[1][at]
    cut = generate_batch(
        llama, method, [Request(tokens(40, 40), 8), Request(tokens(20, 20), 8, {end}), Request(tokens(30, 30), 1)]
    )
    assert [r.token_ids for r in cut if not isinstance(r, NonFinite)] == [
        answers[0],
        answers[1][: at + 1],
        answers[2][:1],
    ]


def test_a_row_that_is_no_answer_spoils_no_other(llama: PreTrainedModel) -> None:
    method = method_class("full")()
    broken = deepcopy(llama)
    broken.get_input_embeddings().weight.data[3] = math.nan
    rows = [Request([n % 50 + 10 for n in range(30)], 4), Request([3] * 12, 4)]
    good, found = generate_batch(llama, method, rows)[0], generate_batch(broken, method, rows)
    assert not isinstance(good, NonFinite) and not isinstance(found[0], NonFinite)
    assert found[0].token_ids == good.token_ids
    assert isinstance(found[1], NonFinite)


def test_a_timed_batch(llama: PreTrainedModel) -> None:
    method = method_class("pqcache")(b=4, n_sink=8)
    ids = torch.tensor([tokens(80, 1), tokens(80, 2), tokens(80, 3)])
    one = generate(llama, method, ids[:1], max_new_tokens=6)
    three = time_batch(llama, method, ids, max_new_tokens=6)
    assert three.token_ids == one.token_ids
    assert len(three.step_s) == 5 and three.tt2t_s is not None and three.prefill_s is not None
    assert three.resident_bytes["device"] == 3 * one.resident_bytes["device"]


@pytest.mark.parametrize(
    ("ids", "new", "question", "message"),
    [
        ([], 1, 0, "ids: allowed is"),
        ([3], 0, 0, "max_new_tokens=0: allowed is"),
        ([3, 4], 1, 2, "question_tokens=2: allowed is 0..1"),
    ],
)
def test_bad_requests(ids: list[int], new: int, question: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(ids, new, question_tokens=question)
