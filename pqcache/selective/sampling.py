"""Drawn tokens: temperature and nucleus (top-p) sampling, with numbers that depend on a key and the step alone.

    sampling = Sampling(temperature=0.6, top_p=0.95, key="0/aime24/3/1")
    token = sampling.draw(logits, step=0)                     logits (vocabulary,)

Step i of a sample uses one number in [0, 1): a hash of the key and i. So an answer depends neither on what was drawn before it,
nor on the batch that it is in, and every method meets the same numbers.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch

BITS = 53  # of a float64's mantissa


class Chooses(Protocol):
    """What chooses the tokens of one answer: `Sampling`, or a text that is read (fidelity.py)."""

    def draw(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """The token of a step, a tensor (), from logits (vocabulary,)."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are drawn."""

    temperature: float  # above 0; logits are divided by it
    top_p: float = 1.0  # in (0, 1]: tokens are drawn from the smallest set of likeliest ones that has this probability
    key: str = ""  # names the answer; answers with the same key use the same numbers

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: allowed is a number above 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: allowed is a number in (0, 1]")

    def number(self, step: int) -> float:
        """The number in [0, 1) of a step: 53 bits of BLAKE2b, so that all platforms have the same."""
        digest = hashlib.blake2b(f"{self.key}#{step}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> (64 - BITS)) / 2**BITS

    def draw(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """The token of a step, a tensor () on the device of logits (vocabulary,). Nothing waits for the device.

        The first token, in the order of the vocabulary, at which the summed probability exceeds the step's number.
        """
        weights = probabilities(logits, self.temperature, self.top_p)
        summed = weights.cumsum(-1)
        token = torch.searchsorted(summed, summed[-1:] * self.number(step), right=True)[0]
        # Rounding may lift the product to the whole sum, which no token exceeds; NaN is reported by who called.
        last = (summed < summed[-1]).sum()
        return torch.minimum(token, last)


def probabilities(logits: torch.Tensor, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """What tokens are drawn by, logits (vocabulary,) -> float64 (vocabulary,): 0 outside the nucleus, not normalised.

    The nucleus is the smallest set of likeliest tokens whose probability at this temperature is at least top_p (Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration", section 3.1). Of equally likely tokens the first ones belong to it.
    """
    if logits.device.type == "mps":  # has no float64
        logits = logits.cpu()
    logits = logits.double()
    # The largest is subtracted first: a tiny temperature would overflow.
    weights = ((logits - logits.max()) / temperature).softmax(-1)
    if top_p == 1.0:
        return weights
    ordered, tokens = weights.sort(descending=True, stable=True)
    before = ordered.cumsum(-1).roll(1)  # the probability of the likelier ones
    before[0] = 0.0
    return torch.zeros_like(weights).scatter(0, tokens, ordered * (before < top_p))
