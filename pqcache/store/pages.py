"""Large memory pages for large tensors: scattered reads of a big cache otherwise miss the page tables each time."""

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import torch

_MIN_BYTES = 8 << 20  # smaller tensors are not worth rounding up to pages of 2 MiB
_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


@cache
def _madvise() -> Any:
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None:
        call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return call


def advise(data: torch.Tensor) -> None:
    """Ask for large pages for a contiguous CPU tensor, before its first write. Does nothing where the system has none."""
    size = data.numel() * data.element_size()
    if _HUGEPAGE is None or sys.platform != "linux" or data.device.type != "cpu" or size < _MIN_BYTES:
        return
    call = _madvise()
    if call is not None:
        start = -(-data.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        call(start, (data.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, _HUGEPAGE)
