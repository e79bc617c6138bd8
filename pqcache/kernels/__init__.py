"""Native CPU kernels, compiled by numba on first use; the plain-torch code that calls them is their reference and fallback.

A caller asks `native(*tensors)` and goes its plain-torch way if the answer is False: numba is not installed, a tensor lives
elsewhere, or `plain_torch()` is in force. Results agree up to the order of additions, ties go to the lower index in both.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import cache

import torch

_state = {"native": True}


@cache
def installed() -> bool:
    """Whether numba can be imported; it is not before a kernel runs."""
    return importlib.util.find_spec("numba") is not None


def native(*tensors: torch.Tensor) -> bool:
    """Whether the compiled kernels serve these tensors: on the CPU, nothing to differentiate."""
    if not (_state["native"] and installed()):
        return False
    return all(t.device.type == "cpu" and not (t.requires_grad and torch.is_grad_enabled()) for t in tensors)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Switch the compiled kernels off inside the block: for comparisons, and to rule them out."""
    before, _state["native"] = _state["native"], False
    try:
        yield
    finally:
        _state["native"] = before
