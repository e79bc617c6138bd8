"""Counting: a series is spelled out to its end, and the last letter says how many there were."""

from __future__ import annotations

from random import Random

from pqcache.embedded.families.scene import Ask, Lexicon, Scene
from pqcache.embedded.families.series import pairs, series

INTRO = "Here are some notes and stories."
# A unit: the stops of two travellers with similar names.
UNITS_PER_1K = 1.5
N_VALUES = 2


def make(rng: Random, lexicon: Lexicon, units: int, n_values: int = N_VALUES) -> Scene:
    """Series of 2 to 7 stops, two travellers per unit."""
    pieces: list[str] = []
    asks = []
    for name in pairs(rng, lexicon, units):
        length = rng.randint(2, 7)
        made = series(lexicon, name, "stop", length, n_values)
        pieces += made
        question = f"What is the {name} stop A, and how many are there?"
        asks.append(Ask(question, f"{' '.join(made)} There are {length}.", str(length), made[0]))
    return Scene(tuple(pieces), tuple(asks))
