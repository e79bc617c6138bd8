"""K and V kept whole on the model's device."""

from collections.abc import Sequence
from typing import Any

import torch

from pqcache import kernels
from pqcache.store.base import RetrievalStore
from pqcache.store.buffer import Buffer, take_tokens, write_each


class ResidentStore(RetrievalStore):
    """Growing K and V buffers (n, h_kv, capacity, d); row r holds `lengths[r]` tokens, its first token at index 0.

    Left padding is dropped on the way in, so an index is a token's position in its own row, whatever its neighbours.
    """

    whole = True
    per_row = ("k", "v", "lengths")
    k: Buffer  # made by the first `append`
    v: Buffer

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.expected = 0

    def load(self, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], known: object = None) -> None:
        """Take over a whole prompt: k, v (n, h_kv, >= max(lengths), d), row r's tokens at 0 .. lengths[r]-1."""
        self.append(k, v)
        self.lengths = list(lengths)

    def expect(self, tokens: int) -> None:
        self.expected = tokens

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per row. Before the first token there is no buffer, and this does nothing."""
        for buffer in (self.k, self.v) if self.lengths else ():
            buffer.reserve(tokens)

    def append(self, k: torch.Tensor, v: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """Add tokens: row r takes the last counts[r] (default all t) of k, v (n, h_kv, t, d)."""
        n, _, t, _ = k.shape
        if not self.lengths:
            self.k, self.v, self.lengths = Buffer.like(k), Buffer.like(v), [0] * n
            self.k.expected = self.v.expected = self.expected
        counts = [t] * n if counts is None else list(counts)
        write_each((self.k, self.v), (k, v), self.lengths, counts)
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all tokens, no copy: (n, h_kv, length, d). Shorter rows end in padding: mask it."""
        return self.k.view(self.length), self.v.view(self.length)

    def tile(self, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """No copy."""
        return self.k.data[:, :, lo:hi], self.v.data[:, :, lo:hi]

    def take(self, indices: torch.Tensor, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        return take_tokens(self.k.data, indices, group), take_tokens(self.v.data, indices, group)

    def attend_in_place(
        self, q: torch.Tensor, sinks: int, indices: torch.Tensor, local: int, scaling: float, log_weight: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """By a kernel on the CPU: rows of one length."""
        k, v = self.k.data, self.v.data
        if len(set(self.lengths)) > 1 or not kernels.native(q, k, v, indices, scaling=scaling):
            return None
        return kernels.attend.attend_chosen(q, k, v, indices, sinks, local, self.lengths[0], scaling, log_weight)

    def keys_at(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """K of positions `indices` (n, H, m): (n, h_kv or h, m, d), undefined for -1."""
        return take_tokens(self.k.data, indices, group)

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        """Keep only `indices` (n, h_kv, m): row r keeps its first counts[r] entries, the rest is padding.

        The old buffers are released, not sliced: a slice would keep every dropped token alive.
        """
        for buffer in (self.k, self.v):
            kept = take_tokens(buffer.data, indices)
            fresh = Buffer.like(kept)
            fresh.write(kept, [0] * len(counts), [kept.shape[2]] * len(counts))
            buffer.data, buffer.filled, buffer.expected = fresh.data, fresh.filled, 0
        self.lengths = list(counts)

    @property
    def buffers(self) -> list[Buffer]:
        """K and V."""
        return [self.k, self.v]

    def note_drop(self, rows: Sequence[bool]) -> None:
        """In the flagged rows one entry per head was dropped from `buffers`; see store/drop.py."""
        self.lengths = [length - flag for length, flag in zip(self.lengths, rows, strict=True)]

    def truncate(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens of every row."""
        self.lengths = [length - tokens for length in self.lengths]
