"""Drop one entry per head from several buffers: the last entry takes its place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pqcache import kernels
from pqcache.store.buffer import Buffer
from pqcache.store.transfer import table


class Lightest(NamedTuple):
    """The entry of least weight with a position in first[r] .. ends[r]-1, in row r; among equals the latest.

    Where no entry has such a position, it is entry 0.
    """

    positions: torch.Tensor  # (n, heads, capacity) int32
    weights: torch.Tensor  # (n, heads, capacity), none below 0
    first: Sequence[int]
    ends: Sequence[int]

    def slots(self, lengths: Sequence[int]) -> torch.Tensor:
        """The entry of each head, of lengths[r] in row r: (n, heads) int64."""
        length, device = max(lengths), self.positions.device
        position, weight = self.positions[:, :, :length], self.weights[:, :, :length]
        first, ends, counts = (table(x, device)[:, None, None] for x in (self.first, self.ends, lengths))
        held = torch.arange(length, device=device) < counts
        candidate = (position >= first) & (position < ends) & held
        weight = weight.masked_fill(~candidate, torch.inf)
        lightest = candidate & (weight == weight.amin(-1, keepdim=True))
        return position.masked_fill(~lightest, -1).argmax(-1)


def drop(
    buffers: Sequence[Buffer], victim: Lightest | torch.Tensor, lengths: Sequence[int], rows: Sequence[bool]
) -> None:
    """In the flagged rows of all buffers, overwrite the victim, or entry slots (n, heads), with the last of lengths[r] entries.

    The caller then forgets the last one. On the CPU one kernel serves all buffers.
    """
    last = [length - 1 if flag else -1 for length, flag in zip(lengths, rows, strict=True)]
    all_data = [buffer.data for buffer in buffers]
    native = kernels.native(*all_data) and all(buffer.entry_bytes % 4 == 0 for buffer in buffers)
    if native and isinstance(victim, Lightest) and victim.weights.dtype == torch.float32:
        kernels.entries.drop_lightest(all_data, *victim, last)
    else:
        slots = victim.slots(lengths) if isinstance(victim, Lightest) else victim
        if native:
            kernels.entries.replace(all_data, slots, last)
        else:
            _replace(all_data, slots, last)
    for buffer in buffers:
        buffer.filled = max(length - flag for length, flag in zip(lengths, rows, strict=True))


def _replace(all_data: Sequence[torch.Tensor], slots: torch.Tensor, last: Sequence[int]) -> None:
    """The same as kernels.entries.replace in plain torch."""
    for data in all_data:
        head = torch.arange(data.shape[1], device=data.device)
        for row, end in enumerate(last):
            if end >= 0:
                data[row, head, slots[row]] = data[row, :, end].clone()
