"""Recorded decode steps for `generate`: a request's steps are recorded once one has run, and replayed to its end.

    recorder = StepRecorder(model, cache, graph="auto")
    logits = recorder.step(token, left)     # None: this step is not recorded, run it as usual

Where steps cannot be recorded they run as usual, and one note per process and reason says why.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from pqcache.selective.cache import SelectiveCache
from pqcache.selective.captured import CapturedSteps, CaptureFailed
from pqcache.selective.placement import home
from pqcache.selective.shape import NotApplicable

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
    """Decode steps of one request of one row or more, greedy. graph: auto, or off to record nothing."""

    def __init__(self, model: PreTrainedModel, cache: Any, graph: str) -> None:
        check(graph)
        self.model, self.cache = model, cache
        self.on = graph == "auto" and isinstance(cache, SelectiveCache) and _recordable(home(model))
        self.steps: CapturedSteps | None = None

    def step(self, token: int, left: int) -> torch.Tensor | None:
        """Logits (n, vocabulary) of a step that feeds `token`, after which at most `left` - 1 follow. None: run it as usual.

        A recording goes on from the token it chose itself, the likeliest, which must be `token`.
        """
        if not self.on:
            return None
        if self.steps is None:
            if self.cache.observers or self.cache.watchers or left < LEAST:
                self.on = False
                return None
            if not self.cache.ledger.steps:  # an ordinary step makes and compiles what recorded ones reuse
                return None
            device = home(self.model)
            try:
                self.steps = CapturedSteps(self.model, self.cache, torch.tensor([[token]], device=device), left)
            except CaptureFailed as failure:  # one step has run
                self._give_up(failure)
                return failure.logits
            except NotApplicable as reason:
                self._give_up(reason)
                return None
        self.steps.replay()
        return self.steps.logits

    def _give_up(self, reason: Exception) -> None:
        self.on = False
        text = " ".join(str(reason).split())[:300]
        if text not in _noted:
            _noted.add(text)
            warnings.warn(f"decode steps run unrecorded: {text}", RuntimeWarning, stacklevel=4)
