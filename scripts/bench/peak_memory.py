"""Peak memory of one call: of the process on Linux, of the allocator on CUDA."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch

from pqcache.selective.ledger import synchronize


def process_bytes(field: str = "VmRSS") -> int:
    """Resident bytes of this process: VmRSS now, VmHWM at its peak."""
    match = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that `call` holds at its peak beyond what was held before it."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Memory that was freed but kept by the allocator would be reused first, unseen.
    ctypes.CDLL(None).malloc_trim(0)
    # The kernel's peak starts again from here.
    Path("/proc/self/clear_refs").write_text("5")
    before = process_bytes()
    call()
    return process_bytes("VmHWM") - before
