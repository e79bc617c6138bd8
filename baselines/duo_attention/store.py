"""K and V of retrieval heads, which grow, and of streaming heads, whose newest tokens turn in place."""

import torch

from pqcache.selective.attention import attend_rows
from pqcache.store.base import Store
from pqcache.store.buffer import take_tokens, write_each
from pqcache.store.resident import ResidentStore

Window = tuple[int, int]  # sinks and newest tokens of a streaming head


class DuoStore(Store):
    """K and V of rows of one KV head. Those with a window hold no more than it; the others grow."""

    counted = ("parts",)

    def __init__(self, windows: list[Window | None]) -> None:
        self.windows, self.parts = windows, (ResidentStore(), ResidentStore())  # of retrieval and of streaming heads
        self.oldest = [0] * len(windows)  # of the newest tokens of a full window

    @property
    def rows(self) -> tuple[list[int], list[int]]:
        """Of both parts."""
        every = range(len(self.windows))
        return [i for i in every if self.windows[i] is None], [i for i in every if self.windows[i] is not None]

    def take(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, counts: list[int]) -> None:
        for rows, part in zip(self.rows, self.parts, strict=True):
            if rows:
                own = [counts[i] for i in rows]
                kept = slots[rows, :, : max(own)]
                part.load(take_tokens(k[rows], kept), take_tokens(v[rows], kept), own)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        (grow, turn), (whole, near) = self.rows, self.parts
        if grow:
            whole.append(k[grow], v[grow])
        if turn:
            places = []
            for row, length in zip(turn, near.lengths, strict=True):
                sinks, newest = self.windows[row]  # type: ignore[misc]
                places.append(length if length < sinks + newest else sinks + self.oldest[row])
                self.oldest[row] = (self.oldest[row] + (length == sinks + newest)) % max(1, newest)
            write_each(near.buffers, (k[turn], v[turn]), places, [1] * len(turn))
            near.lengths = [max(length, at + 1) for length, at in zip(near.lengths, places, strict=True)]

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        held = [0] * len(self.windows)
        for rows, part in zip(self.rows, self.parts, strict=True):
            for row, length in zip(rows, part.lengths, strict=bool(part.lengths)):
                held[row] = length
        return held

    def attend(self, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of one token per row, q (n, g, 1, d) -> (n, 1, g, d)."""
        out = None
        for rows, part in zip(self.rows, self.parts, strict=True):
            if rows:
                some = attend_rows(q[rows], *part.view(), part.lengths, scaling)
                out = some.new_empty((len(q), *some.shape[1:])) if out is None else out
                out[rows] = some
        assert out is not None
        return out

    def whole_rows(self) -> ResidentStore:
        """A copy of everything, each row in the order of its tokens, padded to the longest."""
        lengths, made = self.lengths, ResidentStore()
        both = []
        for x in zip(*(part.view() for part in self.parts if part.lengths), strict=True):
            whole = x[0].new_zeros((len(lengths), 1, max(lengths), x[0].shape[3]))
            for rows, held in zip([rows for rows in self.rows if rows], x, strict=True):
                for row, entries in zip(rows, held[:, 0, : max(lengths)], strict=True):
                    sinks = (self.windows[row] or (0, 0))[0]
                    turned = entries[sinks : lengths[row]].roll(-self.oldest[row], 0)
                    whole[row, 0, : lengths[row]] = torch.cat([entries[:sinks], turned])[: lengths[row]]
            both.append(whole)
        made.load(both[0], both[1], lengths)
        return made

    def map_rows(self, index: torch.Tensor) -> None:
        order = index.tolist()
        for rows, part in zip(self.rows, self.parts, strict=True):
            if rows:
                part.map_rows(torch.tensor([rows.index(i) for i in order if i in rows], dtype=torch.long))
        self.windows, self.oldest = [self.windows[i] for i in order], [self.oldest[i] for i in order]
