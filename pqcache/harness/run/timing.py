"""TT2T and TPOT over the samples of a cell.

TT2T runs from submitting the prompt to the second token: the first token never needs a method's index, the second does.
TPOT is the time of one decode step. Each sample's first two steps are dropped, because they include warming up; the rest
are pooled over samples. If no step is left the result is None, never 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pqcache.selective import generate
from pqcache.selective.placement import home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pqcache.selective import Method

DROPPED_STEPS = 2
WARM_TOKENS = 1024


def warm_up(model: PreTrainedModel, method: Method, prompt: Sequence[int], attn: str, chunk: int | None = None) -> None:
    """Generate three tokens after the beginning of the prompt and drop them: kernels compile on first use."""
    ids = torch.tensor([list(prompt[:WARM_TOKENS])], device=home(model))
    with contextlib.suppress(ValueError):  # what the method refuses, the sample will report
        generate(model, method, ids, max_new_tokens=3, attn=attn, prefill_chunk=chunk)


def pooled_steps(steps: Iterable[Sequence[float]]) -> list[float]:
    """Decode steps of all samples, the first two of each dropped."""
    return [s for sample in steps for s in sample[DROPPED_STEPS:]]


def percentile(values: Iterable[float | None], share: float) -> float | None:
    """The value below which `share` of the values lie, linear between neighbours; None without values."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    at = share * (len(known) - 1)
    low = math.floor(at)
    high = min(low + 1, len(known) - 1)
    return known[low] + (known[high] - known[low]) * (at - low)


def tpot_ms(steps: Iterable[Sequence[float]], share: float) -> float | None:
    """A percentile of the time per output token, in milliseconds."""
    seconds = percentile(pooled_steps(steps), share)
    return None if seconds is None else seconds * 1000
