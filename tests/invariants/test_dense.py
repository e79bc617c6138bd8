"""Every method's no-op setting equals the stock cache, on every architecture, through forward, generate and beam search."""

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from pqcache.api import invariants
from pqcache.api.drive import Session, logits, tokens
from pqcache.selective import SelectiveCache, attach
from tests.invariants.cases import Case

STEPS = [[t] for t in tokens(14, 9)]


def test_noop_equals_dense(model: PreTrainedModel, case: Case) -> None:
    invariants.noop_equals_full(model, case)


def test_tight_budget_changes_something(model: PreTrainedModel, case: Case) -> None:
    """The other tests compare paths of one method: a method that did nothing at all would pass them."""
    if case.name == "full":
        return
    prompt = [tokens(90, 1)]
    difference = (logits(model, case.make(), prompt, STEPS) - logits(model, None, prompt, STEPS)).abs().amax((0, 2))
    if case.sparse_prefill:
        assert difference[0] > 1e-4
    else:
        assert difference[0] < 1e-6  # the first token comes from exact prefill attention
    assert difference[1:].min() > 1e-4


def test_generate_with_left_padding_and_beams_equals_stock(model: PreTrainedModel, case: Case) -> None:
    ids = torch.tensor([[0] * 20 + tokens(40, 4), tokens(60, 5)])
    options = {
        "attention_mask": (ids != 0).long(),
        "num_beams": 3,
        "max_new_tokens": 10,
        "do_sample": False,
        "eos_token_id": None,
    }
    stock = model.generate(ids, **options)
    with attach(model):
        ours = model.generate(ids, past_key_values=SelectiveCache(model, case.noop()), **options)
    assert torch.equal(stock, ours)


@pytest.mark.rest
def test_second_turn_of_noop_equals_stock(model: PreTrainedModel, case: Case) -> None:
    def run(cache):
        session = Session(model, cache, [tokens(50, 7)])
        out = [session.step([t]) for t in tokens(3, 8)]
        out.append(session.turn([tokens(25, 9)]))
        out += [session.step([t]) for t in tokens(6, 10)]
        assert cache.get_seq_length() == 50 + 3 + 25 + 6
        return torch.stack(out)

    with torch.no_grad():
        stock = run(DynamicCache(config=model.config))
        with attach(model):
            ours = run(SelectiveCache(model, case.noop()))
    case.close(ours, stock)
