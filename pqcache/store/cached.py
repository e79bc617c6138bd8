"""A host store with a cache on the device: a cached token is not fetched again."""

from collections.abc import Callable, Sequence

import torch

from pqcache.store.base import Served
from pqcache.store.buffer import Buffer, flat_index, take_tokens
from pqcache.store.host import HOST, HostStore
from pqcache.store.lanes import NOTHING, Work


class CachedStore(HostStore):
    """Base of host stores with a cache on the device. A cache writes find, admit_fetched, and names its tables.

    All tables are on the host: a fetch waits for the device once, for the indices. Outputs are those of a HostStore, bit by bit.
    """

    per_row = (*HostStore.per_row, "cache")
    tables: tuple[str, ...] = ()  # attributes with one line per row, on the host: in `per_row` and `on_host`, too

    def __init__(self, n_sink: int, n_local: int, moved: Callable[[str, int], None]) -> None:
        super().__init__(n_sink, n_local, moved)
        self.served: Served | None = None  # of the last fetch
        self.cache: list[Buffer] = []  # K, V of the tokens on the device
        self.clock = 0  # of a policy that has one
        self.arriving: Work[None] = NOTHING  # the copy into the cache that is under way

    def load(self, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], known: HostStore | None = None) -> None:
        """As a HostStore; what was cached in earlier turns stays where it is."""
        super().load(k, v, lengths, known)
        if isinstance(known, type(self)):
            for name in ("cache", "clock", *self.tables):
                setattr(self, name, getattr(known, name))
        else:
            self.begin(k, v)

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Make an empty cache for tokens like k and v, and its tables, where the store has any."""

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache entries of positions index (n, H, k), -1 = not cached; and how many tokens per head the cache holds (n,)."""
        raise NotImplementedError

    def cached(self) -> list[torch.Tensor]:
        """K and V of the cache, (n, H or h_kv, entries, d); empty while it has none."""
        self.arriving.wait()
        return [buffer.data for buffer in self.cache] if self.cache[0].capacity else []

    def wait(self) -> None:
        super().wait()
        self.arriving.finish()

    def admit_fetched(self, index: torch.Tensor, fetched: list[torch.Tensor]) -> None:
        """Positions index (n, H, k), a tensor on the host, were read; fetched: their K and V (n, H, k, d).

        The cache changes now, not before.
        """
        raise NotImplementedError

    def fetch(self, indices: torch.Tensor, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        h_kv, device = self.sinks[0].shape[1], self.sinks[0].device
        index = indices.to(HOST)
        if index.shape[1] == 1:
            index = index.expand(-1, h_kv, -1)
        entry, held = self.find(index)
        real, hit = index >= 0, entry >= 0
        miss = (real & ~hit).flatten().nonzero()[:, 0]
        rows = flat_index(index - self.n_sink, h_kv, self.host[0].capacity, True).flatten()[miss]
        self.fence()
        cached, pinned = self.cached(), device.type == "cuda"
        if pinned:  # a copy from pageable memory would wait once more
            entry, miss = (x.pin_memory().to(device, non_blocking=True) for x in (entry, miss))
        out = []
        for i, (sink, host) in enumerate(zip(self.sinks, self.host, strict=True)):
            crossing = torch.empty((len(rows), sink.shape[3]), dtype=sink.dtype, pin_memory=pinned)
            torch.index_select(host.rows.flatten(0, 2), 0, rows, out=crossing)
            self.moved("fetch", crossing.numel() * crossing.element_size())
            whole = take_tokens(cached[i], entry, group) if cached else sink.new_zeros((*index.shape, sink.shape[3]))
            whole.flatten(0, 2).index_copy_(0, miss, crossing.to(device, non_blocking=pinned))
            out.append(whole)
        self.served = Served(real.sum((1, 2)).tolist(), hit.sum((1, 2)).tolist(), held.tolist())
        self.admit_fetched(index, out)
        return out[0], out[1]
