"""What this machine is called, and what it can move: the ceilings that measured times are held against."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pqcache.selective.ledger import synchronize


def device_caption(device: str | torch.device) -> str:
    """The machine in words, for captions: what computed, and how much of it."""
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    if device.type == "mps":
        return f"Apple GPU ({platform.machine()})"
    return f"{cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} CPU threads"


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def slug(text: str) -> str:
    """A caption as a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()


def median_seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median of `rounds` timed calls after one that warms up."""
    return statistics.median(timed_calls(call, device, rounds))


def fastest_seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The fastest of `rounds` timed calls after one that warms up: what the machine needs when nothing else runs."""
    return min(timed_calls(call, device, rounds))


def timed_calls(call: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls, after one that warms up."""
    times = []
    for turn in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        if turn:
            times.append(time.perf_counter() - start)
    return times


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second that this machine reached itself."""

    memory: float  # read from the device's memory: the best of a matrix-vector product and of a copy (read + written)
    link: float  # host to device, pinned; on a CPU a copy from host memory to host memory

    def to_dict(self) -> dict[str, float]:
        return {f"{key}_gb_per_s": value / 1e9 for key, value in asdict(self).items()}


@torch.no_grad()
def ceilings(
    device: torch.device, dtype: torch.dtype = torch.float32, nbytes: int = 1 << 28, rounds: int = 5
) -> Ceilings:
    """Measure them: 256 MiB at a time, far more than caches hold."""
    side = 1 << 13
    matrix = torch.ones((max(1, nbytes // side // dtype.itemsize), side), dtype=dtype, device=device)
    vector = torch.ones(side, dtype=dtype, device=device)
    read = matrix.numel() * matrix.element_size() / median_seconds(lambda: matrix @ vector, device, rounds)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * nbytes / median_seconds(lambda: target.copy_(source), device, rounds)
    if device.type == "cuda":
        source = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
        link = nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True), device, rounds)
    else:
        link = copied / 2  # every byte that crosses is read once and written once
    return Ceilings(max(read, copied), link)
