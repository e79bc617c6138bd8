"""A host store with a cache of whole blocks of tokens on the device (PQCache, arXiv 2407.12820, section 3.4)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pqcache.store.buffer import Buffer
from pqcache.store.cached import CachedStore
from pqcache.store.lanes import TO_DEVICE


class BlockCacheStore(CachedStore):
    """HostStore with `slots` blocks of `block` consecutive tokens on the device, each with K and V of all KV heads.

    Block b of a row holds its host rows b*block .. b*block+block-1; host rows begin after the sinks. A step reads the cache as
    the step before left it. Then the policy sees the `topk` blocks with the most selected tokens over all heads. Cached ones are
    touched, then the others come in, both in order of descending count (ties: the earlier block). Only complete blocks come in,
    so a cached block never changes.

    lru evicts the block touched least recently. lfu evicts the block touched in the fewest steps; among equals, the one that
    reached that number first. A block that comes in has count 1, and the count of an evicted block is lost. A block may be
    evicted by one that comes in later in the same step. Only blocks that stay are copied (`refill`), on the lane to the device
    after the step has read. The next read waits for them; until then the tables are a step ahead of the slots. The tables can
    be lent to kernels, which follow the same rules.

    Deviations from the released code: cached blocks of a step are touched before others come in, so none is evicted and copied
    again in one step; the last, growing block is left out instead of being served stale.
    """

    tables = ("slot", "content", "uses", "stamp")
    per_row = (*CachedStore.per_row, *tables)
    on_host = (*CachedStore.on_host, *tables)

    def __init__(
        self,
        n_sink: int,
        n_local: int,
        moved: Callable[[str, int], None],
        block: int,
        slots: int,
        topk: int,
        policy: str,
    ) -> None:
        super().__init__(n_sink, n_local, moved)
        self.block, self.slots, self.topk, self.policy = block, slots, topk, policy

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        n = len(k)
        # (n, h_kv, slots filled so far * block, d), token-major: slot i begins at entry i*block
        self.cache = [Buffer.like(x, token_major=True) for x in (k, v)]
        self.slot = torch.full((n, 0), -1)  # (n, blocks) the slot of each block, -1 = not cached
        self.content = torch.full((n, self.slots), -1)  # the block in each slot, -1 = free
        self.uses = torch.zeros_like(self.content)  # steps that touched it, 0 = free
        self.stamp = torch.zeros_like(self.content)  # when it was touched last, 0 = free

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # up to the longest row's last, growing block
        longer = -(-max(1, self.length - self.n_sink) // self.block) - self.slot.shape[1]
        if longer > 0:
            self.slot = F.pad(self.slot, (0, longer), value=-1)
        row = (index - self.n_sink).clamp_min(0)
        slot = self.slot.gather(1, (row // self.block).flatten(1)).view_as(row)
        entry = torch.where((index >= 0) & (slot >= 0), slot * self.block + row % self.block, -1)
        return entry, (self.content >= 0).sum(1, dtype=torch.float32) * self.block

    def admit_fetched(self, index: torch.Tensor, fetched: list[torch.Tensor]) -> None:
        """Count the tokens read of each complete block, and let the policy see the blocks with the highest counts."""
        n, blocks = self.slot.shape
        block = torch.where(index >= 0, (index - self.n_sink) // self.block, blocks).flatten(1)
        counts = torch.zeros((n, blocks + 1), dtype=torch.long).scatter_add_(1, block, torch.ones_like(block))[:, :-1]
        complete = torch.tensor([max(0, length - self.n_sink) // self.block for length in self.lengths])
        counts = counts.masked_fill(torch.arange(blocks) >= complete[:, None], 0)
        counts, block = counts.sort(dim=1, descending=True, stable=True)
        self._copy(*self.admit(block[:, : self.topk], counts[:, : self.topk] > 0))

    def admit(self, blocks: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Let the policy see blocks (n, m) of one step, those flagged in read (n, m), in this order.

        Returns the blocks that came in and stay, as three lists: row, block, slot. By the rules, blocks come in one after the
        other, and each evicts the first in the policy's order if no slot is free. Computed here for all of them at once: the last
        `room` new blocks stay. With lru `room` is every slot. With lfu it is the slots that are free or hold a block of one use,
        at least one: when those are taken, a new block evicts an earlier new block.
        """
        slot = self.slot.gather(1, blocks)
        cached, new = read & (slot >= 0), read & (slot < 0)
        stamp = self.clock + torch.where(cached, cached.cumsum(1), cached.sum(1, keepdim=True) + new.cumsum(1))
        self.clock += blocks.shape[1]
        row, column = cached.nonzero(as_tuple=True)
        self.uses[row, slot[row, column]] += 1
        self.stamp[row, slot[row, column]] = stamp[row, column]
        room = torch.full((len(blocks), 1), self.slots)
        order = self.stamp
        if self.policy == "lfu":
            room = (self.uses <= 1).sum(1, keepdim=True).clamp_min(1)
            order = (self.uses << 40) + self.stamp
        stays = new & (new.cumsum(1) > new.sum(1, keepdim=True) - room)
        victims = order.argsort(dim=1, stable=True)  # free slots first
        target = victims.gather(1, (stays.cumsum(1) - 1).clamp_min(0))
        row, column = stays.nonzero(as_tuple=True)
        into, block = target[row, column], blocks[row, column]
        evicted = self.content[row, into]
        self.slot[row[evicted >= 0], evicted[evicted >= 0]] = -1
        self.slot[row, block] = into
        self.content[row, into] = block
        self.uses[row, into] = 1
        self.stamp[row, into] = stamp[row, column]
        return row, block, into

    def _copy(self, row: torch.Tensor, block: torch.Tensor, slot: torch.Tensor) -> None:
        """Fill slots from the host: one copy per block of K and of V, each one run of memory on both sides."""
        if not len(row):
            return
        size, end = self.block, (int(slot.max()) + 1) * self.block
        if end > self.cache[0].capacity:
            self.arriving.wait()  # a copy under way writes to the old buffer
        for cache in self.cache:
            cache.reserve(end)
        pairs = [(host.rows, cache.rows) for host, cache in zip(self.host, self.cache, strict=True)]
        filling = list(zip(row.tolist(), block.tolist(), slot.tolist(), strict=True))
        self.moved("refill", sum(len(filling) * size * host[0, 0].numel() * host.element_size() for host, _ in pairs))

        def copy() -> None:  # the fetch before it has waited for these rows
            for host, cache in pairs:
                for r, b, s in filling:
                    source = host[r, b * size : (b + 1) * size]
                    cache[r, s * size : (s + 1) * size].copy_(source, non_blocking=True)

        self.arriving = self.lanes.copy(TO_DEVICE, copy, *(cache.data for cache in self.cache))
