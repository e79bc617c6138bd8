"""The newest tokens of all rows of a batch, in columns that the rows share."""

from collections.abc import Sequence

import torch

from pqcache.store.buffer import STEP, Buffer, round_up, write_each
from pqcache.store.row_state import RowState

_SLACK = STEP // 2  # tokens appended before columns move to the front of their buffer again


class Columns(RowState):
    """The newest columns of several tensors (n, heads, columns, *rest), which slide together.

    Columns count what a left-padded batch has seen, so all rows share them: row r's position p is column p + its padding.
    """

    per_row = ("buffers",)

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.buffers = [Buffer.like(x) for x in like]
        self.base = self.end = 0  # columns base .. end-1 are held

    def append(self, tensors: Sequence[torch.Tensor], counts: Sequence[int], oldest: int) -> None:
        """Add t columns, of row r the last counts[r]. Columns before `oldest` may be let go to make room."""
        t = tensors[0].shape[2]
        if self.end - self.base + t > self.buffers[0].capacity and oldest - self.base >= t:
            for buffer in self.buffers:
                buffer.data[:, :, : self.end - oldest] = buffer.data[
                    :, :, oldest - self.base : self.end - self.base
                ].clone()
            self.base = oldest
        at = self.end - self.base
        write_each(self.buffers, tensors, [at + t - count for count in counts], counts)
        self.end += t

    def view(self, i: int, lo: int, hi: int, rows: slice = slice(None)) -> torch.Tensor:
        """Columns lo .. hi-1 of tensor i, no copy."""
        return self.buffers[i].data[rows, :, lo - self.base : hi - self.base]

    def compact(self, oldest: int) -> None:
        """Let go of the columns before `oldest`, and of the memory they took."""
        capacity = round_up(self.end - oldest + _SLACK)
        if capacity >= self.buffers[0].capacity:
            return
        for i, buffer in enumerate(self.buffers):
            fresh = Buffer.like(buffer.data)
            fresh.reserve(capacity)
            fresh.data[:, :, : self.end - oldest] = self.view(i, oldest, self.end)
            buffer.data = fresh.data
        self.base = oldest
