"""A chat of several turns: the method answers each message of the user on the cache that all turns before have left."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from pqcache.harness.run.prompts import Prepared
from pqcache.selective import Request

Stop = Callable[[list[int]], bool]


class Conversation:
    """Called with the tokens of an answer, it gives the next turn, or None after the last one: see `generate`'s `then`."""

    def __init__(
        self,
        prepared: Prepared,
        ends: Collection[int],
        text: Callable[[list[int]], str],
        stopper: Callable[[Prepared], Stop],
    ) -> None:
        """ends: the tokens that end an answer. text: what of an answer is scored. stopper: makes what stops an answer."""
        self.prepared, self.ends, self.text, self.stopper = prepared, ends, text, stopper
        self.said: list[str] = []  # the answers

    def __call__(self, tokens: list[int]) -> Request | None:
        prepared, turns = self.prepared, self.prepared.known.turns
        self.said.append(self.text(tokens))
        number = len(self.said)
        if number > len(turns):
            return None
        ids = turns[number - 1]
        if tokens[-1] not in self.ends:  # else the template writes the end of the turn
            ids = [tokens[-1], *ids]
        drawn = prepared.sampling and replace(prepared.sampling, key=f"{prepared.sampling.key}/turn {number}")
        question = len(ids) - 1 if prepared.question else 0  # question_as_decode: of a later turn all
        return Request(ids, prepared.new_tokens, self.ends, self.stopper(prepared), question, sampling=drawn)
