"""Two-hop questions over several documents: the first fact names the person of the second.

The baker of Velor is Kesa.   There is Kesa with the motto ... .

What is the baker of Velor with the motto?   The baker of Velor is Kesa with the motto ... .
"""

from __future__ import annotations

from random import Random

from pqcache.embedded.documents import ATTRIBUTES
from pqcache.embedded.families.scene import Ask, Lexicon, Scene

INTRO = "Here are several documents.\n\nDocument 1:"
# A unit: two facts that belong together and two near-duplicates of them.
UNITS_PER_1K = 4.0
N_VALUES = 6
RELATIONS = (
    "teacher farmer sailor baker doctor painter guard writer singer driver tailor cook captain student judge nurse clerk"
).split()


def make(rng: Random, lexicon: Lexicon, units: int, n_values: int = N_VALUES) -> Scene:
    """`units` chains of two facts; the near-duplicates share the relation and the attribute or the name."""
    pieces: list[str] = []
    asks: list[Ask] = []

    def chain(relation: str, name: str, attribute: str, other: str) -> None:
        values = " ".join(lexicon.values(n_values))
        bridge, target = f"The {relation} of {name} is {other}.", f"There is {other} with the {attribute} {values}."
        pieces.extend((bridge, target))
        question = f"What is the {relation} of {name} with the {attribute}?"
        asks.append(Ask(question, f"{bridge[:-1]}{target.removeprefix(f'There is {other}')}", values, bridge))

    for _ in range(units):
        relation, second = rng.sample(RELATIONS, 2)
        attribute = rng.choice(ATTRIBUTES)
        name, other = lexicon.name(), lexicon.name()
        chain(relation, name, attribute, other)
        like = lexicon.name(like=other)
        if rng.random() < 0.4:
            chain(second, name, attribute, like)
        else:
            chain(relation, lexicon.name(like=name), attribute, like)
    return Scene(tuple(pieces), tuple(asks))
