"""Which tokens are salient: one bit per token and KV head, and where a token's codes are."""

from collections.abc import Sequence

import torch

from pqcache.store.buffer import take_tokens
from pqcache.store.quantizer import pack_codes, popcount, unpack_codes
from pqcache.store.row_state import RowState
from pqcache.store.transfer import table

BLOCK = 64  # tokens per count of salient tokens before them


def grow(x: torch.Tensor, size: int) -> torch.Tensor:
    """x (n, heads, entries, *rest) with at least `size` entries, new ones zero."""
    n, heads, entries, *rest = x.shape
    return x if entries >= size else torch.cat([x, x.new_zeros(n, heads, size - entries, *rest)], 2)


class Widths(RowState):
    """Which tokens are salient, per KV head: one bit each, and per 64 tokens a count, which together give a token's slot.

    A token's slot is its rank among the tokens of its width. K and V have the same widths and share this object; K's codec
    keeps it up to date.
    """

    per_row = ("marks", "before")

    def __init__(self) -> None:
        self.coming: list[torch.Tensor] = []  # per row of the next append: which tokens are salient (h_kv, count) bool
        self.salient: list[int] = []  # salient tokens per head in each of them
        self.clear()

    def clear(self) -> None:
        self.marks: torch.Tensor = None  # type: ignore[assignment]  # (n, h_kv, blocks, 8) uint8
        self.before: torch.Tensor = None  # type: ignore[assignment]  # (n, h_kv, blocks, 1) int32, salient tokens in earlier blocks

    def announce(self, coming: list[torch.Tensor], salient: list[int]) -> None:
        """Set which tokens of the next append are salient: per row coming (h_kv, count) bool, and how many per head."""
        self.coming, self.salient = coming, salient

    def write(self, bits: torch.Tensor) -> None:
        """bits (n, h_kv, tokens) bool of all tokens."""
        bits = grow(bits, -(-bits.shape[2] // BLOCK) * BLOCK)
        self.marks = pack_codes(bits.to(torch.uint8).unflatten(2, (-1, BLOCK)), 1)
        count = popcount(self.marks).sum(-1, dtype=torch.int32)
        self.before = (count.cumsum(-1, dtype=torch.int32) - count)[..., None]

    def bits(self) -> torch.Tensor:
        """(n, h_kv, tokens) bool, False past a row's end."""
        return unpack_codes(self.marks, 1, BLOCK).flatten(2).bool()

    def append(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Row r's announced tokens take positions starts[r] onwards."""
        if self.marks is None:
            bits = torch.zeros(
                (len(counts), self.coming[0].shape[0], 0), dtype=torch.bool, device=self.coming[0].device
            )
        else:
            bits = self.bits()
        bits = grow(bits, max(a + b for a, b in zip(starts, counts, strict=True)))
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            bits[row, :, start : start + count] = self.coming[row]
        self.write(bits)

    def rank(self, indices: torch.Tensor, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens `indices` (n, H, k): whether salient, and the slot; both (n, max(H, h_kv), k)."""
        h_kv, blocks = self.marks.shape[1:3]
        index = indices.clamp(0, blocks * BLOCK - 1)
        if index.shape[1] == 1:
            index = index.expand(-1, h_kv, -1)
        marks = take_tokens(self.marks, index // BLOCK, group)  # (n, H, k, 8)
        before = take_tokens(self.before, index // BLOCK, group)[..., 0]
        within = index % BLOCK
        byte = torch.arange(8, device=index.device)
        # the bits of each byte that stand before the token: all, some, none
        earlier = (within[..., None] - 8 * byte).clamp(0, 8)
        mask = ((1 << earlier) - 1).to(torch.uint8)
        salient = before + popcount(marks & mask).sum(-1, dtype=torch.int32)
        own = marks.gather(-1, within[..., None] // 8)[..., 0] >> (within % 8).to(torch.uint8) & 1
        return own.bool(), torch.where(own.bool(), salient, index - salient)

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        """Row r's tokens are now its old indices[r, :, :counts[r]]."""
        bits, _ = self.rank(indices)
        column = torch.arange(indices.shape[2], device=indices.device)
        self.write(bits & (column < table(counts, indices.device)[:, None, None]))
