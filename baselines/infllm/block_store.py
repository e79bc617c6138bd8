"""K and V in blocks of consecutive tokens, on the device or on the host with a block cache."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from pqcache.store.buffer import STEP, Buffer
from pqcache.store.row_state import RowState
from pqcache.store.transfer import table

HOST = torch.device("cpu")


def block_step(block: int) -> int:
    """By how many blocks buffers grow: about 256 tokens."""
    return max(1, STEP // block)


class BlockStore(RowState):
    """Blocks on the model's device, all of them: (n, 1, capacity, 2, h_kv, block, d), K and V of a block side by side.

    Row r holds `counts[r]` blocks. A unit is what chooses blocks: the whole layer, or each query head.
    """

    per_row: ClassVar[tuple[str, ...]] = ("blocks", "counts")

    def __init__(self, n: int, like: torch.Tensor, block: int, device: torch.device | None = None) -> None:
        """like (n, h_kv, t, d): heads, dimension, dtype and device of the tokens to come."""
        self.block, self.heads, self.device = block, like.shape[1], like.device
        rest = (2, like.shape[1], block, like.shape[3])
        self.blocks = Buffer(n, 1, rest, like.dtype, device or like.device, pinned=True, step=block_step(block))
        self.counts = [0] * n

    def put(self, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append whole blocks to one row: k, v (h_kv, blocks * block, d)."""
        first, count = self.counts[row], k.shape[1] // self.block
        self.blocks.reserve(first + count)
        for i, x in enumerate((k, v)):
            new = x.detach().unflatten(1, (count, self.block)).transpose(0, 1)
            self.blocks.data[row, 0, first : first + count, i] = new.to(self.blocks.data.device)
        self.counts[row] += count

    def take(self, ids: torch.Tensor, rows: Sequence[int], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V of blocks `ids` (n', 1 or h, k) of rows `rows`: (n', h_kv or h, k * block, d); any values for padding (-1).

        heads: h, the number of query heads.
        """
        first = table(rows, ids.device)[:, None, None] * self.blocks.capacity
        return self._gather(self.blocks.data, first + ids.clamp_min(0), heads)

    def _gather(self, data: torch.Tensor, at: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks number `at` (n', units, k) of data (..., 2, H, block, d), K and V in one index_select of rows block * d."""
        n, units, k = at.shape
        width, block, d = data.shape[-3:]
        out = self.heads if units == 1 else heads
        head = torch.arange(out, device=at.device) * width // out
        side = torch.arange(2, device=at.device)[:, None, None, None]
        flat = (at * 2 + side) * width + head[:, None]  # (2, n', out, k)
        both = data.view(-1, block * d).index_select(0, flat.reshape(-1)).view(2, n, out, k * block, d)
        return both[0], both[1]

    def whole(self, row: int) -> torch.Tensor:
        """All blocks of one row on the device: (2, h_kv, tokens, d)."""
        return self.blocks.data[row, 0, : self.counts[row]].permute(1, 2, 0, 3, 4).flatten(2, 3)


class HostBlockStore(BlockStore):
    """Blocks in pinned host memory; of each unit the `cached` most recently used ones (LRU) also on the device.

    Attention reads the device copies only: a requested block that is not cached is fetched first (`fetch` in the ledger). A new
    block is written to the host once (`write_back`). If more than `cached` blocks are requested at once, all of them are cached.
    """

    per_row = ("blocks", "counts", "pool", "recent")
    on_host = ("blocks",)

    def __init__(
        self, n: int, like: torch.Tensor, block: int, units: int, cached: int, moved: Callable[[str, int], None]
    ) -> None:
        super().__init__(n, like, block, HOST)
        self.units, self.cached, self.moved = units, cached, moved
        rest = (2, like.shape[1] if units == 1 else 1, block, like.shape[3])
        self.pool = Buffer(n, units, rest, like.dtype, like.device, step=1)
        # per row and unit: block -> slot, least recently used first
        self.recent: list[list[dict[int, int]]] = [[{} for _ in range(units)] for _ in range(n)]
        self.served = (0, 0, 0.0)  # of the last `take`, summed over units: lookups, hits, hits expected by chance

    def put(self, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        super().put(row, k, v)
        self.moved("write_back", 2 * k.numel() * k.element_size())

    def take(self, ids: torch.Tensor, rows: Sequence[int], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        missing: list[tuple[int, int, int, int]] = []  # row, unit, block, slot
        slots: list[list[list[int]]] = []
        lookups, by_chance = 0, 0.0
        for row, chosen in zip(rows, ids.tolist(), strict=True):  # the host must know what to send
            slots.append([])
            for unit, requested in enumerate(chosen):
                recent = self.recent[row][unit]
                blocks = [b for b in requested if b >= 0]
                lookups += len(blocks)
                by_chance += len(blocks) * len(recent) / max(1, self.counts[row])
                missing += [(row, unit, *pair) for pair in self._use(recent, blocks)]
                slots[-1].append([recent.get(block, 0) for block in requested])
        self.served = (lookups, lookups - len(missing), by_chance)
        if missing:
            self._fetch(missing)
        place = torch.tensor(rows)[:, None] * self.units + torch.arange(self.units)
        at = place[..., None] * self.pool.capacity + torch.tensor(slots)
        return self._gather(self.pool.data, at.to(self.device), heads)

    def _use(self, recent: dict[int, int], blocks: list[int]) -> list[tuple[int, int]]:
        """Mark `blocks` as used by one unit; (block, slot) of those that must be fetched first."""
        for block in blocks:
            if block in recent:
                recent[block] = recent.pop(block)
        limit = max(self.cached, len(blocks))
        fetched = []
        for block in blocks:
            if block not in recent:
                slot = len(recent)
                if slot >= limit:  # the oldest is never one of `blocks`: those are at the end
                    slot = recent.pop(next(iter(recent)))
                recent[block] = slot
                fetched.append((block, slot))
        return fetched

    def _fetch(self, missing: list[tuple[int, int, int, int]]) -> None:
        need = 1 + max(slot for *_, slot in missing)
        if need > self.pool.capacity:  # doubling: few copies on the way to a full pool
            self.pool.reserve(max(need, min(2 * self.pool.capacity, self.cached)))
        row, unit, block, slot = torch.tensor(missing).T
        data = self.blocks.data[:, 0]
        if self.units == 1:
            sent = data.flatten(0, 1).index_select(0, row * data.shape[1] + block)
        else:  # one KV head's half of a block
            sent = data[row, block, :, unit * self.heads // self.units][:, :, None]
        self.moved("fetch", sent.numel() * sent.element_size())
        self.pool.data[row.to(self.device), unit.to(self.device), slot.to(self.device)] = sent.to(self.device)

    def whole(self, row: int) -> torch.Tensor:
        rows = super().whole(row)
        self.moved("fetch", rows.numel() * rows.element_size())
        return rows.to(self.device)
