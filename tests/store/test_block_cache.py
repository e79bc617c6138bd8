"""Block cache: policies against a naive model, content against the host, the same outputs as without, hits and bytes."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import Session, logits, tokens
from pqcache.pq import PQCache
from pqcache.registry import method_class
from pqcache.selective import Budget, SelectiveCache, attach
from pqcache.store.block_cache import BlockCacheStore
from pqcache.store.host import HostStore
from pqcache.store.row_cache import KEPT, RowCacheStore
from tests.baselines.common import RETRIEVERS, random_layer
from tests.drawn import Pick, examples
from tests.store.cache_tables import check_cache, held
from tests.thin import thin

SMALL: dict[str, Any] = {"store": "block_cache", "cache_block": 8, "cache_tokens": 40, "cache_topk": 4}
POLICIES = {name: options | ({} if name == "quest" else {"n_sink": 8}) for name, options in RETRIEVERS.items()}
POLICIES["pqcache-per-query-head"] = {**POLICIES["pqcache"], "reduce": "none"}


class Naive:
    """One row's cache, block by block: the uses of each, from the block that was used longest ago."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity, self.policy = capacity, policy
        self.uses: dict[int, int] = {}

    def step(self, blocks: list[int]) -> None:
        for block in sorted(blocks, key=lambda block: block not in self.uses):  # those that are there first
            before = self.uses.pop(block, 0)
            if len(self.uses) == self.capacity:
                oldest = next(iter(self.uses))
                del self.uses[oldest if self.policy == "lru" else min(self.uses, key=self.uses.__getitem__)]
            self.uses[block] = before + 1


def cache_of(rows: int, slots: int, topk: int, policy: str) -> BlockCacheStore:
    """Tables only, of 40 blocks a row."""
    store = BlockCacheStore(0, 1, lambda kind, nbytes: None, 1, slots, topk, policy)
    store.load(torch.zeros(rows, 1, 40, 1), torch.zeros(rows, 1, 40, 1), [40] * rows)
    store.find(torch.zeros(rows, 1, 1, dtype=torch.long))
    return store


@examples(60)
def test_policies_equal_the_naive_model(pick: Pick) -> None:
    """Random steps of up to 9 blocks, also more than there are slots; what came in and stayed is what was not there."""
    policy, slots, width, rows = pick(["lru", "lfu"]), pick(1, 6), pick(1, 9), pick(1, 3)
    store, naive = cache_of(rows, slots, width, policy), [Naive(slots, policy) for _ in range(rows)]
    for _ in range(pick(1, 12)):
        seen = [[*dict.fromkeys(pick.some(0, 11, 0, width))] for _ in range(rows)]
        before = [held(store, row) for row in range(rows)]
        spare = [[b for b in range(40) if b not in row] for row in seen]
        blocks = torch.tensor([(row + rest)[:width] for row, rest in zip(seen, spare, strict=True)])
        required = torch.tensor([[i < len(row) for i in range(width)] for row in seen])
        row, block, slot = store.admit(blocks, required)
        loaded = set(zip(row.tolist(), block.tolist(), strict=True))
        for r in range(rows):
            naive[r].step(seen[r])
            assert held(store, r) == set(naive[r].uses)
            assert {b for s, b in loaded if s == r} == held(store, r) - before[r]
        assert torch.equal(store.content[row, slot], block)


def test_credits_by_hand() -> None:
    """Room for one token. A row's credit is 1 for each step that reads it, 0.95 of that a step later: 1.95, 1.85, 1.76."""
    store, x = RowCacheStore(0, 1, lambda kind, nbytes: None, 1), torch.randn(1, 1, 20, 3)
    store.load(x, x, [20])
    assert KEPT == 0.95
    for read, cached in ((5, 5), (5, 5), (7, 5), (7, 7), (5, 5)):  # 1 < 1.85; 1.95 > 1.76; 2.67 > 1.85
        store.append(x[:, :, :1], x[:, :, :1])
        store.fetch(torch.tensor([[[read]]]), 1)
        assert store.content.flatten().tolist() == [cached], store.credit


