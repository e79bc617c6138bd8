"""Whether the Triton kernels serve some tensors, decided without importing the kernels."""

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
    """Whether Triton can be imported. It is imported when the first kernel runs."""
    return importlib.util.find_spec("triton") is not None


def on_device(*tensors: torch.Tensor) -> bool:
    """Whether the Triton kernels serve these tensors: on a CUDA device, no gradient, not switched off."""
    there = _state["interpreted"] or all(t.is_cuda for t in tensors)
    return there and triton_installed() and kernels.allowed(*tensors)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Let the Triton kernels serve CPU tensors in place of numba's, for tests. Set TRITON_INTERPRET=1 before importing triton."""
    before, _state["interpreted"] = _state["interpreted"], True
    try:
        with kernels.without_numba():
            yield
    finally:
        _state["interpreted"] = before
