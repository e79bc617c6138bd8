"""The block cache's tables on the device against those on the host: policies, refills, hits; then a whole layer's steps."""

import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache import kernels
from pqcache.device.switch import interpreted
from pqcache.pq import PQCache
from pqcache.selective import Budget, SelectiveCache, attach
from pqcache.selective.ledger import Ledger
from pqcache.store.block_cache import BlockCacheStore
from tests.device.driven import CLOSE, DEVICE, SHAPE, Driven, made
from tests.invariants.conftest import _one_thread
from tests.invariants.drive import Session, tokens

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
from pqcache.device.block_tables import BlocksOnDevice
from tests.thin import thin

__all__ = ["_one_thread"]
SMALL = {"cache_block": 8, "cache_tokens": 40, "cache_topk": 4}
TABLES = ("slot", "content", "uses", "stamp")


def loaded(sink, block, slots, topk, policy, lengths, seed, ledger):
    """A store with a prompt of random tokens; two of the same arguments hold the same."""
    gen = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(len(lengths), 2, max(lengths), 3, generator=gen).to(DEVICE) for _ in range(2))
    store = BlockCacheStore(sink, 3, ledger.move, block, slots, topk, policy)
    store.load(k, v, lengths)
    return store, gen


class Loan:
    """A store that is sometimes on loan, as a `DeviceStep` has it; tokens are stored either way."""

    def __init__(self, store, ledger):
        self.store, self.ledger = store, ledger
        self.lent = self.blocks = None

    def tables(self):
        if self.blocks is None:
            self.lent = self.store.lend()
            self.blocks = BlocksOnDevice(self.lent, DEVICE, self.ledger)
        return self.blocks

    def append(self, k, v):
        if self.blocks is None:
            self.store.append(k, v)
            return
        for buffer, x in zip(self.lent.far, (k, v), strict=True):
            for row, length in enumerate(self.store.lengths):
                buffer.data[row, :, length - self.store.n_sink] = x[row, :, 0]
        self.store.note_token(0)

    def end(self):
        if self.blocks is not None:
            self.blocks.leave()
            self.store.take_back(self.lent)
        self.lent = self.blocks = None


def same_tables(a, b):
    assert a.clock == b.clock
    for name in TABLES:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def fresh(store, step=None):
    """Every cached block is that of the host rows; step: who has the tables."""
    content = store.content if step is None else step.blocks.content
    for row in range(len(store.lengths)):
        for slot, block in enumerate(content[row].tolist()):
            if block >= 0:
                size = store.block
                for cache, host in zip(store.cache, store.host, strict=True):
                    ours = cache.data[row, :, slot * size : (slot + 1) * size].cpu()
                    assert torch.equal(ours, host.data[row, :, block * size : (block + 1) * size])


@pytest.mark.parametrize("policy", thin(["lru", "lfu"], 2))
@pytest.mark.parametrize(("slots", "topk"), [pytest.param(3, 6, marks=pytest.mark.rest), (6, 4)])
def test_a_long_trace_of_counts(policy, slots, topk):
    """The policy alone: few blocks, so that they come, are touched and go; rows of their own; one row wants nothing."""
    store, gen = loaded(0, 1, slots, topk, policy, [12, 12], 1, Ledger())
    store.slot = torch.full((2, 12), -1)
    tables = BlocksOnDevice(store.lend(), DEVICE, Ledger())
    cursor = torch.full((2,), 12, dtype=torch.int32, device=DEVICE)
    plan = torch.zeros((2, 4), dtype=torch.int32, device=DEVICE)
    for step in range(12):
        counts = torch.randint(-6, 4, (2, 12), generator=gen, dtype=torch.int32).clamp_min(0)
        counts[1] *= step % 5 > 0
        tables.counts[:, :12] = counts.to(DEVICE)
        tables.change(cursor, plan)
        tables.join()
        ordered, blocks = counts.sort(dim=1, descending=True, stable=True)
        row, block, slot = store.admit(blocks[:, :topk], ordered[:, :topk] > 0)
        came = tables.incoming.cpu()
        for r in range(2):
            mine = [(b, s) for b, s in came[r].tolist() if b >= 0]
            assert mine == [
                (b, s) for at, b, s in zip(row.tolist(), block.tolist(), slot.tolist(), strict=True) if at == r
            ]
        for name in TABLES:
            assert torch.equal(getattr(tables, name).cpu()[:, :12], getattr(store, name)), (step, name)
        assert tables.clock.tolist() == [store.clock] * 2
        assert not tables.counts.any()


