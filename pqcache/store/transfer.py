"""Small tables, from the host to a device."""

from collections.abc import Sequence

import torch


def to_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a small table, from pinned memory: a copy from pageable memory would wait."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.clone()


def send(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values as a small table on the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def table(values: Sequence, device: torch.device) -> torch.Tensor:
    """Values as a small table on the device, int64, or bool for bools. torch.tensor(..., device=device) would wait for a GPU."""
    there = torch.tensor(values)
    return to_device(there, device) if device.type == "cuda" else there
