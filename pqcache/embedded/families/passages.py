"""Passage retrieval: restate the note that begins with the question's words. It ends with its paragraph's number."""

from __future__ import annotations

from random import Random

from pqcache.embedded.families.scene import Ask, Lexicon, Scene

INTRO = "Here are notes, reports and stories."
# A unit: two notes that share a word at each end.
UNITS_PER_1K = 6.0
N_VALUES = 6


def make(rng: Random, lexicon: Lexicon, units: int, n_values: int = N_VALUES) -> Scene:
    """2 x `units` numbered notes."""
    pieces, asks = [], []
    numbers = rng.sample(range(1, 100), min(2 * units, 99))
    for _ in range(min(units, 49)):
        first = lexicon.values(n_values)
        second = [first[0], *lexicon.values(n_values - 2), first[-2]]
        for values in (first, second):
            number = numbers.pop()
            pieces.append(f"The note {' '.join(values)} is {number}.")
            question = f"What is the note {values[0]} {values[1]}, and its paragraph?"
            asks.append(Ask(question, pieces[-1], f"Paragraph {number}", pieces[-1]))
    return Scene(tuple(pieces), tuple(asks))
