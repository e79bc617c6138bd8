"""List the decisions: all sentences of one series, among other councils' decisions and the same council's proposals."""

from __future__ import annotations

from random import Random

from pqcache.embedded.families.scene import Ask, Lexicon, Scene
from pqcache.embedded.families.series import pairs, series

INTRO = "Here are notes, reports and stories."
# A unit: the decisions of two councils with similar names, and one's proposals.
UNITS_PER_1K = 1.0
N_VALUES = 5


def make(rng: Random, lexicon: Lexicon, units: int, n_values: int = N_VALUES) -> Scene:
    """Series of 3 to 5 decisions, two councils per unit."""
    pieces: list[str] = []
    asks = []
    for index, name in enumerate(pairs(rng, lexicon, units)):
        made = series(lexicon, name, "decision", rng.randint(3, 5), n_values)
        pieces += made
        question = f"What is the {name} decision A, and what are the others?"
        asks.append(Ask(question, " ".join(made), " ".join(made), made[0]))
        if index % 2 == 0:
            pieces += series(lexicon, name, "proposal", 2, n_values)
    return Scene(tuple(pieces), tuple(asks))
