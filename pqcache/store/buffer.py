"""A growing tensor along the token axis, and the row bookkeeping that every cache tensor needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pqcache.store import pages

STEP = 256  # tokens per growth step: one copy per 256 generated tokens instead of one per token
GROWTH = 16  # a full buffer grows by 1/16 where that is more: it is copied as a whole


def round_up(tokens: int, step: int = STEP) -> int:
    return -(-tokens // step) * step


class Buffer:
    """`data`: (n, heads, capacity, *rest), filled per row from position 0; capacity is a multiple of `step`, 256 tokens.

    Rows may hold different numbers of entries; the buffer's owner knows how many. An entry may be more than a token (a block);
    its owner then sets a smaller step. token_major: an entry's heads are side by side in memory, so that one copy moves a token
    or a run of tokens. `rows` (n, capacity, heads, *rest) has that order; `data` is the same memory, transposed.
    """

    def __init__(
        self,
        n: int,
        heads: int,
        rest: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pinned: bool = False,
        step: int = STEP,
        token_major: bool = False,
    ) -> None:
        self.step = step
        self.token_major = token_major
        self.pinned = pinned and device.type == "cpu" and torch.cuda.is_available()
        self.data = self._allocate(n, heads, 0, tuple(rest), dtype, device)
        # entries that the fullest row holds, or that were reserved; the rest of `capacity` is slack
        self.filled = 0
        self.expected = 0  # entries per row for which the next growth makes room; 0 = unknown

    def _allocate(
        self, n: int, heads: int, capacity: int, rest: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # zeros, not empty: a masked entry is still multiplied by weight 0, and 0 * NaN is NaN
        sizes = (n, capacity, heads, *rest) if self.token_major else (n, heads, capacity, *rest)
        if self.pinned or device.type != "cpu":
            data = torch.zeros(sizes, dtype=dtype, device=device, pin_memory=self.pinned)
        else:
            data = torch.empty(sizes, dtype=dtype, device=device)
            if capacity:
                pages.advise(data)
            data.zero_()
        return data.transpose(1, 2) if self.token_major else data

    @classmethod
    def like(
        cls,
        x: torch.Tensor,
        *,
        device: torch.device | None = None,
        pinned: bool = False,
        step: int = STEP,
        token_major: bool = False,
    ) -> Buffer:
        """An empty buffer for rows, heads and entries shaped like x: (n, heads, t, *rest)."""
        n, heads, _, *rest = x.shape
        where = device or x.device
        return cls(n, heads, rest, x.dtype, where, pinned=pinned, step=step, token_major=token_major)

    @property
    def rows(self) -> torch.Tensor:
        """A token-major buffer in the order of its memory: (n, capacity, heads, *rest), contiguous."""
        assert self.token_major
        return self.data.transpose(1, 2)

    @property
    def capacity(self) -> int:
        return self.data.shape[2]

    @property
    def slack(self) -> int:
        """Bytes of capacity that no entry uses yet."""
        n, heads, capacity, *rest = self.data.shape
        return n * heads * max(0, capacity - self.filled) * math.prod(rest) * self.data.element_size()

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` entries per row. They count as content from now on: the caller may write `data` directly."""
        self.filled = max(self.filled, tokens)
        old = self.data
        n, heads, filled, *rest = old.shape
        if tokens <= filled:
            return
        room = round_up(max(tokens, self.expected, filled + filled // GROWTH), self.step)
        self.data = self._allocate(n, heads, room, tuple(rest), old.dtype, old.device)
        self.data[:, :, :filled] = old

    def write(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Row r takes the last counts[r] entries of x (n, heads, t, *rest) at positions starts[r], starts[r]+1, ..."""
        end = max(a + b for a, b in zip(starts, counts, strict=True))
        if end > self.data.shape[2]:
            self.reserve(end)
        self.filled = max(self.filled, end)
        t = x.shape[2]
        x = x.detach()  # a cache never keeps a graph alive
        if len(set(starts)) == 1 and set(counts) == {t}:
            self.data[:, :, starts[0] : starts[0] + t] = x
            return
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.data[row, :, start : start + count] = x[row, :, t - count :]

    def view(self, tokens: int) -> torch.Tensor:
        """The first `tokens` entries, no copy: (n, heads, tokens, *rest)."""
        return self.data[:, :, :tokens]

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was."""
        index = index.to(self.data.device)
        n, heads, capacity, *rest = self.data.shape
        moved = self._allocate(len(index), heads, capacity, tuple(rest), self.data.dtype, self.data.device)
        if self.token_major:
            torch.index_select(self.rows, 0, index, out=moved.transpose(1, 2))
        else:
            torch.index_select(self.data, 0, index, out=moved)
        self.data = moved


def write_each(
    buffers: Sequence[Buffer], parts: Sequence[torch.Tensor], starts: Sequence[int], counts: Sequence[int]
) -> None:
    """Each buffer takes the part of its own; see Buffer.write."""
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.write(part, starts, counts)


def take_tokens(x: torch.Tensor, indices: torch.Tensor, group: int = 1, *, pinned: bool = False) -> torch.Tensor:
    """Entries of x (n, h_kv, capacity, *rest) at `indices` (n, H, k), -1 read as 0: (n, max(H, h_kv), k, *rest).

    H = 1 is one choice for all heads, H = h_kv one per KV head, H = h_kv * group one per query head (a KV head is then read once
    per query head). x is the data of a whole buffer, token-major or not. One flat index_select copies rows at memory speed;
    gather would copy number by number. pinned: the result is in pinned memory, so that a copy to the device need not wait.
    """
    n, h_kv, capacity = x.shape[:3]
    heads = indices.shape[1]
    if heads == 1 and h_kv > 1:
        indices = indices.expand(n, h_kv, -1)
    elif heads not in (h_kv, h_kv * group):
        raise ValueError(f"indices have {heads} heads; allowed is 1, {h_kv} or {h_kv * group}")
    token_major = not x.is_contiguous()
    if token_major and not x.transpose(1, 2).is_contiguous():
        raise ValueError("take_tokens needs a whole buffer, not a slice: a slice would be copied first")
    out_heads = indices.shape[1]
    flat = flat_index(indices.clamp_min(0), h_kv, capacity, token_major).reshape(-1)
    rows = (x.transpose(1, 2) if token_major else x).view(n * h_kv * capacity, *x.shape[3:])
    size = (n, out_heads, indices.shape[2], *x.shape[3:])
    if not pinned:
        return rows.index_select(0, flat).view(size)
    out = torch.empty(size, dtype=x.dtype, pin_memory=True)
    torch.index_select(rows, 0, flat, out=out.view(-1, *x.shape[3:]))
    return out


def dense(x: torch.Tensor) -> torch.Tensor:
    """x (n, h_kv, t, *rest) as `take_tokens` needs it: itself if its memory is dense, tokens or heads first, else a copy."""
    return x if x.transpose(1, 2).is_contiguous() else x.contiguous()


def flat_index(indices: torch.Tensor, h_kv: int, capacity: int, token_major: bool) -> torch.Tensor:
    """Places of entries `indices` (n, H, k) of each head among a buffer's n * h_kv * capacity entries in memory: (n, H, k)."""
    n, heads, _ = indices.shape
    head = (torch.arange(heads, device=indices.device) // (heads // h_kv))[:, None]
    row = torch.arange(n, device=indices.device)[:, None, None]
    if token_major:
        return (row * capacity + indices) * h_kv + head
    return (row * h_kv + head) * capacity + indices
