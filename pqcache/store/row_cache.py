"""A host store that keeps rows it has fetched on the device: the block cache's policy `paying`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pqcache.store.buffer import Buffer, round_up
from pqcache.store.cached import CachedStore
from pqcache.store.lanes import TO_DEVICE
from pqcache.store.transfer import to_device

KEPT = 0.95  # of a row's credit after each step; chosen by the bytes moved on PocketBench traces


class RowCacheStore(CachedStore):
    """HostStore with `tokens` rows per KV head on the device. A row is the K and V of one token in one KV head.

    A refill pays only if what it moves saves more. Filling a whole block moves all its rows for the few that are read again. Here
    a row comes in only when a step has fetched it anyway: it is copied on the device, from what the step read. No byte crosses
    that would not cross without a cache, so that no step moves more, and `refill` is 0.

    A step reads the cache as the step before left it. Then each row has a credit: the steps that read it, each one weighted by
    KEPT for every step since. The rows fetched come in by descending credit (ties: the earlier head and entry of the selection)
    into free entries, or in place of the row with the least credit as long as that is less than theirs. Credits of rows outside
    the cache are kept as well.

    A choice per query head counts once per KV head; host rows never change, so a cached row never does.
    """

    tables = ("entry", "content", "credit")
    per_row = (*CachedStore.per_row, *tables)
    on_host = (*CachedStore.on_host, *tables)

    def __init__(self, n_sink: int, n_local: int, moved: Callable[[str, int], None], tokens: int) -> None:
        super().__init__(n_sink, n_local, moved)
        self.tokens = tokens

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        n, h_kv = k.shape[:2]
        self.cache = [Buffer.like(x) for x in (k, v)]  # (n, h_kv, entries so far, d)
        # on the host; host row i is the token at position n_sink + i
        self.entry = torch.full((n, h_kv, 0), -1, dtype=torch.int32)  # the entry of each host row, -1 = not cached
        self.content = torch.full((n, h_kv, self.tokens), -1, dtype=torch.int32)  # the host row in it, -1 = free
        self.credit = torch.zeros((n, h_kv, 0))  # of each host row

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        more = max(1, self.length - self.n_sink) - self.entry.shape[2]
        if more > 0:  # in steps: a table is copied as a whole
            more = round_up(more)
            self.entry, self.credit = F.pad(self.entry, (0, more), value=-1), F.pad(self.credit, (0, more))
        row = self._host_rows(index)
        entry = self.entry.gather(2, row.clamp_min(0)).long()
        return torch.where(row >= 0, entry, -1).view_as(index), (self.content >= 0).sum(2).float().mean(1)

    def _host_rows(self, index: torch.Tensor) -> torch.Tensor:
        """The host rows of positions index (n, H, k), per KV head: (n, h_kv, H / h_kv * k), negative = padding."""
        return (index - self.n_sink).view(len(index), self.sinks[0].shape[1], -1)

    def admit_fetched(self, index: torch.Tensor, fetched: list[torch.Tensor]) -> None:
        """Count what was read, and let the fetched rows with the most credit come in."""
        row = self._host_rows(index)
        at, first = row.clamp_min(0), row >= 0
        if index.shape[1] > row.shape[1]:
            first &= ~_repeated(row)
        self.credit *= KEPT
        self.credit.scatter_add_(2, at, first.float())
        new = first & (self.entry.gather(2, at) < 0)
        most = min(int(new.sum(2).max()), self.tokens) if new.any() else 0
        if most == 0:
            return
        credit, column = (
            self.credit.gather(2, at).masked_fill(~new, -torch.inf).sort(dim=2, descending=True, stable=True)
        )
        least, entry = self._standing().topk(most, dim=2, largest=False)
        r, head, rank = (credit[..., :most] > least).nonzero(as_tuple=True)
        if not len(r):
            return
        column, entry = column[r, head, rank], entry[r, head, rank]
        gone = self.content[r, head, entry].long()
        out = gone >= 0
        self.entry[r[out], head[out], gone[out]] = -1
        self.entry[r, head, row[r, head, column]] = entry.int()
        self.content[r, head, entry] = row[r, head, column].int()
        self._keep(r, head, column, entry, index.shape[2], fetched)

    def _standing(self) -> torch.Tensor:
        """The credit of the row in each entry (n, h_kv, tokens); free ones come before, the first of them first."""
        free = torch.arange(-self.tokens, 0, dtype=torch.float32)
        held = self.credit.gather(2, self.content.clamp_min(0).long())
        return torch.where(self.content >= 0, held, free)

    def _keep(
        self,
        r: torch.Tensor,
        head: torch.Tensor,
        column: torch.Tensor,
        entry: torch.Tensor,
        k: int,
        fetched: list[torch.Tensor],
    ) -> None:
        """Copy what was read into the cache, on the device.

        fetched: K and V (n, H, k, d). Copy i is of batch row r[i], KV head head[i], and from column column[i] of the heads of
        its group, H / h_kv times k of them, to entry entry[i].
        """
        end = int(entry.max()) + 1
        if end > self.cache[0].capacity:
            self.arriving.wait()  # a copy under way writes to the old buffer
        for cache in self.cache:
            cache.reserve(end)
        h_kv, heads = self.content.shape[1], fetched[0].shape[1]
        source = (r * heads + head * (heads // h_kv) + column // k) * k + column % k
        target = (r * h_kv + head) * self.cache[0].capacity + entry
        pairs = [(x.flatten(0, 2), cache.data.flatten(0, 2)) for x, cache in zip(fetched, self.cache, strict=True)]

        def copy() -> None:
            device = fetched[0].device
            there, here = to_device(target, device), to_device(source, device)
            for x, cache in pairs:
                cache.index_copy_(0, there, x.index_select(0, here))

        self.arriving = self.lanes.copy(TO_DEVICE, copy, *fetched, *(cache.data for cache in self.cache))


def _repeated(row: torch.Tensor) -> torch.Tensor:
    """Where row (n, h_kv, m) names a number that stands before it in the same list: the same shape, bool."""
    ordered, order = row.sort(dim=2, stable=True)
    again = F.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    return torch.zeros_like(again).scatter_(2, order, again)
