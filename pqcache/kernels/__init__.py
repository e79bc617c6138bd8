"""Native kernels, compiled on first use; the plain-torch code that calls them is their reference and fallback.

On the CPU numba compiles them (`native`), on a CUDA device Triton does (`on_device`; the modules named triton_*). A caller asks
with its tensors and goes its plain-torch way if the answer is False: the compiler is not installed, a tensor lives elsewhere, or
`plain_torch()` is in force. Results agree up to the order of additions, ties go to the lower index everywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import cache

import torch

_state = {"native": True, "interpret": False}


@cache
def installed() -> bool:
    """Whether numba can be imported; it is not before a kernel runs."""
    return importlib.util.find_spec("numba") is not None


@cache
def triton_installed() -> bool:
    """Whether Triton can be imported; it is not before a kernel runs."""
    return importlib.util.find_spec("triton") is not None


def _plain(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Nothing to differentiate."""
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def native(*tensors: torch.Tensor) -> bool:
    """Whether the CPU kernels serve these tensors: on the CPU, nothing to differentiate."""
    if not (_state["native"] and installed()) or _state["interpret"]:
        return False
    return all(t.device.type == "cpu" for t in tensors) and _plain(tensors)


def on_device(*tensors: torch.Tensor) -> bool:
    """Whether the Triton kernels serve these tensors: on a CUDA device, nothing to differentiate."""
    if not (_state["native"] and triton_installed()):
        return False
    return (_state["interpret"] or all(t.is_cuda for t in tensors)) and _plain(tensors)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Switch all these kernels off inside the block: for comparisons, and to rule them out."""
    before, _state["native"] = _state["native"], False
    try:
        yield
    finally:
        _state["native"] = before


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Triton's kernels serve CPU tensors too, instead of numba's: for tests, TRITON_INTERPRET=1 set before triton is imported."""
    before, _state["interpret"] = _state["interpret"], True
    try:
        yield
    finally:
        _state["interpret"] = before
