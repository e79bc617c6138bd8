"""Masks that the package never makes, as references."""

from collections.abc import Sequence

import torch

from pqcache.store.transfer import table


def causal_mask(past: Sequence[int], counts: Sequence[int], t: int, length: int, device: torch.device) -> torch.Tensor:
    """Which of `length` stored tokens each of t new query columns sees: (n, 1, t, length) bool.

    Row r held past[r] tokens and its last counts[r] columns are real. Padding queries see everything: their output is never
    used, and an empty softmax would be NaN.
    """
    column = torch.arange(t, device=device)[None]
    pads = t - table(counts, device)[:, None]
    position = table(past, device)[:, None] + column - pads  # (n, t)
    padding = column < pads
    seen = torch.arange(length, device=device)[None, None] <= position[..., None]
    return (seen | padding[..., None])[:, None]