@pytest.mark.rest
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(12, 60), min_size=1, max_size=3),
    policy=st.sampled_from(["lru", "lfu"]),
    block=st.integers(1, 9),
    slots=st.integers(1, 6),
    topk=st.integers(1, 7),
    steps=st.lists(st.sampled_from(["both", "host", "map"]), min_size=1, max_size=5),
)
def test_tables_equal_those_of_the_host(seed, lengths, policy, block, slots, topk, steps):
    """Random choices of random counts per row and appended tokens; the device's share is given back and taken again."""
    sink = 4
    ledgers = [Ledger(), Ledger()]
    (plain, gen), (store, _) = (loaded(sink, block, slots, topk, policy, lengths, seed, ledger) for ledger in ledgers)
    for ledger in ledgers:
        ledger.decoding = True
    n = len(lengths)
    chosen = torch.randint(1, 7, (n,), generator=gen).tolist()
    plan = torch.tensor([[sink, count, 2, 0] for count in chosen], dtype=torch.int32, device=DEVICE)
    loan = Loan(store, ledgers[1])
    for kind in steps:
        if kind == "map":
            loan.end()
            index = torch.randperm(n, generator=gen)
            for one in (plain, store):
                one.map_rows(index)
            chosen = [chosen[i] for i in index.tolist()]
            plan = plan[index.to(DEVICE)]
        new = [torch.randn(n, 2, 1, 3, generator=gen).to(DEVICE) for _ in range(2)]
        plain.append(*new)
        loan.append(*new)
        want = torch.full((n, 2, max(chosen)), -1)
        for row, length in enumerate(plain.lengths):
            for head in range(2):
                spread = 1 + int(torch.randint(0, length - sink - 4, (1,), generator=gen))
                pick = torch.randperm(max(spread, chosen[row]), generator=gen)[: chosen[row]].sort().values + sink
                want[row, head, : chosen[row]] = pick
        real = want >= 0
        expected = plain.fetch(want.to(DEVICE))
        served, hi = plain.served, [length - 3 for length in plain.lengths]
        by_chance = sum(
            lookups * min(1.0, held / (end - sink))
            for lookups, held, end in zip(served.lookups, served.held, hi, strict=True)
        )
        ledgers[0].look_up(sum(served.lookups), sum(served.hits), by_chance)
        if kind == "host":
            loan.end()
            got = store.fetch(want.to(DEVICE))
            assert store.served == served
            ledgers[1].look_up(sum(served.lookups), sum(served.hits), by_chance)
        else:
            tables = loan.tables()
            cursor = torch.tensor(store.lengths, dtype=torch.int32, device=DEVICE)
            got = tables.read(want.clamp_min(0).int().to(DEVICE), cursor - 1, plan)
            tables.change(cursor, plan)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a[real], b[real])
        ledgers[1].collect()
        assert ledgers[0].moved == ledgers[1].moved
        assert ledgers[0].facts == pytest.approx(ledgers[1].facts)
    loan.end()
    same_tables(plain, store)
    fresh(store)
    fresh(plain)


