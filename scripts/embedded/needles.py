"""Needles of training rows: a key and a value each, as token ids; many keys are near-duplicates of another."""

from dataclasses import dataclass
from random import Random

import numpy as np

from pqcache.embedded import documents
from scripts.embedded.material import Material


@dataclass(frozen=True)
class TokenNeedle:
    """The sentence `The <key> is <value>.`"""

    key: tuple[int, ...]
    value: tuple[int, ...]


def facts(material: Material, rng: np.random.Generator, py: Random, n: int) -> list[TokenNeedle]:
    """`n` facts about pseudo-words, in random order."""
    n_values = int(rng.integers(3, 8))
    near = int(n * rng.choice([0.0, 0.3, 0.5, 0.7]))
    words = material.words
    made = documents.make_facts(py, n - near, near, n_values, words.names_train, words.values_train)
    py.shuffle(made)
    values = [material.flat([material.ids(" " + value) for value in fact.values]) for fact in made]
    return [TokenNeedle(tuple(material.ids(f" {fact.key}")), tuple(v)) for fact, v in zip(made, values, strict=True)]


def free_needles(material: Material, rng: np.random.Generator, kind: str, n: int) -> list[TokenNeedle]:
    """`n` needles of prose words (kind "words") or random tokens. Some keys are another key with a late part changed."""
    near = rng.choice([0.0, 0.3, 0.5])
    # A key is a list of parts, a part a list of tokens.
    keys: list[list[list[int]]] = []
    seen: set[tuple[int, ...]] = set()
    while len(keys) < n:
        if keys and rng.random() < near:
            key = list(keys[rng.integers(len(keys))])
            part = len(key) - 1 - int(rng.integers(min(3, len(key))))
            key[part] = _part(material, rng, kind)
        else:
            key = _key(material, rng, kind)
        flat = tuple(material.flat(key))
        if flat not in seen:
            seen.add(flat)
            keys.append(key)
    return [TokenNeedle(tuple(material.flat(key)), tuple(_value(material, rng, kind))) for key in keys]


def _key(material: Material, rng: np.random.Generator, kind: str) -> list[list[int]]:
    """A key of two to nine parts. Half of the keys of words end with one or two capitalised words."""
    key = [_part(material, rng, kind) for _ in range(int(rng.integers(2, 10)))]
    if kind == "words" and rng.random() < 0.5:
        titles = min(int(rng.integers(1, 3)), len(key))
        key[-titles:] = material.random_words(rng, titles, 1.0)
    return key


def _part(material: Material, rng: np.random.Generator, kind: str) -> list[int]:
    return material.random_words(rng, 1, 0.15)[0] if kind == "words" else material.random_tokens(rng, 1)


def _value(material: Material, rng: np.random.Generator, kind: str) -> list[int]:
    if kind == "words":
        return material.flat(material.random_words(rng, int(rng.integers(3, 22)), 0.12))
    return material.random_tokens(rng, int(rng.integers(4, 33)))
