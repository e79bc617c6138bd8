"""Peak memory of a piece of code: of the allocator on CUDA, else of the process (Linux)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pqcache.selective.ledger import synchronize

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure the peak of what runs inside, weights and everything else included.

    Yields a dictionary that has the numbers afterwards, under their names in rows: peak_memory_bytes and peak_memory_of, gpu or
    process. It stays empty where the system does not say.
    """
    peak: dict[str, Any] = {}
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        synchronize(device)
        peak |= {"peak_memory_bytes": torch.cuda.max_memory_allocated(device), "peak_memory_of": "gpu"}
        return
    try:
        RESET.write_text("5")  # the kernel's peak of this process starts again from here
    except OSError:
        yield peak
        return
    yield peak
    if match := re.search(r"VmHWM:\s+(\d+)", STATUS.read_text()):
        peak |= {"peak_memory_bytes": int(match[1]) * 1024, "peak_memory_of": "process"}
