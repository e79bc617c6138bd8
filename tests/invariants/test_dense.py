"""Every method's no-op setting equals the stock cache, on every architecture, through forward, generate and beam search."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from pqcache.api import invariants
from pqcache.api.drive import Session, logits, tokens
from pqcache.selective import SelectiveCache, attach
from tests.invariants.cases import Case

IDS = torch.tensor([[0] * 20 + tokens(40, 4), tokens(60, 5)])
MASK = (IDS != 0).long()
BEAMS: dict[str, Any] = {
    "attention_mask": MASK,
    "num_beams": 3,
    "max_new_tokens": 10,
    "do_sample": False,
    "eos_token_id": None,
}


@cache
def stock(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the stock cache gives, once for all methods: logits, the beams' tokens, logits of two turns."""
    turns = two_turns(model, DynamicCache(config=model.config))
    return logits(model, None, *invariants.DENSE), model.generate(IDS, **BEAMS), turns


@torch.no_grad()
def two_turns(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    session = Session(model, cache, [tokens(50, 7)])
    out = [session.step([t]) for t in tokens(3, 8)]
    out.append(session.turn([tokens(25, 9)]))
    out += [session.step([t]) for t in tokens(6, 10)]
    assert cache.get_seq_length() == 50 + 3 + 25 + 6
    return torch.stack(out)


def test_noop_equals_dense(model: PreTrainedModel, case: Case) -> None:
    invariants.noop_equals_full(model, case, stock(model)[0])


def test_tight_budget_changes_something(model: PreTrainedModel, case: Case) -> None:
    """The other tests compare paths of one method: a method that did nothing at all would pass them."""
    if case.name == "full":
        return
    difference = (logits(model, case.make(), *invariants.DENSE) - stock(model)[0]).abs().amax((0, 2))
    if case.sparse_prefill:
        assert difference[0] > 1e-4
    else:
        assert difference[0] < 1e-6  # the first token comes from exact prefill attention
    assert difference[1:].min() > 1e-4


def test_generate_with_left_padding_and_beams_equals_stock(model: PreTrainedModel, case: Case) -> None:
    with attach(model):
        ours = model.generate(IDS, past_key_values=SelectiveCache(model, case.noop()), **BEAMS)
    assert torch.equal(stock(model)[1], ours)


@pytest.mark.rest
def test_second_turn_of_noop_equals_stock(model: PreTrainedModel, case: Case) -> None:
    with attach(model):
        ours = two_turns(model, SelectiveCache(model, case.noop()))
    case.close(ours, stock(model)[2])


@pytest.mark.rest
def test_dense_layers_stay_dense(model: PreTrainedModel, case: Case) -> None:
    case.close(logits(model, case.make(dense_layers=3), *invariants.DENSE), stock(model)[0])
