"""A chat of several turns: the method answers each message of the user on the cache that all turns before have left."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from pqcache.harness.run import answers
from pqcache.selective import GenerationResult, Request

if TYPE_CHECKING:
    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.harness.run.prompts import Prepared
    from pqcache.harness.run.samples import Sample


class Conversation:
    """Called with the tokens of an answer, it gives the next turn, or None behind the last one: see `generate`'s `then`."""

    def __init__(self, lm: HarnessLM, prepared: Prepared, ends: Collection[int]) -> None:
        """ends: the tokens that end an answer."""
        self.lm, self.prepared, self.ends = lm, prepared, ends
        self.said: list[str] = []  # the answers

    def __call__(self, tokens: list[int]) -> Request | None:
        prepared = self.prepared
        text = answers.cut(self.lm.text_of(tokens, self.ends), prepared.until, thinking=self.lm.thinks)
        self.said.append(self.lm.scored_part(text))
        number = len(self.said)
        if number > len(prepared.known.turns):
            return None
        ids = prepared.known.turns[number - 1]
        if tokens[-1] not in self.ends:  # else the template writes the end of the turn
            ids = [tokens[-1], *ids]
        drawn = prepared.sampling and replace(prepared.sampling, key=f"{prepared.sampling.key}/turn {number}")
        question = len(ids) - 1 if prepared.question else 0  # question_as_decode: of a later turn all
        stop = self.lm.stopper(prepared)
        return Request(ids, prepared.new_tokens, self.ends, stop, question, sampling=drawn)

    def sample(self, doc: dict, result: GenerationResult) -> Sample:
        """The sample of the finished chat: its response is the list of answers."""
        response = json.dumps(self.said, ensure_ascii=False)
        score = self.lm.scorer(self.prepared.task, doc, response) if self.lm.scorer is not None else None
        return self.lm.line(self.prepared, response, score, self.prepared.question, result)