@pytest.mark.parametrize("name", thin(POLICIES, 8))
@pytest.mark.parametrize("policy", thin(["lru", "paying", "lfu"], 2))
def test_outputs_are_those_without_a_cache(llama: PreTrainedModel, name: str, policy: str) -> None:
    """Bit by bit, over every retrieval method, in a padded batch; only demand bytes move over to hits."""
    cls, hyper = method_class(name.partition("-")[0]), POLICIES[name]
    prompt, fed = [tokens(160, 1), tokens(70, 2), tokens(5, 3)], [[t, t, t] for t in tokens(30, 3)]
    results, caches = [], []
    for cache_policy in ("none", policy):
        options = {**hyper, **SMALL, "cache_policy": cache_policy}
        if name == "clusterkv":
            options["cache_steps"] = 0
        caches.append(SelectiveCache(llama, cls(budget=Budget(ratio=0.2), **options)))
        results.append(logits(llama, caches[-1].method, prompt, fed, cache=caches[-1]))
    assert torch.equal(*results)
    assert type(caches[0].layers[0].store) is HostStore and not caches[0].ledger.moved["refill"]
    plain, cached = (cache.ledger for cache in caches)
    token = 2 * 16 * 8  # K and V of one head in float64
    facts = cached.facts
    assert plain.moved["fetch"] == facts["cache_lookups"] * token
    assert cached.moved["fetch"] == (facts["cache_lookups"] - facts["cache_hits"]) * token
    if policy == "paying":  # it keeps what was fetched
        assert cached.moved["refill"] == 0 and cached.moved["fetch"] < plain.moved["fetch"]
    else:
        assert cached.moved["refill"] > 0 and cached.moved["refill"] % (8 * 2 * token) == 0
    assert 0 < facts["cache_hit_rate"] < 1 and 0 < facts["cache_chance_rate"] < 1
    assert cached.bytes_per_step()["refill"] == cached.moved["refill"] / cached.steps
    assert cached.moved["selection_keys"] == plain.moved["selection_keys"]


@torch.no_grad()
@pytest.mark.parametrize("policy", ["lru", "paying"])
def test_turns_keep_the_cache_and_requests_do_not(llama: PreTrainedModel, policy: str) -> None:
    method = PQCache(n_sink=8, b=4, budget=Budget(ratio=0.2), **SMALL, cache_policy=policy)
    cache = SelectiveCache(llama, method)
    with attach(llama):
        session = Session(llama, cache, [tokens(120, 1), tokens(90, 2)])
        for token in tokens(6, 3):
            session.step([token] * 2)
        store: Any = cache.layers[1].store
        before = store.content.clone()
        assert (before >= 0).any()
        session.turn([tokens(20, 4)] * 2)
        later: Any = cache.layers[1].store
        assert later is not store and torch.equal(later.content, before)
        session.reorder([1, 0])
        assert torch.equal(later.content, before[[1, 0]])
        for token in tokens(20, 5):
            session.step([token] * 2)
            check_cache(later)
        Session(llama, cache, [tokens(120, 1)])
        fresh: Any = cache.layers[1].store
        assert not (fresh.content >= 0).any() and fresh.cache[0].capacity == 0
        assert "cache_hits" not in cache.ledger.facts


def test_hits_bytes_and_chance_of_one_mistral_layer() -> None:
    """8192 tokens at 0.2: nothing hits at first, the same query again hits all it selected, at 4096 / 7344 by chance."""
    one = random_layer(PQCache(store="block_cache", max_iter=1, budget=Budget(ratio=0.2)))
    store, ledger = one.layer.store, one.ledger
    assert isinstance(store, BlockCacheStore)
    assert ledger.moved["fetch"] == 816 * 4096
    assert ledger.facts["cache_hits"] == ledger.facts["cache_chance_hits"] == 0
    assert len(held(store, 0)) == 32
    assert ledger.moved["refill"] == 32 * 512 * 1024
    assert sum(buffer.data.numel() * 2 for buffer in store.cache) == 16 * 2**20
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 32, 1, 128, generator=generator).half()
    new = torch.randn(1, 8, 1, 128, generator=generator).half()
    one.step(q, new, new)
    hits = ledger.facts["cache_hits"]
    assert ledger.moved["fetch"] == 2 * 816 * 4096 - hits * 512
    assert ledger.facts["cache_lookups"] == 2 * 8 * 816
    assert ledger.facts["cache_chance_hits"] == pytest.approx(8 * 816 * 4096 / 7345)
    assert hits / (8 * 816) == pytest.approx(0.56, abs=0.1)  # a query of its own: what chance gives
