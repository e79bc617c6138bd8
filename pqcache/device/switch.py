"""Whether the Triton kernels serve some tensors, and on which device they are launched; without importing the kernels."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from pqcache import kernels

_state = {"interpreted": False}
_pretended = {"processors": 0}  # of a device that is not there, while kernels are compiled for it
HERE = contextlib.nullcontext()


@cache
def triton_installed() -> bool:
    """Whether Triton can be imported. It is imported when the first kernel runs."""
    return importlib.util.find_spec("triton") is not None


def on_device(*tensors: torch.Tensor) -> bool:
    """Whether the Triton kernels serve these tensors: on a CUDA device, no gradient, not switched off."""
    there = _state["interpreted"] or all(t.is_cuda for t in tensors)
    return there and triton_installed() and kernels.allowed(*tensors)


def device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which x's CUDA device is the current one: Triton launches on the current device and its stream."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(x.device)


def launch(kernel: Any, grid: tuple[int, ...], x: torch.Tensor) -> Callable[..., None]:
    """A function that launches a Triton kernel with its arguments on the device of x, whatever the current device is."""
    device = device_of(x)
    if device is HERE:  # nothing to change: a step makes seven launches per layer
        return kernel[grid]

    def call(*args: Any, **options: Any) -> None:
        with device:
            kernel[grid](*args, **options)

    return call


def prepared(kernel: Any, grid: tuple[int, ...], **constants: Any) -> Callable[..., None]:
    """A launch with its grid and compile-time arguments, made once and called at every step; its device must be the current one.

    What `kernel[grid]` calls, without the two Python calls on the way there.
    """
    return partial(kernel.run, grid=grid, warmup=False, **constants)


def still_served(q: torch.Tensor) -> bool:
    """Whether the kernels, which served tensors of this model before, serve q: one call, as each layer asks at each step."""
    return (
        (q.is_cuda or _state["interpreted"])
        and kernels.switches["compiled"]
        and not (q.requires_grad and torch.is_grad_enabled())
    )


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Let the Triton kernels serve CPU tensors in place of numba's, for tests. Set TRITON_INTERPRET=1 before importing triton."""
    before, _state["interpreted"] = _state["interpreted"], True
    try:
        with kernels.without_numba():
            yield
    finally:
        _state["interpreted"] = before


def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device, or of the one that kernels are compiled for; 0 on the CPU."""
    if device.type != "cuda":
        return _pretended["processors"]
    return torch.cuda.get_device_properties(device).multi_processor_count


@contextlib.contextmanager
def pretended(processors: int) -> Iterator[None]:
    """Let launches on the CPU have the grids, and so the kernels, of a device with so many multiprocessors."""
    before, _pretended["processors"] = _pretended["processors"], processors
    try:
        yield
    finally:
        _pretended["processors"] = before


def power_of_2(n: int) -> int:
    """The least power of two that is n >= 1 or more. Triton's own is several Python calls, eight times a layer."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
