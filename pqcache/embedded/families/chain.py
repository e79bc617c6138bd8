"""A chain of look-ups: each value is the key of the next look-up.

    The way from Velor is to Kesa.   The way from Kesa is to Miran.   The way from Miran is to 4721.

    What is the way from Velor?   The way from Velor is to Kesa is to Miran is to 4721.

The metric compares the number at the end.
"""

from __future__ import annotations

from random import Random

from pqcache.embedded.families.scene import Ask, Lexicon, Scene

INTRO = "Here are some notes and stories."
# A unit: one way of 4 to 9 look-ups.
UNITS_PER_1K = 1.5
# Share of places whose name begins like another one's.
NEAR = 0.4


def make(rng: Random, lexicon: Lexicon, units: int) -> Scene:
    """`units` ways, at least two. Their place names are near-duplicates, shared out among all ways."""
    pieces, asks = [], []
    lengths = [rng.randint(4, 9) for _ in range(max(units, 2))]
    names = lexicon.names(sum(lengths), NEAR)
    rng.shuffle(names)
    for length in lengths:
        places, names = names[:length], names[length:]
        number = str(rng.randint(1000, 9999))
        stations = [*places[1:], number]
        facts = [f"The way from {a} is to {b}." for a, b in zip(places, stations, strict=True)]
        pieces += facts
        answer = f"The way from {places[0]} is to {' is to '.join(stations)}."
        asks.append(Ask(f"What is the way from {places[0]}?", answer, number, facts[0]))
    return Scene(tuple(pieces), tuple(asks))
