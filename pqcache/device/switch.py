"""Whether Triton's kernels serve; their modules are not to be imported to find out."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import cache

import torch

from pqcache import kernels

_state = {"interpreted": False}


@cache
def triton_installed() -> bool:
    """Whether Triton can be imported; it is not before a kernel runs."""
    return importlib.util.find_spec("triton") is not None


def on_device(*tensors: torch.Tensor) -> bool:
    """Whether the Triton kernels serve these tensors: on a CUDA device, no gradient, not switched off."""
    there = _state["interpreted"] or all(t.is_cuda for t in tensors)
    return there and triton_installed() and kernels.allowed(*tensors)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Triton's kernels serve CPU tensors too, instead of numba's: for tests, TRITON_INTERPRET=1 set before triton is imported."""
    before, _state["interpreted"] = _state["interpreted"], True
    try:
        with kernels.without_numba():
            yield
    finally:
        _state["interpreted"] = before
