"""A method's result does not depend on how the work arrives: chunks, batches, padding, beams, earlier requests."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api import invariants
from pqcache.api.drive import Session, logits, tokens
from pqcache.selective import SelectiveCache, attach
from tests.baselines.common import made
from tests.invariants.cases import CASES, KINDS, Case, each_kind

STEPS = tokens(14, 20)  # more than the local window of most prompts here


def test_chunked_prefill_equals_one_block(model: PreTrainedModel, case: Case) -> None:
    invariants.chunks_equal_one_block(model, case)


@pytest.mark.rest
def test_padded_rows_equal_single_rows(model: PreTrainedModel, case: Case) -> None:
    invariants.padded_rows_equal_single_rows(model, case)


@pytest.mark.rest
def test_reordered_rows_equal_rows_alone(model: PreTrainedModel, case: Case) -> None:
    invariants.reordered_rows_equal_rows_alone(model, case)


@pytest.mark.rest
@pytest.mark.parametrize("kind", [case for case in CASES if case.id in (*KINDS, "infllm-1")], ids=lambda case: case.id)
def test_prompt_token_by_token_equals_one_block(llama: PreTrainedModel, kind: Case) -> None:
    """A block of one token is prefill as long as the prompt has not ended. Of InfLLM, infllm-1 alone takes such blocks."""
    prompt, steps = [tokens(50, 22)], [[t] for t in STEPS[:4]]
    whole = logits(llama, kind.make(), prompt, steps)
    kind.same_in_chunks(lambda: logits(llama, kind.make(), prompt, steps, chunk=1), whole)


@pytest.mark.rest
@each_kind
def test_repeat_and_select_rows(llama: PreTrainedModel, kind: Case) -> None:
    with torch.no_grad(), attach(llama):
        session = Session(llama, SelectiveCache(llama, kind.make()), [tokens(70, 60), tokens(70, 61)])
        session.cache.batch_repeat_interleave(2)
        session.mask = session.mask.repeat_interleave(2, 0)
        session.step([5] * 4)
        session.cache.batch_select_indices(torch.tensor([3, 0]))
        session.mask = session.mask[[3, 0]]
        got = session.step([6, 6])
    for slot, seed in enumerate((61, 60)):
        kind.close(got[slot : slot + 1], logits(llama, kind.make(), [tokens(70, seed)], [[5], [6]])[:, -1])


@pytest.mark.rest
@torch.no_grad()
def test_second_turn_in_chunks_equals_one_block(model: PreTrainedModel, case: Case) -> None:
    def run(chunk: int | None) -> torch.Tensor:
        with attach(model):
            session = Session(model, SelectiveCache(model, case.make()), [tokens(80, 70), tokens(44, 71)])
            for t in tokens(10, 72):
                session.step([t, t])
            out = [session.turn([tokens(30, 73), tokens(30, 74)], chunk)]
            out += [session.step([t, t]) for t in tokens(6, 75)]
            assert session.cache.get_seq_length() == 80 + 10 + 30 + 6
        return torch.stack(out, 1)

    case.same_in_chunks(lambda: run(7), run(None))


@pytest.mark.rest
def test_requests_in_a_row_equal_fresh_ones(model: PreTrainedModel, case: Case) -> None:
    cache = SelectiveCache(model, case.make())
    for n in (95, 20, 60):
        prompt, steps = [tokens(n, 80 + n)], [[t] for t in STEPS[:5]]
        case.close(logits(model, case.make(), prompt, steps, cache=cache), logits(model, case.make(), prompt, steps))


@pytest.mark.rest
@pytest.mark.parametrize("share", [{"budget": 0.3}, {"budget": 0.8, "budget_of": "context", "recent_ratio": 0.9}])
def test_host_store_changes_nothing(llama: PreTrainedModel, share: dict[str, Any]) -> None:
    """Over more steps than the local window's buffer has room for; a window that grows outgrows it, too."""
    prompt, steps = [tokens(160, 90), tokens(120, 91)], [[t, t] for t in tokens(300, 20)]
    results = [
        logits(llama, made("pqcache", **share, n_sink=8, b=4, store=store), prompt, steps)
        for store in ("resident", "host")
    ]
    torch.testing.assert_close(*results)
