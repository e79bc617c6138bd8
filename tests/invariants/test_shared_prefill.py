"""A recorded dense prefill serves every method as its own would: same tokens, same bytes, nothing written into it."""

import functools

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from baselines.snapkv import SnapKV
from pqcache.api import drive
from pqcache.selective import Budget, OwnPrefill, generate, record
from tests.invariants.cases import Case, same

NEW = 8
IDS = torch.tensor([drive.tokens(90, seed=3)])
recording = functools.cache(functools.partial(record, input_ids=IDS))


@pytest.mark.rest
def test_as_with_its_own_prefill(model: PreTrainedModel, case: Case) -> None:
    recorded = recording(model)
    torch.manual_seed(0)
    own = generate(model, case.make(), IDS, max_new_tokens=NEW)
    torch.manual_seed(0)
    if case.sparse_prefill:
        with pytest.raises(OwnPrefill):
            generate(model, case.make(), IDS, max_new_tokens=NEW, prefill=recorded)
        return
    shared = generate(model, case.make(), IDS, max_new_tokens=NEW, prefill=recorded)
    assert shared.prefill_s is None
    assert shared.tt2t_s is None
    same(shared, own)


@pytest.mark.parametrize("question", [0, 7])
def test_question_goes_through_the_decode_path(llama: PreTrainedModel, question: int) -> None:
    recorded = record(llama, IDS[:, : 90 - question])
    method = SnapKV(budget=Budget(ratio=0.3), n_sink=4, w=8)
    own = generate(llama, method, IDS, max_new_tokens=NEW, question_tokens=question)
    shared = generate(llama, method, IDS, max_new_tokens=NEW, question_tokens=question, prefill=recorded)
    assert shared.token_ids == own.token_ids
    assert shared.bytes_per_step == own.bytes_per_step


def test_writing_into_the_recording_is_found(llama: PreTrainedModel) -> None:
    recorded = record(llama, IDS)
    recorded.calls[1].k.mul_(1.0)
    with pytest.raises(RuntimeError, match="in place"):
        generate(llama, Full(), IDS, max_new_tokens=2, prefill=recorded)


def test_another_prompt_is_refused(llama: PreTrainedModel) -> None:
    recorded = recording(llama)
    with pytest.raises(ValueError, match="prefill of other prompts: allowed are prompts of 80 tokens"):
        generate(llama, Full(), IDS[:, :80], max_new_tokens=2, prefill=recorded)
