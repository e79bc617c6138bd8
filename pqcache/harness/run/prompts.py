"""What a session keeps of the prompts that it has read, so that cells with the same prompts tokenize them once.

    prompts = Prompts()
    facts = prompts.facts(key, read)        read() -> (facts, token ids) is called only for a prompt that is not known
    ids = prompts.ids(key)                  its token ids, if they are still at hand

Facts are some hundred bytes a prompt, and are kept. Token ids are kept of the last prompt, which cells that share a prefill
ask for in turn, and of the first ones of a group of cells, up to KEPT_TOKENS: what was read to see which prompts are too long
is then not read again to be answered.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEPT_TOKENS = 1 << 24  # 64 MiB


@dataclass(frozen=True)
class PromptFacts:
    """A prompt without its tokens."""

    tokens: int
    question: int  # tokens at its end that go through the decode path
    mark: str  # the sample's fingerprint
    old_mark: str  # the same as older lines have it
    wrapper: str  # see LoadedModel.wrapper
    cut: tuple[int, int] | None  # (tokens a prompt may have before its middle is dropped, tokens dropped)
    bos_count: int | None
    sha256: str  # of the wrapped text
    end: str  # its last characters


def key_of(*parts: Any) -> bytes:
    """A digest of everything that decides a prompt's tokens and its fingerprint."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str).encode()).digest()


class Prompts:
    """The prompts of one session."""

    def __init__(self) -> None:
        self._facts: dict[bytes, PromptFacts] = {}
        self._ids: dict[bytes, array[int]] = {}
        self._last: tuple[bytes, list[int]] | None = None
        self._room = KEPT_TOKENS
        self._group = ""

    def begin(self, group: str) -> Prompts:
        """A cell of this group is about to run. Token ids of another group are dropped."""
        if group != self._group:
            self._group, self._ids, self._last, self._room = group, {}, None, KEPT_TOKENS
        return self

    def facts(self, key: bytes, read: Callable[[], tuple[PromptFacts, list[int]]]) -> PromptFacts:
        """The facts of a prompt, by `read` if it is new."""
        if key not in self._facts:
            self._facts[key], ids = read()
            self._keep(key, ids)
        return self._facts[key]

    def ids(self, key: bytes, read: Callable[[], tuple[PromptFacts, list[int]]]) -> list[int]:
        """The token ids of a prompt, by `read` if they are not at hand."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        if key in self._ids:
            ids = list(self._ids[key])
            self._last = key, ids
            return ids
        self._facts[key], ids = read()
        self._keep(key, ids)
        return ids

    def _keep(self, key: bytes, ids: list[int]) -> None:
        self._last = key, ids
        if len(ids) <= self._room:
            self._ids[key] = array("i", ids)
            self._room -= len(ids)
