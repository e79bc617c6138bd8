"""Peak memory of a piece of code: of the allocator on CUDA, else of the process (Linux)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pqcache.selective.ledger import synchronize

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """`bytes` held at most, weights and everything else included; None where the system does not say. of: gpu | process."""

    bytes: int | None = None
    of: str = "process"


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak of what runs inside; the numbers are there afterwards."""
    peak = Peak(of="gpu" if device.type == "cuda" else "process")
    if peak.of == "gpu":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    try:
        RESET.write_text("5")  # the kernel's peak of this process starts again from here
    except OSError:
        yield peak
        return
    yield peak
    match = re.search(r"VmHWM:\s+(\d+)", STATUS.read_text())
    peak.bytes = int(match[1]) * 1024 if match is not None else None
