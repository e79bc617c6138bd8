"""A block cache's tables on the device, so that a decode step asks the host for nothing; the rules: store/block_cache.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pqcache.store.base import Lent
from pqcache.store.lanes import NOTHING, TO_DEVICE, Work
from pqcache.store.transfer import to_device

if TYPE_CHECKING:
    from pqcache.selective.ledger import Ledger


class BlocksOnDevice:
    """Holds a lent block cache's tables (slot, content, uses, stamp, clock) until `leave`, and reads chosen tokens by them.

    A step reads the cache as the step before left it. Then the policy chooses which blocks come in, and they are copied. Both run
    on the lane towards the device, beside the model, until the next step reads (`join`). Hits and refills are counted on the
    device. The ledger gets them when its figures are read (`Ledger.collect`), or when the tables go back.
    """

    def __init__(self, lent: Lent, device: torch.device, ledger: Ledger) -> None:
        assert lent.blocks is not None and lent.far is not None
        blocks = self.blocks = lent.blocks
        self.cache, self.host, self.ledger = blocks.cache, lent.far, ledger
        self.heads = self.host[0].data.shape[1]
        n, self.width = blocks.slot.shape
        # as in the store; slot may have columns to spare
        self.slot, self.content, self.uses, self.stamp = (
            to_device(x, device) for x in (blocks.slot, blocks.content, blocks.uses, blocks.stamp)
        )
        # the same number in all rows: each row's program advances its own
        self.clock = torch.full((n,), blocks.clock, device=device)
        # chosen tokens per complete block
        self.counts = torch.zeros((n, self.width), dtype=torch.int32, device=device)
        # block and slot of each block that comes in
        self.incoming = torch.full((n, blocks.topk, 2), -1, device=device)
        # look-ups and hits in tokens, blocks refilled
        self.tally = torch.zeros((n, 3), dtype=torch.long, device=device)
        # hits that as many tokens chosen at random would have had
        self.chance = torch.zeros(n, dtype=torch.float64, device=device)
        self.reported = [0, 0, 0, 0.0]  # sums of tally and chance that the ledger already has
        self.refilled: Work[None] = NOTHING
        self.reserve()
        ledger.report_late(self.report)

    def reserve(self) -> None:
        """Make room for every block that the host buffers can hold now. A recorded step keeps the addresses of the tables."""
        block, slots = self.blocks.block, self.content.shape[1]
        columns = max(self.width, -(-self.host[0].capacity // block))
        more, entries = columns - self.slot.shape[1], min(slots, columns) * block
        if more == 0 and entries <= self.cache[0].capacity:
            return
        self.join()  # their memory would be reused while it is read
        self.slot, self.counts = F.pad(self.slot, (0, more), value=-1), F.pad(self.counts, (0, more))
        for buffer in self.cache:
            buffer.reserve(entries)

    def read(
        self, indices: torch.Tensor, cursor: torch.Tensor, plan: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of positions indices (n, h_kv, k) int32, row r's first plan[r][1]: (n, h_kv, k, d). `change` must follow."""
        from pqcache.device import triton_blocks

        self.join()
        cache, host = (self.cache[0].data, self.cache[1].data), (self.host[0].data, self.host[1].data)
        return triton_blocks.read(
            cache,
            host,
            indices,
            self.slot,
            self.counts,
            self.tally,
            cursor,
            plan,
            self.blocks.n_sink,
            self.blocks.block,
        )

    def change(self, cursor: torch.Tensor, plan: torch.Tensor) -> None:
        """Let the policy see what was read; cursor (n,): tokens stored now. Nobody may write to it until `join`."""
        self.refilled = self.blocks.lanes.copy(TO_DEVICE, lambda: self._change(cursor, plan))

    def _change(self, cursor: torch.Tensor, plan: torch.Tensor) -> None:
        from pqcache.device import triton_blocks

        blocks = self.blocks
        triton_blocks.admit(
            self.counts, self.slot, self.content, self.uses, self.stamp, self.clock, self.incoming, self.tally, self.chance,
            cursor, plan, heads=self.heads, n_sink=blocks.n_sink, block=blocks.block, min_columns=self.width,
            lfu=blocks.policy == "lfu",
        )  # fmt: skip
        cache, host = (self.cache[0].rows, self.cache[1].rows), (self.host[0].rows, self.host[1].rows)
        triton_blocks.refill(cache, host, self.incoming, blocks.block)

    def join(self) -> None:
        """Make the caller's stream wait for the last change."""
        self.refilled.wait()
        self.refilled = NOTHING

    def report(self) -> None:
        """Report to the ledger what was counted since the last report; waits for the device."""
        self.join()
        now = [*self.tally.sum(0).tolist(), self.chance.sum().item()]
        lookups, hits, refills, by_chance = (a - b for a, b in zip(now, self.reported, strict=True))
        self.reported = now
        if not lookups:
            return
        token = sum(x.data.shape[3] * x.data.element_size() for x in self.host)  # bytes: K and V of one head
        self.ledger.move("fetch", (lookups - hits) * token, decoding=True)
        if refills:
            self.ledger.move("refill", refills * self.blocks.block * self.heads * token, decoding=True)
        self.ledger.look_up(lookups, hits, by_chance)

    def leave(self) -> None:
        """Write the tables back to the loan."""
        self.report()
        blocks = self.blocks
        blocks.slot, blocks.clock = self.slot.cpu(), int(self.clock[0])
        blocks.content, blocks.uses, blocks.stamp = self.content.cpu(), self.uses.cpu(), self.stamp.cpu()

    def tensors(self) -> list[torch.Tensor]:
        tables = [self.slot, self.content, self.uses, self.stamp, self.clock]
        return [*tables, self.counts, self.incoming, self.tally, self.chance]
