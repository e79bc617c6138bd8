"""Code completion: call a function with the arguments of its definition, which stands far above."""

from __future__ import annotations

from random import Random

from pqcache.embedded.families.scene import Ask, Lexicon, Scene

INTRO = "Here is a long program."
# A unit: two functions with similar names.
UNITS_PER_1K = 6.0
N_VALUES = 6


def filler(rng: Random) -> str:
    """A line or two of a function's body."""
    a, b = rng.sample("abcdefghkmnpqrstuvwxyz", 2)
    n = rng.randint(2, 99)
    return rng.choice(
        (
            f"    {a} = {b} + {n}",
            f"    if {a} > {n}:\n        {a} = {b}",
            f"    for {a} in range({n}):\n        {b} += {a}",
            f"    {a}, {b} = {b}, {a} * {n}",
            f"    return {a} - {b} * {n}",
            f"    while {a} < {n}:\n        {a} += 1",
            f"    {a} = [{b}, {n}]",
        )
    )


def make(rng: Random, lexicon: Lexicon, units: int, n_values: int = N_VALUES) -> Scene:
    """2 x `units` functions of `n_values` arguments; pairs of names begin alike."""
    pieces, asks = [], []
    for _ in range(units):
        name = lexicon.name()
        for called in (name, lexicon.name(like=name)):
            arguments = ", ".join(lexicon.values(n_values))
            call = f"return {called.lower()}({arguments})"
            pieces.append(f"def {called.lower()}({arguments}) -> int:")
            asks.append(Ask(f"# What is the call of {called.lower()}?", call, call, pieces[-1]))
    return Scene(tuple(pieces), tuple(asks))
