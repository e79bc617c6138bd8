"""The scenes that families make: sentences to hide in a long text, and questions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random


@dataclass(frozen=True)
class Ask:
    """One question.

    answer: what the model is trained to say. gold: the part of it that the metric compares.
    source: the piece that the first looked-up token comes from.
    """

    question: str
    answer: str
    gold: str
    source: str


@dataclass(frozen=True)
class Scene:
    """Sentences and the questions about them.

    pieces: the sentences, in any order in the text; each needs white space before it.
    classes: all labels, where the metric needs them.
    """

    pieces: tuple[str, ...]
    asks: tuple[Ask, ...]
    classes: tuple[str, ...] = ()


@lru_cache(maxsize=4)
def _by_beginning(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names by their first three letters."""
    by_beginning: dict[str, list[str]] = {}
    for name in names:
        by_beginning.setdefault(name[:3], []).append(name)
    return {beginning: tuple(alike) for beginning, alike in by_beginning.items()}


class Lexicon:
    """Draws names and value words; no name is drawn twice."""

    def __init__(self, rng: Random, names: tuple[str, ...], values: Sequence[str]) -> None:
        self._rng, self._names, self._values = rng, names, values
        self._used: set[str] = set()

    def name(self, like: str | None = None) -> str:
        """A fresh name; one that begins with the letters of `like` if there is one left."""
        if like is not None:
            alike = [n for n in _by_beginning(self._names)[like[:3]] if n not in self._used]
            if alike:
                fresh = self._rng.choice(alike)
                self._used.add(fresh)
                return fresh
        if len(self._used) > len(self._names) // 2:
            raise ValueError(f"too few names: {len(self._names)}")
        while (fresh := self._rng.choice(self._names)) in self._used:
            pass
        self._used.add(fresh)
        return fresh

    def names(self, n: int, near: float) -> list[str]:
        """`n` fresh names, a share `near` of them beginning like another one of the list."""
        made: list[str] = []
        for _ in range(n):
            like = self._rng.choice(made) if made and self._rng.random() < near else None
            made.append(self.name(like))
        return made

    def values(self, n: int) -> list[str]:
        """`n` different value words."""
        return self._rng.sample(self._values, n)
