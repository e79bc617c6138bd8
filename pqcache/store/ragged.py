"""Rows of different lengths, one after the other in one tensor: what KV heads hold that keep different numbers of tokens.

Letters: n rows, each with one head; d head dimension.
"""

from collections.abc import Sequence

import torch

from pqcache.store.base import Store
from pqcache.store.buffer import Buffer
from pqcache.store.resident import ResidentStore
from pqcache.store.transfer import table


class Ragged(Buffer):
    """`data` (1, 1, entries, *rest): the entries of all rows, without room between rows or at the end."""

    def __init__(self, x: torch.Tensor, counts: Sequence[int], slots: torch.Tensor | None = None) -> None:
        """Row r takes its first counts[r] entries of x (n, 1, t, *rest), or those at slots (n, 1, m)."""
        self.step, self.token_major, self.pinned, self.expected = 1, False, False, 0
        self.counts = list(counts)
        lengths, device = table(self.counts, x.device), x.device
        row = torch.arange(len(self.counts), device=device).repeat_interleave(lengths)
        entry = torch.arange(len(row), device=device) - (lengths.cumsum(0) - lengths)[row]
        if slots is not None:
            entry = slots[row, 0, entry]
        self.data = x.detach()[row, 0, entry][None, None]
        self.filled = len(row)

    @property
    def capacity(self) -> int:
        """Entries of the longest row."""
        return max(self.counts, default=0)

    @property
    def slack(self) -> int:
        return 0

    @property
    def starts(self) -> list[int]:
        """The first entry of each row."""
        return [sum(self.counts[:row]) for row in range(len(self.counts))]

    def view(self, tokens: int) -> torch.Tensor:
        """A copy of the first `tokens` entries of every row: (n, 1, tokens, *rest), undefined past a row's end."""
        places = table(self.starts, self.data.device)[:, None] + torch.arange(tokens, device=self.data.device)
        return self.data[0, 0, places.clamp_max(max(0, self.filled - 1))][:, None]

    def map_rows(self, index: torch.Tensor) -> None:
        starts, rows = self.starts, index.tolist()
        places = torch.cat([torch.arange(starts[row], starts[row] + self.counts[row]) for row in rows])
        self.counts = [self.counts[row] for row in rows]
        self.data, self.filled = self.data[:, :, places.to(self.data.device)], len(places)


class RaggedStore(Store):
    """K and V of rows that an evictor has cut to different lengths, and of the tokens since, of which all rows have as many."""

    per_row = ("k", "v", "newer")

    def __init__(self) -> None:
        self.k: Ragged = None  # type: ignore[assignment]
        self.v: Ragged = None  # type: ignore[assignment]
        self.newer = ResidentStore()

    def take(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, counts: Sequence[int]) -> None:
        """Hold the first counts[r] of entries slots (n, 1, m) of k, v (n, 1, t, d), and nothing else."""
        self.k, self.v, self.newer = Ragged(k, counts, slots), Ragged(v, counts, slots), ResidentStore()

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.newer.append(k, v)

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        """Tokens held, per row."""
        return [] if self.k is None else [count + self.newer.length for count in self.k.counts]

    def whole_rows(self) -> ResidentStore:
        """A copy of everything, for as long as a turn is read: rows padded to the longest."""
        copy, longest = ResidentStore(), self.k.capacity
        copy.load(self.k.view(longest), self.v.view(longest), self.k.counts)
        if self.newer.length:
            copy.append(*self.newer.view(), [self.newer.length] * len(self.k.counts))
        return copy

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.whole_rows().view()
