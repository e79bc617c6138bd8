"""Recorded decode steps for `generate`: a request's steps are recorded once one has run, and replayed to its end.

    recorder = StepRecorder(model, cache, graph="auto")
    logits = recorder.step(tokens, left)     # None: this step is not recorded, run it as usual

Where steps cannot be recorded they run as usual, and one note per process and reason says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.selective.cache import SelectiveCache
from pqcache.selective.captured import CapturedSteps, CaptureFailed
from pqcache.selective.placement import home
from pqcache.selective.shape import NotApplicable
from pqcache.store.transfer import send

GRAPHS = ("auto", "off")
LEAST = 8  # steps to come for which a recording pays: it takes the time of about two
_noted: set[str] = set()


def check(graph: str) -> None:
    """Raises ValueError for a value that is not allowed."""
    if graph not in GRAPHS:
        raise ValueError(f"graph={graph}: allowed is {' or '.join(GRAPHS)}")


def _recordable(device: torch.device) -> bool:
    """Whether steps on this device can be recorded at all."""
    return device.type == "cuda"


class StepRecorder:
    """Decode steps of one request of one row or more. graph: auto, or off to record nothing.

    fed: tokens may differ from the likeliest ones (drawn answers, questions): each step sends its own to the device.
    """

    def __init__(self, model: PreTrainedModel, cache: Any, graph: str, *, fed: bool = False) -> None:
        check(graph)
        self.fed = fed
        self.first = 1  # ordinary steps of the request before one is recorded: they make and compile what it reuses
        self.model, self.cache = model, cache
        self.on = (
            graph == "auto"
            and isinstance(cache, SelectiveCache)
            and cache.kernels == "auto"
            and _recordable(home(model))
        )
        self.steps: CapturedSteps | None = None

    def forget(self) -> None:
        """Rows were dropped or reordered: the next step is an ordinary one, and the one after it recorded anew."""
        if self.on and self.steps is not None:
            self.steps = None
        if self.on:
            self.first = self.cache.ledger.steps + 1

    def step(self, tokens: Sequence[int], left: int) -> torch.Tensor | None:
        """Logits (n, vocabulary) of a step that feeds `tokens`, after which at most `left` - 1 follow. None: run it as usual.

        Unless `fed`, a recording goes on from the tokens it chose itself, the likeliest, which must be `tokens`.
        """
        if not self.on:
            return None
        if self.steps is None:
            if self.cache.observers or self.cache.watchers or left < LEAST:
                self.on = False
                return None
            if self.cache.ledger.steps < self.first:
                return None
            try:
                self.steps = CapturedSteps(self.model, self.cache, self._sent(tokens), left)
            except CaptureFailed as failure:  # one step has run
                self._give_up(failure)
                return failure.logits
            except NotApplicable as reason:
                self._give_up(reason)
                return None
        self.steps.replay(self._sent(tokens) if self.fed else None)
        return self.steps.logits

    def _sent(self, tokens: Sequence[int]) -> torch.Tensor:
        return send(tokens, torch.long, home(self.model))[:, None]

    def _give_up(self, reason: Exception) -> None:
        self.on = False
        text = " ".join(str(reason).split())[:300]
        if text not in _noted:
            _noted.add(text)
            warnings.warn(f"decode steps run unrecorded: {text}", RuntimeWarning, stacklevel=4)
