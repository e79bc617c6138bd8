"""CPU kernels, compiled by numba on first use; the plain-torch code that calls them is their reference and fallback.

A caller asks `native` with its tensors and takes its plain-torch path if the answer is False. Results agree up to the order of
additions. Ties go to the lower index everywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import cache

import torch

_on = {"compiled": True, "numba": True}  # compiled: any kernel, a GPU's included; numba: the kernels of this package


@cache
def installed() -> bool:
    """Whether numba can be imported. It is imported when the first kernel runs."""
    return importlib.util.find_spec("numba") is not None


def allowed(*tensors: torch.Tensor) -> bool:
    """Whether compiled kernels, a GPU's included, may serve at all: not switched off, no gradient to record."""
    return _on["compiled"] and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def native(*tensors: torch.Tensor) -> bool:
    """Whether the CPU kernels serve these tensors."""
    return _on["numba"] and installed() and all(t.device.type == "cpu" for t in tensors) and allowed(*tensors)


@contextlib.contextmanager
def _off(which: str) -> Iterator[None]:
    before, _on[which] = _on[which], False
    try:
        yield
    finally:
        _on[which] = before


def plain_torch() -> contextlib.AbstractContextManager[None]:
    """Switch all compiled kernels off inside the block, a GPU's included: for comparisons, and to rule them out."""
    return _off("compiled")


def without_numba() -> contextlib.AbstractContextManager[None]:
    """Switch the CPU kernels off inside the block."""
    return _off("numba")
