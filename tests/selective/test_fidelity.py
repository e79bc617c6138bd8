"""A method beside the full cache's own answer: nothing lost where nothing is dropped, and numbers that a plain loop gives too."""

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.selective import generate, likelihood
from pqcache.selective.fidelity import first_divergence, read_reference, write_reference
from tests.baselines.common import made
from tests.invariants.cases import BY_ID
from tests.thin import thin

PROMPT = torch.arange(7, 107)[None] % 128


@pytest.mark.parametrize("name", thin(BY_ID, 8))
def test_a_method_that_keeps_everything_is_full(llama: PreTrainedModel, name: str) -> None:
    full = write_reference(llama, made("full"), PROMPT, tokens=12)
    read = read_reference(llama, BY_ID[name].noop(), PROMPT, full)
    assert len(read.kl) == 11 and max(read.kl) < 1e-6 and all(read.equal) and first_divergence(read.equal) == 11


def test_the_numbers_are_those_of_a_plain_loop(llama: PreTrainedModel) -> None:
    full = write_reference(llama, made("full"), PROMPT, tokens=16)
    assert full.token_ids == generate(llama, made("full"), PROMPT, max_new_tokens=16).token_ids
    narrow = made("streaming", 0.3, n_sink=2)
    read = read_reference(llama, narrow, PROMPT, full)
    whole = torch.cat([PROMPT, torch.tensor([full.token_ids])], dim=1)
    # another loop: the scored tokens of a given text
    scored = likelihood(llama, narrow, whole, first=101, prefill=100)
    assert read.logprobs == pytest.approx(scored.logprobs, abs=1e-5)
    assert read.equal == scored.greedy and not all(read.equal)
    assert min(read.kl) > 0
    # KL against the full distributions of one forward pass, for the first compared step
    with torch.no_grad():
        p = llama(whole[:, :101]).logits[0, -1].float().log_softmax(-1)
    free = write_reference(llama, narrow, PROMPT, tokens=2)
    q = free.logits[1].float().log_softmax(-1)
    assert free.token_ids[0] == full.token_ids[0]
    assert read.kl[0] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)


@pytest.mark.rest
def test_first_divergence_is_where_a_free_run_leaves(llama: PreTrainedModel) -> None:
    full = write_reference(llama, made("full"), PROMPT, tokens=24)
    seen = set()
    narrows = [made("streaming", 0.2), made("oracle", 0.7), made("int8"), made("kivi", group=16)]
    for narrow in narrows:
        read = read_reference(llama, narrow, PROMPT, full)
        free = generate(llama, narrow, PROMPT, max_new_tokens=24).token_ids
        same = [a == b for a, b in zip(free, full.token_ids, strict=True)]
        assert first_divergence(read.equal) == (same.index(False) - 1 if False in same else 23)
        seen.add(first_divergence(read.equal))
    assert len(seen) > 1


def test_an_end_token_ends_the_reference_but_does_not_begin_it(llama: PreTrainedModel) -> None:
    whole = write_reference(llama, made("full"), PROMPT, tokens=8).token_ids
    assert len(set(whole)) > 2
    first = write_reference(llama, made("full"), PROMPT, tokens=8, end=whole[:1])
    assert first.token_ids[0] != whole[0] and len(first.token_ids) > 1
    with pytest.raises(ValueError, match="tokens=1: allowed is an int >= 2"):
        write_reference(llama, made("full"), PROMPT, tokens=1)