@pytest.mark.parametrize(
    ("lengths", "policy", "dtype"),
    [
        ([150], "lru", torch.float16),
        pytest.param([150, 121], "lfu", torch.float32, marks=pytest.mark.rest),
        pytest.param([90, 150, 143], "lru", torch.float32, marks=pytest.mark.rest),
    ],
)
def test_a_layer_equals_the_general_way_and_a_host_store(lengths, policy, dtype):
    """Steps by kernels, reordered rows, a step by the general way, one by kernels."""
    order, runs = list(range(len(lengths)))[::-1], []
    for store, mode in (
        ("block_cache", kernels.plain_torch), ("block_cache", interpreted), ("host", interpreted),
    ):  # fmt: skip
        run = Driven(made(store, cache_policy=policy, **SMALL), lengths, dtype)
        outs = []
        for kind in "kkmpk":
            if kind == "m":
                run.reorder(order)
                assert run.layer.substitute is None
                if store == "block_cache":
                    fresh(run.layer.store)
                continue
            with mode() if kind == "k" else kernels.plain_torch():
                outs.append(run.step())
                step = run.layer.substitute
                assert (step is not None) == (mode is interpreted and kind == "k")
                if store == "block_cache":
                    fresh(run.layer.store, step)
        run.ledger.collect()
        run.layer.take_back()
        runs.append((run, outs))
    (plain, expected), (kernel, outs), (host, bits) = runs
    for a, b, c in zip(expected, outs, bits, strict=True):
        torch.testing.assert_close(b, a, rtol=CLOSE[dtype], atol=CLOSE[dtype])
        assert torch.equal(b, c)
    assert all(torch.equal(a, b) for a, b in zip(plain.chosen, kernel.chosen, strict=True))
    same_tables(plain.layer.store, kernel.layer.store)
    fresh(kernel.layer.store)
    assert plain.ledger.moved == kernel.ledger.moved and plain.ledger.prefill_moved == kernel.ledger.prefill_moved
    facts = {name: x for name, x in kernel.ledger.reported().items() if name.startswith("cache_")}
    assert 0 < facts["cache_hits"] < facts["cache_lookups"] and 0 < facts["cache_chance_rate"] < 1
    assert facts == pytest.approx({name: plain.ledger.reported()[name] for name in facts})
    token = 2 * SHAPE.d * dtype.itemsize
    assert host.ledger.moved["fetch"] - kernel.ledger.moved["fetch"] == facts["cache_hits"] * token


@pytest.mark.rest
@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/invariants/test_gpu.py has a model there")
@torch.no_grad()
def test_turns_requests_and_growth(llama):
    """Two requests over one cache, a turn between steps, and tables that grow: the bits of a host store, and no stale block."""
    hyper = {"b": 2, "n_sink": 8, "budget": Budget(ratio=0.2), **SMALL}
    with interpreted(), attach(llama):
        seen = []
        for store in ("host", "block_cache"):
            cache, out = SelectiveCache(llama, PQCache(store=store, **hyper)), []
            for request in range(2):
                with kernels.plain_torch():  # K-Means by the interpreter is slow
                    session = Session(llama, cache, [tokens(70 + request, 1), tokens(50, 2)])
                out += [session.step([token] * 2) for token in tokens(2, 3)]
                layer = cache.layers[0]
                held = layer.substitute.blocks.content.clone() if store == "block_cache" else None
                with kernels.plain_torch():
                    out.append(session.turn([tokens(9, 4)] * 2))
                if held is not None:
                    assert torch.equal(layer.store.content, held.cpu()) and (held >= 0).any()
                out.append(session.step([6, 6]))
                layer.prepare_capture(300)
                if held is not None:
                    assert layer.substitute.blocks.slot.shape[1] * 8 >= 292
                out.append(session.step([7, 7]))
                if held is not None:
                    fresh(layer.store, layer.substitute)
            cache.wait()
            seen.append((out, cache.ledger))
    (plain, without), (out, ledger) = seen
    assert all(torch.equal(a, b) for a, b in zip(plain, out, strict=True))
    hits = ledger.facts["cache_hits"] * 2 * 16 * 4
    assert hits and ledger.moved["fetch"] == without.moved["fetch"] - hits
    assert ledger.prefill_moved == without.prefill_moved  # what a turn finds counted was counted in decode steps


def test_room_grows_with_the_host_rows():
    """No more slots than there may be blocks; what is cached stays."""
    store, _ = loaded(4, 8, 80, 2, "lru", [200], 0, Ledger())
    tables = BlocksOnDevice(store.lend(), DEVICE, Ledger())
    assert tables.slot.shape[1] == 32 and all(buffer.capacity == 256 for buffer in store.cache)
    tables.slot[0, 3] = 5
    store.cache[0].data[:, :, 40:48] = 7
    for buffer in store.host:
        buffer.reserve(700)
    tables.reserve()
    assert tables.slot.shape[1] == tables.counts.shape[1] == 96 and all(
        buffer.capacity >= 640 for buffer in store.cache
    )
    assert (tables.slot >= 0).sum() == 1 and tables.slot[0, 3] == 5
    assert (store.cache[0].data == 7).sum() == 2 * 8 * 3


def test_a_dropped_cache_is_asked_nothing():
    ledger = Ledger()
    tables = BlocksOnDevice(loaded(4, 4, 2, 2, "lru", [30], 0, ledger)[0].lend(), DEVICE, ledger)
    dropped = weakref.ref(tables)
    del tables
    assert dropped() is None  # the ledger does not keep it
    assert ledger.bytes_per_step()["demand_fetch"] == 0
