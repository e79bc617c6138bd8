"""Few-shot label learning: an example of two words has the label of other examples with one of these words.

Every label has three words of its own. An example shows two of them in some order. The pair in the question is in no example,
but each of its words stands at the same place in some example, so each is matched by itself.
"""

from __future__ import annotations

from itertools import permutations
from random import Random

from pqcache.embedded.families.scene import Ask, Lexicon, Scene

INTRO = "Here are some notes and stories."
# A unit: one label.
UNITS_PER_1K = 3.0
# Words of a label.
N_VALUES = 3


def make(rng: Random, lexicon: Lexicon, units: int, n_values: int = N_VALUES) -> Scene:
    """`units` labels, at least two; four examples of each."""
    pieces, asks, classes = [], [], []
    units = max(units, 2)
    words = lexicon.values(3 * units)
    for i in range(units):
        label = " ".join(lexicon.values(n_values))
        classes.append(label)
        pairs = list(permutations(words[3 * i : 3 * i + 3], 2))
        rng.shuffle(pairs)
        # The two pairs that are held back share no place, so that neither loses its examples to the other.
        first = pairs[0]
        second = next(pair for pair in pairs if pair[0] != first[0] and pair[1] != first[1])
        shown = [f"The sample {a} {b} is {label}." for a, b in pairs if (a, b) not in (first, second)]
        pieces += shown
        for a, b in (first, second):
            asks.append(Ask(f"What is the sample {a} {b}?", f"The sample {a} {b} is {label}.", label, shown[0]))
    return Scene(tuple(pieces), tuple(asks), tuple(classes))
