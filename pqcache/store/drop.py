"""Drop one entry per head from several buffers: the last entry takes its place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

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
        # a number needs no table
        first, ends, counts = (
            x[0] if len(set(x)) == 1 else table(x, device)[:, None, None] for x in (self.first, self.ends, lengths)
        )
        candidate = (position >= first) & (position < ends)
        if isinstance(counts, torch.Tensor):
            candidate &= torch.arange(length, device=device) < counts
        weight = torch.where(candidate, weight, torch.inf)
        lightest = candidate & (weight == weight.amin(-1, keepdim=True))
        return torch.where(lightest, position, -1).argmax(-1)


def drop(
    buffers: Sequence[Buffer], victim: Lightest | torch.Tensor, lengths: Sequence[int], rows: Sequence[bool]
) -> None:
    """In the flagged rows of all buffers, overwrite the victim, or entry slots (n, heads), with the last of lengths[r] entries.

    The caller then forgets the last one.
    """
    slots = victim.slots(lengths) if isinstance(victim, Lightest) else victim
    for buffer in buffers:
        head = torch.arange(buffer.data.shape[1], device=buffer.data.device)
        for row, (length, flag) in enumerate(zip(lengths, rows, strict=True)):
            if flag:
                buffer.data[row, head, slots[row]] = buffer.data[row, :, length - 1].clone()
        buffer.filled = max(length - flag for length, flag in zip(lengths, rows, strict=True))
