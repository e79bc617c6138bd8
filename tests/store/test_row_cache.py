"""Caches of rows and of blocks beside a host store without one; policy `paying` never moves more, credits as of a naive model."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch

from pqcache.store.block_cache import BlockCacheStore
from pqcache.store.host import HostStore
from pqcache.store.row_cache import KEPT, RowCacheStore
from tests.store.cache_tables import check_cache

SINK, H_KV, D = 4, 2, 3


class Trace:
    """Random selections over rows of different length; neighbouring steps share tokens, as decode steps do."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.n, self.group, self.tokens = 1 + seed % 3, (1, 3)[seed % 2], (1, 5, 17, 200)[seed % 4]
        self.blocks = (
            1 + 2 * seed % 9,
            1 + seed % 6,
            1 + seed % 5,
        )  # tokens of a block, slots, blocks admitted per step
        self.heads = (H_KV, 1, H_KV * self.group)[seed // 2 % 3]
        self.dtype = (torch.float32, torch.bfloat16)[seed // 3 % 2]
        self.lengths = torch.randint(1, 60, (self.n,), generator=self.generator).tolist()
        self.hot = torch.rand(self.n, self.heads, 80, generator=self.generator)

    def draw(self, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (torch.randn(self.n, H_KV, t, D, generator=self.generator).to(self.dtype) for _ in "kv")
        return k, v

    def select(self, lengths: list[int]) -> torch.Tensor:
        noise = torch.rand(self.n, self.heads, 80, generator=self.generator)
        index = torch.full((self.n, self.heads, 6), -1)
        for row, length in enumerate(lengths):
            count = min(6, max(0, length - SINK))
            score = (self.hot + 0.5 * noise)[row, :, : max(0, length - SINK)]
            index[row, :, :count] = score.topk(count).indices.sort().values + SINK
        return index


def stores(trace: Trace, policy: str) -> tuple[RowCacheStore | BlockCacheStore, HostStore, Counter[str], Counter[str]]:
    """A store with a cache and one without, over the same prompt, and the bytes that each moves from here on."""
    with_cache, without = Counter[str](), Counter[str]()

    def counter(moved: Counter[str]) -> Callable[[str, int], None]:
        return lambda kind, nbytes: moved.update({kind: nbytes})

    store: RowCacheStore | BlockCacheStore
    if policy == "paying":
        store = RowCacheStore(SINK, 3, counter(with_cache), trace.tokens)
    else:
        store = BlockCacheStore(SINK, 3, counter(with_cache), *trace.blocks, policy)
    plain = HostStore(SINK, 3, counter(without))
    k, v = trace.draw(max(trace.lengths))
    for one in (store, plain):
        one.load(k, v, trace.lengths)
    return store, plain, with_cache, without


@pytest.mark.parametrize(("policy", "seed"), [*product(["paying"], range(14)), *product(["lru", "lfu"], range(7))])
def test_steps_read_what_a_store_without_a_cache_reads(policy: str, seed: int) -> None:
    """Bit by bit; hits and bytes of each step, so also of each prefix; rows change places half-way."""
    trace = Trace(seed)
    store, plain, moved, base = stores(trace, policy)
    token = 2 * D * trace.dtype.itemsize  # K and V of one head
    for step in range(14):
        new = trace.draw(1)
        store.append(*new)
        plain.append(*new)
        want = trace.select(store.lengths)
        before, before_base = moved.copy(), base.copy()
        held = (store.content >= 0).sum(-1).float()
        held = held.mean(1) if policy == "paying" else held * trace.blocks[0]
        got, expected = store.fetch(want, trace.group), plain.fetch(want, trace.group)
        real = (want >= 0).expand(-1, max(trace.heads, H_KV), -1)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a[real], b[real])
        served = store.served
        assert served is not None and served.held == held.tolist() and served.lookups == real.sum((1, 2)).tolist()
        assert moved["fetch"] - before["fetch"] == (sum(served.lookups) - sum(served.hits)) * token
        assert moved["fetch"] - before["fetch"] <= base["fetch"] - before_base["fetch"] == sum(served.lookups) * token
        assert moved["refill"] % (trace.blocks[0] * H_KV * token) == 0 and (policy != "paying" or not moved["refill"])
        check_cache(store)
        if step == 6:
            index = torch.randperm(trace.n, generator=trace.generator)
            store.map_rows(index)
            plain.map_rows(index)
    assert trace.tokens < 17 or policy != "paying" or moved["fetch"] < base["fetch"]
    assert moved["write_back"] == base["write_back"]


def test_credits_by_hand() -> None:
    """Room for one token. A row's credit is 1 for each step that reads it, 0.95 of that a step later: 1.95, 1.85, 1.76."""
    store, x = RowCacheStore(0, 1, lambda kind, nbytes: None, 1), torch.randn(1, 1, 20, D)
    store.load(x, x, [20])
    assert KEPT == 0.95
    for read, cached in ((5, 5), (5, 5), (7, 5), (7, 7), (5, 5)):  # 1 < 1.85; 1.95 > 1.76; 2.67 > 1.85
        store.append(x[:, :, :1], x[:, :, :1])
        store.fetch(torch.tensor([[[read]]]), 1)
        assert store.content.flatten().tolist() == [cached], store.credit
