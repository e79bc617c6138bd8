"""Lettered sentences about one name; the question asks for all of them in order.

    The Velor decision A is ... .   The Velor decision B is ... .   The Velor decision C is ..., the last.

The sentences stand anywhere in the text. The answer spells them out in the order of their letters and so shows where the
series ends.
"""

from __future__ import annotations

from random import Random

from pqcache.embedded.families.scene import Lexicon

LETTERS = "ABCDEFGHI"


def series(lexicon: Lexicon, name: str, noun: str, length: int, n_values: int) -> list[str]:
    """The sentences of one series, A first."""
    made = []
    for i in range(length):
        end = ", the last." if i == length - 1 else "."
        made.append(f"The {name} {noun} {LETTERS[i]} is {' '.join(lexicon.values(n_values))}{end}")
    return made


def pairs(rng: Random, lexicon: Lexicon, units: int) -> list[str]:
    """2 x `units` names, every second one beginning like the one before it."""
    names = []
    for _ in range(units):
        names.append(lexicon.name())
        names.append(lexicon.name(like=names[-1]))
    return names
