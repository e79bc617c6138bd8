"""What both caches on the device must be at any time: their tables agree, and what they hold is as on the host."""

import torch

from pqcache.store.block_cache import BlockCacheStore
from pqcache.store.row_cache import RowCacheStore


def held(store: BlockCacheStore, row: int) -> set[int]:
    """The blocks of a row, checked: slots are unique and both tables say the same."""
    there = {b: s for b, s in enumerate(store.slot[row].tolist()) if s >= 0}
    assert len(set(there.values())) == len(there) <= store.slots
    assert {b: s for s, b in enumerate(store.content[row].tolist()) if b >= 0} == there
    assert [u > 0 for u in store.uses[row].tolist()] == [b >= 0 for b in store.content[row].tolist()]
    return set(there)


def check_cache(store: BlockCacheStore | RowCacheStore) -> None:
    for row, length in enumerate(store.lengths):
        if isinstance(store, RowCacheStore):
            _check_rows(store, row)
            continue
        size = store.block
        for b in held(store, row):
            assert (b + 1) * size <= length - store.n_sink  # complete
            at = int(store.slot[row, b]) * size
            for cache, host in zip(store.cache, store.host, strict=True):
                assert torch.equal(cache.data[row, :, at : at + size], host.data[row, :, b * size : (b + 1) * size])


def _check_rows(store: RowCacheStore, row: int) -> None:
    for head in range(store.content.shape[1]):
        there = {i: e for i, e in enumerate(store.entry[row, head].tolist()) if e >= 0}
        assert {i: e for e, i in enumerate(store.content[row, head].tolist()) if i >= 0} == there
        for i, entry in there.items():
            for cache, host in zip(store.cache, store.host, strict=True):
                assert torch.equal(cache.data[row, head, entry], host.data[row, head, i])
