"""K and V kept whole on the model's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pqcache import kernels
from pqcache.store.buffer import Buffer, take_tokens


class ResidentStore:
    """Growing K and V buffers (n, h_kv, capacity, d); row r holds `lengths[r]` tokens, its first token at index 0.

    Left padding is dropped on the way in, so an index is a token's position in its own row, whatever its neighbours.
    """

    whole = True  # `view` costs nothing

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.k: Buffer | None = None
        self.v: Buffer | None = None

    @property
    def length(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)

    def load(self, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], known: object = None) -> None:
        """Take over a whole prompt: k, v (n, h_kv, >= max(lengths), d), row r's tokens at 0 .. lengths[r]-1."""
        self.append(k, v)
        self.lengths = list(lengths)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per row at once."""
        for buffer in (self.k, self.v):
            if buffer is not None:
                buffer.reserve(tokens)

    def append(self, k: torch.Tensor, v: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """Add tokens: row r takes the last counts[r] (default all t) of k, v (n, h_kv, t, d)."""
        n, _, t, _ = k.shape
        if self.k is None or self.v is None:
            self.k, self.v, self.lengths = Buffer.like(k), Buffer.like(v), [0] * n
        counts = [t] * n if counts is None else list(counts)
        self.k.write(k, self.lengths, counts)
        self.v.write(v, self.lengths, counts)
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all tokens, no copy: (n, h_kv, length, d). Shorter rows end in entries of no meaning: mask them."""
        assert self.k is not None and self.v is not None
        return self.k.view(self.length), self.v.view(self.length)

    def read(
        self, sinks: int, indices: torch.Tensor | None, recent: int, group: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V of [first `sinks` | `indices` (n, H, k) | last `recent`] tokens, joined: (n, h_kv or h, m, d).

        The recent part is right-aligned: its last entry is each row's newest token.
        """
        assert self.k is not None and self.v is not None
        if len(set(self.lengths)) == 1 and (indices is None or indices.shape[1] <= self.k.data.shape[1]):
            length = self.lengths[0]
            parts = []
            for data in (self.k.data, self.v.data):
                chosen = [] if indices is None else [take_tokens(data, indices)]
                parts.append(torch.cat([data[:, :, :sinks], *chosen, data[:, :, length - recent : length]], dim=2))
            return parts[0], parts[1]
        device = self.k.data.device
        ends = torch.tensor(self.lengths, device=device)
        n = len(self.lengths)
        heads = 1 if indices is None else indices.shape[1]
        pieces = [torch.arange(sinks, device=device).expand(n, heads, -1)]
        if indices is not None:
            pieces.append(indices)
        pieces.append((ends[:, None] - recent + torch.arange(recent, device=device))[:, None].expand(n, heads, -1))
        every = torch.cat(pieces, dim=2)
        return take_tokens(self.k.data, every, group), take_tokens(self.v.data, every, group)

    def native(self, q: torch.Tensor, indices: torch.Tensor) -> bool:
        """Whether `attend` serves: fp32 on the CPU, rows of one length, one choice for all heads or one per KV head."""
        if self.k is None or self.v is None or len(set(self.lengths)) > 1:
            return False
        data = self.k.data
        same = q.dtype == data.dtype == torch.float32 and indices.shape[1] in (1, data.shape[1])
        return same and kernels.native(q, data, self.v.data, indices)

    def attend(self, q: torch.Tensor, sinks: int, indices: torch.Tensor, recent: int, scaling: float) -> torch.Tensor:
        """Attention of q (n, h, 1, d) to what `read` would return, without copying it first: (n, 1, h, d). See `native`."""
        from pqcache.kernels.attend import attend_chosen

        assert self.k is not None and self.v is not None
        return attend_chosen(q, self.k.data, self.v.data, indices, sinks, recent, self.length, scaling)

    def keys(self, lo: int, hi: int) -> torch.Tensor:
        """K of positions lo .. hi-1, no copy: (n, h_kv, hi - lo, d)."""
        assert self.k is not None
        return self.k.data[:, :, lo:hi]

    def keys_at(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """K of positions `indices` (n, H, m), -1 read as anything: (n, h_kv or h, m, d)."""
        assert self.k is not None
        return take_tokens(self.k.data, indices, group)

    def prefetch(self, indices: torch.Tensor, group: int = 1) -> None:
        """Nothing to do: everything is where `read` wants it."""

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        """Drop everything but `indices` (n, h_kv, m): row r keeps its first counts[r] entries, the rest is padding.

        The old buffers are released, not sliced: a slice would keep every dropped token alive.
        """
        assert self.k is not None and self.v is not None
        for buffer in (self.k, self.v):
            kept = take_tokens(buffer.data, indices)
            fresh = Buffer.like(kept)
            fresh.write(kept, [0] * len(counts), [kept.shape[2]] * len(counts))
            buffer.data, buffer.filled = fresh.data, fresh.filled
        self.lengths = list(counts)

    def drop(self, slots: torch.Tensor, rows: Sequence[bool]) -> None:
        """Give up one entry per head, slots (n, h_kv), in the flagged rows: the newest entry takes its place."""
        assert self.k is not None and self.v is not None
        for buffer in (self.k, self.v):
            buffer.drop(slots, self.lengths, rows)
        self.lengths = [length - flag for length, flag in zip(self.lengths, rows, strict=True)]

    def truncate(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens of every row."""
        self.lengths = [length - tokens for length in self.lengths]

    def map_rows(self, index: torch.Tensor) -> None:
        if self.k is None or self.v is None:
            return
        self.k.map_rows(index)
        self.v.map_rows(index)
        self.lengths = [self.lengths[i] for i in index.tolist()]

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tier -> the tensors that live there."""
        return {"device": [b.data for b in (self.k, self.v) if b is not None]}
