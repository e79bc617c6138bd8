"""Single-document question answering: one fact among many whose keys differ from it in one part."""

from __future__ import annotations

from random import Random

from pqcache.embedded.documents import ATTRIBUTES
from pqcache.embedded.families.scene import Ask, Lexicon, Scene

INTRO = "Here are some notes and stories."
# A unit: a fact and one near-duplicate.
UNITS_PER_1K = 6.0
N_VALUES = 6


def make(rng: Random, lexicon: Lexicon, units: int, n_values: int = N_VALUES) -> Scene:
    """`units` facts, each beside a near-duplicate that shares its attribute or its name."""
    pieces, asks = [], []

    def fact(attribute: str, name: str) -> None:
        values = " ".join(lexicon.values(n_values))
        pieces.append(f"The {attribute} of {name} is {values}.")
        asks.append(Ask(f"What is the {attribute} of {name}?", pieces[-1], values, pieces[-1]))

    for _ in range(units):
        first, second = rng.sample(ATTRIBUTES, 2)
        name = lexicon.name()
        fact(first, name)
        if rng.random() < 0.4:
            fact(second, name)
        else:
            fact(first, lexicon.name(like=name))
    return Scene(tuple(pieces), tuple(asks))
