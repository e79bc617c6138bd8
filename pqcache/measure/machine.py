"""This machine's name for captions, and the bandwidths it reaches, with which measured times are compared."""

import contextlib
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pqcache import kernels
from pqcache.selective.ledger import synchronize


def device_caption(device: str | torch.device) -> str:
    """The machine in words, for captions: the device, its memory or threads, the CUDA version, kernels that are missing."""
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    if device.type == "mps":
        return f"Apple GPU ({platform.machine()})"
    without = "" if kernels.usable() else ", without numba's kernels"  # plain torch is slower
    cpu = ""
    with contextlib.suppress(OSError):
        names = re.findall(r"^model name[^:]*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = " ".join(names[0].split()) if names else ""
    cpu = cpu or platform.processor() or platform.machine()  # else the architecture
    return f"{cpu}, {torch.get_num_threads()} of {os.cpu_count()} CPU threads{without}"


def slug(text: str) -> str:
    """A caption as a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def timed_calls(call: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls, after one that warms up."""
    return [seconds(call, device) for _ in range(rounds + 1)][1:]


def copy_speed(device: torch.device, nbytes: int = 1 << 28, rounds: int = 7) -> float:
    """Bytes per second, read and written together, of a plain copy within the device's memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / statistics.median(timed_calls(lambda: target.copy_(source), device, rounds))


def link_speed(device: torch.device, nbytes: int, rounds: int) -> float:
    """Bytes per second of a copy from pinned host memory to a CUDA device."""
    source = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / statistics.median(timed_calls(lambda: target.copy_(source, non_blocking=True), device, rounds))


@torch.no_grad()
def read_speed(device: torch.device, dtype: torch.dtype, nbytes: int, rounds: int) -> float:
    """Bytes per second at which a matrix-vector product reads its matrix."""
    side = 1 << 13
    matrix = torch.ones((max(1, nbytes // side // dtype.itemsize), side), dtype=dtype, device=device)
    vector = torch.ones(side, dtype=dtype, device=device)
    read = matrix.numel() * matrix.element_size()
    return read / statistics.median(timed_calls(lambda: matrix @ vector, device, rounds))


def ceilings(
    device: torch.device, dtype: torch.dtype = torch.float32, nbytes: int = 1 << 28, rounds: int = 5
) -> dict[str, float]:
    """Gigabytes per second that this machine reaches itself, measured 256 MiB at a time: far more than caches hold.

    memory_gb_per_s: reading the device's memory, the better of a matrix-vector product and of a copy (read + written).
    link_gb_per_s: from pinned host memory to the device; on a CPU a copy from host memory to host memory.
    """
    copied = copy_speed(device, nbytes, rounds)
    memory = max(read_speed(device, dtype, nbytes, rounds), copied)
    # On a CPU every byte that crosses is read once and written once.
    link = link_speed(device, nbytes, rounds) if device.type == "cuda" else copied / 2
    return {"memory_gb_per_s": memory / 1e9, "link_gb_per_s": link / 1e9}
