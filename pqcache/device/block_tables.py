"""A BlockCacheStore's tables on the device, so that a decode step asks the host for nothing; see selective/device_step.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pqcache.store.block_cache import BlockCacheStore
from pqcache.store.lanes import NOTHING, TO_DEVICE, Work

if TYPE_CHECKING:
    from pqcache.selective.ledger import Ledger


def to_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a small table, from pinned memory: a copy from pageable memory would wait."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.clone()


class BlocksOnDevice:
    """Has the store's slot, content, uses, stamp and clock until `leave`, and reads chosen tokens through them.

    A step reads with the cache that the step before left. What then comes in is decided, and copied, on the lane towards the
    device, beside whatever the model does next, until the next step reads (`join`). Hits and refills are counted on
    the device: the ledger gets them when somebody reads it (`Ledger.collect`), or the store is given back.
    """

    def __init__(self, store: BlockCacheStore, device: torch.device, ledger: Ledger) -> None:
        self.store, self.ledger = store, ledger
        n, self.width = store.slot.shape
        self.slot, self.content, self.uses, self.stamp = (
            to_device(x, device) for x in (store.slot, store.content, store.uses, store.stamp)
        )  # as in the store, slot with columns to spare
        self.clock = torch.full(
            (n,), store.clock, device=device
        )  # the same in all rows: each row's program keeps its own
        self.counts = torch.zeros((n, self.width), dtype=torch.int32, device=device)  # chosen tokens per complete block
        self.came = torch.full((n, store.topk, 2), -1, device=device)  # block and slot of what comes in
        self.tally = torch.zeros((n, 3), dtype=torch.long, device=device)  # tokens looked up, found; blocks refilled
        self.chance = torch.zeros(
            n, dtype=torch.float64, device=device
        )  # tokens found, were the cache filled at random
        self.told = [0, 0, 0, 0.0]  # of these the ledger knows
        self.refilled: Work[None] = NOTHING
        self.reserve()
        ledger.ask(self.tell)

    def reserve(self) -> None:
        """Columns and slots for every block of the host rows there is room for now: a recorded step keeps their addresses."""
        store = self.store
        columns = max(self.width, -(-store.host[0].capacity // store.block))
        more, entries = columns - self.slot.shape[1], min(store.slots, columns) * store.block
        if more == 0 and entries <= store.cache[0].capacity:
            return
        self.join()  # or the old ones would be given away while they are read
        self.slot, self.counts = F.pad(self.slot, (0, more), value=-1), F.pad(self.counts, (0, more))
        for buffer in store.cache:
            buffer.reserve(entries)

    def read(
        self, indices: torch.Tensor, cursor: torch.Tensor, plan: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of positions indices (n, h_kv, k) int32, row r's first plan[r][1]: (n, h_kv, k, d). `change` comes after it."""
        from pqcache.device import triton_blocks

        self.join()
        store = self.store
        cache, host = (store.cache[0].data, store.cache[1].data), (store.host[0].data, store.host[1].data)
        return triton_blocks.read(
            cache, host, indices, self.slot, self.counts, self.tally, cursor, plan, store.n_sink, store.block
        )

    def change(self, cursor: torch.Tensor, plan: torch.Tensor) -> None:
        """Let the policy see what was read; cursor (n,): tokens stored now, left alone until `join`."""
        self.refilled = self.store.lanes.copy(TO_DEVICE, lambda: self._change(cursor, plan))

    def _change(self, cursor: torch.Tensor, plan: torch.Tensor) -> None:
        from pqcache.device import triton_blocks

        store = self.store
        triton_blocks.admit(
            self.counts, self.slot, self.content, self.uses, self.stamp, self.clock, self.came, self.tally, self.chance,
            cursor, plan, heads=store.sinks[0].shape[1], origin=store.n_sink, block=store.block, least=self.width,
            lfu=store.policy == "lfu",
        )  # fmt: skip
        cache, host = (store.cache[0].rows, store.cache[1].rows), (store.host[0].rows, store.host[1].rows)
        triton_blocks.refill(cache, host, self.came, store.block)

    def join(self) -> None:
        """What the caller's stream does next comes after the last change."""
        self.refilled.wait()
        self.refilled = NOTHING

    def tell(self) -> None:
        """Let the ledger know what was counted since it was told last; waits for the device."""
        self.join()
        now = [*self.tally.sum(0).tolist(), self.chance.sum().item()]
        lookups, hits, refills, by_chance = (a - b for a, b in zip(now, self.told, strict=True))
        self.told = now
        if not lookups:
            return
        store = self.store
        token = sum(x.shape[3] * x.element_size() for x in store.sinks)  # K and V of one head
        self.ledger.move("fetch", (lookups - hits) * token, decoding=True)
        if refills:
            self.ledger.move("refill", refills * store.block * store.sinks[0].shape[1] * token, decoding=True)
        self.ledger.look_up(lookups, hits, by_chance)

    def leave(self) -> None:
        """Give the tables back, as the store itself would have them after these steps."""
        self.tell()
        store = self.store
        columns = max(self.width, -(-max(1, store.length - store.n_sink) // store.block))
        store.slot, store.clock = self.slot[:, :columns].cpu(), int(self.clock[0])
        store.content, store.uses, store.stamp = self.content.cpu(), self.uses.cpu(), self.stamp.cpu()

    def tensors(self) -> list[torch.Tensor]:
        tables = [self.slot, self.content, self.uses, self.stamp, self.clock]
        return [*tables, self.counts, self.came, self.tally, self.chance]
