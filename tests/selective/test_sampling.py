"""Drawn tokens: the nucleus by its definition, the distribution of what is drawn, and rows that do not see each other."""

import functools
import math

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import tokens
from pqcache.registry import method_class
from pqcache.selective import Budget, NonFinite, Request, Sampling, generate_batch, record, record_batch
from pqcache.selective.sampling import probabilities
from tests.invariants.test_batch import alone

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, -30.0, 1.0])
DRAWS = 5_000


def nucleus(weights: list[float], top_p: float) -> set[int]:
    """The smallest set of likeliest tokens whose probability is at least top_p, by trying all sizes."""
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    sizes = (n for n in range(1, len(order) + 1) if math.fsum(weights[i] for i in order[:n]) >= top_p)
    return set(order[: next(sizes, len(order))])


@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.5, 0.75, 0.9, 0.999])
def test_the_nucleus_is_the_smallest_set_with_this_probability(top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.3, 1.0, 2.5):
        logits = 3 * torch.randn(40, generator=generator)
        whole = (logits.double() / temperature).softmax(-1).tolist()
        kept = probabilities(logits, temperature, top_p).tolist()
        inside = nucleus(whole, top_p)
        assert {i for i, weight in enumerate(kept) if weight > 0} == inside
        assert all(kept[i] == pytest.approx(whole[i], rel=1e-12) for i in inside)


def test_a_set_that_has_exactly_this_probability_is_enough() -> None:
    """Four equal logits have 1/4 each, without rounding. Of equally likely tokens the first ones are taken."""
    assert probabilities(torch.zeros(4), 0.7, 0.5).tolist() == [0.25, 0.25, 0.0, 0.0]
    assert probabilities(torch.zeros(4), 0.7, 0.5 + 1e-9).tolist() == [0.25, 0.25, 0.25, 0.0]
    assert probabilities(torch.zeros(4), 0.7, 1.0).tolist() == [0.25] * 4


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8), (2.0, 0.6)])
@pytest.mark.rest
def test_tokens_are_drawn_as_often_as_likely(temperature: float, top_p: float) -> None:
    weights = (LOGITS.double() / temperature).softmax(-1).tolist()
    inside = nucleus(weights, top_p)
    total = math.fsum(weights[i] for i in inside)
    sampling = Sampling(temperature, top_p, "a key")
    counts = [0] * len(LOGITS)
    for step in range(DRAWS):
        counts[int(sampling.draw(LOGITS, step))] += 1
    assert all(counts[i] == 0 for i in range(len(LOGITS)) if i not in inside)
    expected = {i: DRAWS * weights[i] / total for i in inside if DRAWS * weights[i] / total > 5}
    distance = sum((counts[i] - n) ** 2 / n for i, n in expected.items())  # chi-squared, at most 5 degrees of freedom
    assert distance < 20.5  # exceeded once in a thousand keys


def test_nothing_impossible_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([-math.inf, 1.0, 0.0, -math.inf])
    for number, token in ((0.0, 1), (1 - 2**-53, 2)):
        monkeypatch.setattr(Sampling, "number", lambda self, step, number=number: number)
        assert int(Sampling(1.0).draw(logits, 0)) == token
    for bad in (math.nan, math.inf):  # an answer that ends as NonFinite; the token must be one
        assert 0 <= int(Sampling(1.0, 0.9).draw(torch.tensor([0.0, bad, 1.0]), 0)) < 3


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, 1.1)])
def test_wrong_values_are_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        Sampling(temperature, top_p)


# -- answers ---------------------------------------------------------------------------------------------------------


ROWS = (
    Request(tokens(40, 40), 9, sampling=Sampling(0.8, 0.9, "a")),
    Request(tokens(25, 25), 4),  # greedy
    Request(tokens(40, 40), 9, sampling=Sampling(0.8, 0.9, "b")),
    Request(tokens(31, 31), 12, {5}, None, 3, {5}, Sampling(1.5, 1.0, "c")),
)


@pytest.mark.parametrize("name", ["full", "snapkv", "pqcache"])
@pytest.mark.rest
def test_an_answer_does_not_depend_on_its_batch_or_prefill(llama: PreTrainedModel, name: str) -> None:
    method = functools.partial(method_class(name), budget=Budget(ratio=0.6))
    answers = [alone(llama, method(), one) for one in ROWS]
    assert answers[0] != answers[2]  # the same prompt with other numbers
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        batch = [ROWS[i] for i in order]
        for prefill in (None, record_batch(llama, batch)):
            results = generate_batch(llama, method(), batch, prefill=prefill)
            assert [None if isinstance(r, NonFinite) else r.token_ids for r in results] == [answers[i] for i in order]
    recorded = record(llama, torch.tensor([ROWS[0].ids]))
    assert [alone(llama, method(), ROWS[i], prefill=recorded) for i in (2, 0)] == [answers[2], answers[0]]
