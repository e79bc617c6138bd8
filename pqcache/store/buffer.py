"""A growing tensor along the token axis, and the row bookkeeping that every cache tensor needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

STEP = 256  # tokens per growth step: one copy per 256 generated tokens instead of one per token


def round_up(tokens: int, step: int = STEP) -> int:
    return -(-tokens // step) * step


class Buffer:
    """`data`: (n, heads, capacity, *rest), filled per row from position 0; capacity is a multiple of `step`, 256 tokens.

    Rows may hold different numbers of entries; their owner knows how many. An entry may be more than a token (a block): its
    owner then gives a smaller step.
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
    ) -> None:
        self.step = step
        self.pinned = pinned and device.type == "cpu" and torch.cuda.is_available()
        self.data = self._allocate(n, heads, 0, tuple(rest), dtype, device)
        self.filled = (
            0  # entries that the fullest row holds, or that room was asked for; the rest of `capacity` is slack
        )

    def _allocate(
        self, n: int, heads: int, capacity: int, rest: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # zeros, not empty: what a shorter row masks out is still multiplied by weight 0, and 0 * NaN is NaN
        return torch.zeros((n, heads, capacity, *rest), dtype=dtype, device=device, pin_memory=self.pinned)

    @classmethod
    def like(
        cls, x: torch.Tensor, *, device: torch.device | None = None, pinned: bool = False, step: int = STEP
    ) -> Buffer:
        """An empty buffer for rows, heads and entries shaped like x: (n, heads, t, *rest)."""
        return cls(x.shape[0], x.shape[1], x.shape[3:], x.dtype, device or x.device, pinned=pinned, step=step)

    @property
    def capacity(self) -> int:
        return self.data.shape[2]

    @property
    def slack(self) -> int:
        """Bytes reserved for entries that have not come yet."""
        n, heads, capacity, *rest = self.data.shape
        return n * heads * max(0, capacity - self.filled) * math.prod(rest) * self.data.element_size()

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` entries per row, which count as content from now on: who asks may write `data` directly."""
        self.filled = max(self.filled, tokens)
        if tokens <= self.capacity:
            return
        old = self.data
        n, heads, filled, *rest = old.shape
        self.data = self._allocate(n, heads, round_up(tokens, self.step), tuple(rest), old.dtype, old.device)
        self.data[:, :, :filled] = old

    def write(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Row r takes the last counts[r] entries of x (n, heads, t, *rest) at positions starts[r], starts[r]+1, ..."""
        end = max(a + b for a, b in zip(starts, counts, strict=True))
        self.reserve(end)
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

    def drop(self, slots: torch.Tensor, lengths: Sequence[int], rows: Sequence[bool]) -> None:
        """Overwrite entry slots (n, heads) of the flagged rows with the row's last entry, which the caller then forgets."""
        for row, (length, flag) in enumerate(zip(lengths, rows, strict=True)):
            if flag:
                head = torch.arange(self.data.shape[1], device=self.data.device)
                self.data[row, head, slots[row]] = self.data[row, :, length - 1].clone()
        self.filled = max(length - flag for length, flag in zip(lengths, rows, strict=True))

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was."""
        index = index.to(self.data.device)
        n, heads, capacity, *rest = self.data.shape
        moved = self._allocate(len(index), heads, capacity, tuple(rest), self.data.dtype, self.data.device)
        self.data = torch.index_select(self.data, 0, index, out=moved)


def take_tokens(x: torch.Tensor, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
    """Rows of x (n, h_kv, capacity, *rest) at `indices` (n, H, k), -1 read as 0: (n, max(H, h_kv), k, *rest).

    H = 1 means one choice for all heads, H = h_kv one per KV head, H = h_kv * group one per query head (then K of a group
    is read once per query head). One flat index_select: row copies at memory speed, where gather is element by element.
    """
    n, h_kv, capacity = x.shape[:3]
    heads = indices.shape[1]
    if heads == 1 and h_kv > 1:
        indices = indices.expand(n, h_kv, -1)
    elif heads not in (h_kv, h_kv * group):
        raise ValueError(f"indices have {heads} heads; allowed is 1, {h_kv} or {h_kv * group}")
    out_heads = indices.shape[1]
    per_head = out_heads // h_kv
    head = torch.arange(out_heads, device=x.device) // per_head
    row = torch.arange(n, device=x.device)
    base = (row[:, None] * h_kv + head[None]) * capacity  # (n, out_heads)
    flat = (indices.clamp_min(0) + base[..., None]).reshape(-1)
    if not x.is_contiguous():
        raise ValueError("take_tokens needs a whole buffer, not a slice: a slice would be copied first")
    return x.view(n * h_kv * capacity, *x.shape[3:]).index_select(0, flat).view(n, out_heads, -1, *x.shape[3:])
