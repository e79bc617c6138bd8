"""Memory that can still be had, on a device and on the host."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Bytes that the device can give to this process now; None if it does not tell. A CPU gives the host's.

    On CUDA the question alone opens a context, which takes some hundred MB of the GPU.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return host_memory()


def host_memory() -> int | None:
    """Bytes of host memory that are available, within the process's control group; None if the system does not tell."""
    free = [value for value in (_available(), group_limit()) if value is not None]
    return min(free) if free else None


def swap() -> int:
    """Free bytes of swap; 0 if the system does not tell."""
    return _meminfo("SwapFree") or 0


def _available() -> int | None:
    if (available := _meminfo("MemAvailable")) is not None:
        return available
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _meminfo(name: str) -> int | None:
    """A number of Linux's /proc/meminfo, in bytes."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def group_limit(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group leaves, version 2 or 1; None if it sets no limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((folder / limit).read_text())
            return max(0, most - int((folder / used).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None
