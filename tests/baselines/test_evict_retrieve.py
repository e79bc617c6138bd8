"""Evict, then retrieve: the limits are the parts alone, positions are right, what is dropped is gone, bytes add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from baselines.combined.evict_retrieve import EvictRetrieve, EvictRetrieveLayer
from pqcache.diagnostics import Measures
from pqcache.registry import method_class
from pqcache.selective import Budget, Method, SelectiveCache, attach
from pqcache.selective.eviction import EvictionLayer
from pqcache.selective.layer import LayerContext, Step, WatchedCall, Watcher
from pqcache.selective.ledger import Ledger, unique_bytes
from pqcache.selective.shape import ModelShape, NotApplicable
from tests.baselines.common import context
from tests.baselines.drive import run
from tests.invariants.drive import Session, tokens

EVICT = ["h2o", "kvcrush", "pyramidkv", "snapkv"]
RETRIEVE = ["clusterkv", "oracle", "pqcache", "quest", "sparq"]

FIFTH = Budget(ratio=0.2)
EVICTORS: dict[str, dict[str, Any]] = {
    "snapkv": {"n_sink": 4, "w": 8},
    "pyramidkv": {"n_sink": 4},
    "h2o": {"n_sink": 4, "mode": "static"},
    "kvcrush": {"base_options": {"n_sink": 4, "w": 8}},
}
RETRIEVERS: dict[str, dict[str, Any]] = {
    "pqcache": {"n_sink": 4, "b": 3},
    "sparq": {"n_sink": 4, "r": 3},
    "quest": {"page": 4},
    "clusterkv": {"n_sink": 4, "tokens_per_cluster": 9, "window": 6, "window_clusters": 2},
    "oracle": {"n_sink": 4},
}


def both(evict: str = "snapkv", retrieve: str = "pqcache", keep: float = 0.5, **extra: Any) -> EvictRetrieve:
    options = {**RETRIEVERS[retrieve], **extra.pop("options", {})}
    return EvictRetrieve(
        evict=evict, evict_options=EVICTORS[evict], keep=keep, retrieve=retrieve, retrieve_options=options,
        **{"budget": FIFTH, **extra},
    )  # fmt: skip


@torch.no_grad()
def conversation(model: PreTrainedModel, method: Method, chunk: int | None = None) -> torch.Tensor:
    """Logits of two padded rows over a prompt, steps, a new turn, and steps again."""
    cache = SelectiveCache(model, method)
    with attach(model):
        session = Session(model, cache, [tokens(90, 1), tokens(57, 2)], chunk)
        out = [session.last, *(session.step([t, t + 1]) for t in tokens(12, 3))]
        out += [session.turn([tokens(25, 4), tokens(25, 5)], chunk)]
        out += [session.step([t, t + 1]) for t in tokens(8, 6)]
    return torch.stack(out, 1)


@pytest.mark.parametrize("retrieve", RETRIEVE)
@pytest.mark.parametrize("store", ["resident", "host"])
def test_keeping_everything_is_the_retriever_alone(llama: PreTrainedModel, retrieve: str, store: str) -> None:
    options = {**RETRIEVERS[retrieve], "store": store}
    alone = conversation(llama, method_class(retrieve)(budget=FIFTH, **options))
    torch.testing.assert_close(conversation(llama, both("h2o", retrieve, 1.0, options=options)), alone)


@pytest.mark.parametrize("evict", EVICT)
@pytest.mark.parametrize("retrieve", ["oracle", "clusterkv"])
def test_attending_everything_is_the_evictor_alone(llama: PreTrainedModel, evict: str, retrieve: str) -> None:
    alone = conversation(llama, method_class(evict)(budget=Budget(ratio=0.4), **EVICTORS[evict]))
    for budget in (Budget(ratio=1.0), Budget(tokens=4000)):
        method = both(evict, retrieve, 0.4, budget=budget, options={"store": "host"}, budget_rule="prompt")
        torch.testing.assert_close(conversation(llama, method), alone)


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def settled(
    method: Method, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]
) -> tuple[Any, Ledger, nn.Module]:
    """A layer alone that has seen a prompt: q (n, h, s, d) and k, v (n, h_kv, s, d), rows left-padded in q, not in k and v."""
    shape, ledger, module = ModelShape(1, q.shape[1], k.shape[1], k.shape[3]), Ledger(), nn.Module()
    layer = method.make_layer(0, shape)
    step = Step(False, q.shape[2], [0] * len(lengths), lengths, lengths, ends_prompt=True, first=True)
    ctx: LayerContext = context(step, shape, ledger, module)
    ctx.hidden = q
    layer.observe(q, k, lengths, ctx)  # type: ignore[attr-defined]
    layer.settle(k, v, lengths, ctx)  # type: ignore[attr-defined]
    return layer, ledger, module


@settings(max_examples=24, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(12, 90), min_size=1, max_size=3),
    evict=st.sampled_from(EVICT),
    retrieve=st.sampled_from(RETRIEVE),
    group=st.sampled_from([1, 3]),
    keep=st.floats(0.2, 1),
    budget=st.floats(0.05, 0.8),
    store=st.sampled_from(["resident", "host", "block_cache"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    steps=st.integers(1, 9),
)
def test_a_step_attends_chosen_entries_of_what_the_evictor_alone_holds(
    seed: int,
    lengths: list[int],
    evict: str,
    retrieve: str,
    group: int,
    keep: float,
    budget: float,
    store: str,
    dtype: torch.dtype,
    steps: int,
) -> None:
    """Held: the evictor's tokens, bit by bit, and all generated ones. Attended: sinks, window and k others of them."""
    n, s, h_kv, h = len(lengths), max(lengths), 2, 2 * group
    q, k, v = (drawn(seed + i, n, x, s, 8, dtype=dtype) for i, x in enumerate((h, h_kv, h_kv)))
    method = both(evict, retrieve, keep, budget=Budget(ratio=budget), options={"store": store})
    layer, ledger, module = settled(method, q, k, v, lengths)
    alone, _, _ = settled(method_class(evict)(budget=Budget(ratio=keep), **EVICTORS[evict]), q, k, v, lengths)
    assert isinstance(layer, EvictRetrieveLayer) and isinstance(alone, EvictionLayer)
    assert torch.equal(layer.held_positions(), alone.held_positions())
    seen = [[k[r, :, :length], v[r, :, :length]] for r, length in enumerate(lengths)]
    past = list(lengths)
    for step in range(steps):
        qs, new_k, new_v = (
            drawn(seed + 9 + 3 * step + i, n, x, 1, 8, dtype=dtype) for i, x in enumerate((h, h_kv, h_kv))
        )
        now = Step(True, 1, past, [1] * n, past, ends_prompt=False, first=False)
        ledger.decoding = True
        out = layer.decode(qs, new_k, new_v, context(now, layer.shape, ledger, module))
        past = now.total
        seen = [[torch.cat([a, b[r]], 1) for a, b in zip(own, (new_k, new_v))] for r, own in enumerate(seen)]
    held, keys, values = layer.held_positions(), *layer.store.view()
    selected, cand = layer.selected, layer.selected.candidates
    for row, length in enumerate(layer.store.lengths):
        assert length == alone.store.lengths[row] + steps
        spent = method.retriever.plan(lengths[row], 0, 1)
        for head in range(h):
            where = held[row, head // group, :length].tolist()
            assert where == sorted(set(where)) and where[-steps:] == list(range(lengths[row], past[row]))
            own_k, own_v = (x[head // group, where] for x in seen[row])
            assert torch.equal(keys[row, head // group, :length], own_k)  # entries are the tokens they are said to be
            assert torch.equal(values[row, head // group, :length], own_v)
            entries = set(range(min(cand.sinks, length))) | set(range(max(0, length - 1 - selected.local[row]), length))
            if selected.indices is None:
                chosen = set(range(cand.sinks, cand.ends[row])) if cand.k[row] else set()
            else:
                mine = selected.indices[row, head * selected.indices.shape[1] // h].tolist()
                chosen = {i for i in mine if i >= 0}
                assert len(chosen) == sum(i >= 0 for i in mine)
            assert all(cand.sinks <= i < cand.ends[row] for i in chosen)
            if retrieve != "quest":  # whose pages may be cut
                assert len(chosen) == cand.k[row]
                if not layer.dense[row]:
                    assert len(chosen) == min(spent.k, cand.ends[row] - cand.sinks)
            at = sorted(entries | chosen)
            weights = (own_k[at].float() @ qs[row, head, 0].float() * 8**-0.5).softmax(-1)
            expected = weights @ own_v[at].float()
            tolerance = 1e-4 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(out[row, 0, head].float(), expected, rtol=tolerance, atol=tolerance)


class Exact(Watcher):
    """Every key of one layer, and what each step attended: how many tokens, and their softmax weight per query head."""

    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx
        self.keys: list[torch.Tensor] = []
        self.attended: list[int] = []
        self.mass: list[torch.Tensor] = []

    def watch(self, call: WatchedCall) -> None:
        if call.layer.layer_idx != self.layer_idx:
            return
        self.keys.append(call.k)
        if not call.ctx.step.decode:
            return
        layer, selected, keys = call.layer, call.layer.selected, torch.cat(self.keys, 2)[0]
        mass = []
        for head in range(layer.shape.h):
            kv = head // layer.shape.group
            held, cand = layer.held_positions()[0, kv].tolist(), selected.candidates
            chosen = selected.indices[0, kv].tolist()
            entries = [*range(cand.sinks), *chosen, *range(cand.ends[0], cand.lengths[0])]
            at = sorted({held[e] for e in entries})
            weight = (keys[kv] @ call.q[0, head, 0] * call.ctx.scaling).softmax(0)
            mass.append(weight[at].sum())
        self.attended.append(len(at))
        self.mass.append(torch.stack(mass))


@torch.no_grad()
def test_diagnostics_see_positions(llama: PreTrainedModel) -> None:
    """Attended tokens and the softmax weight on them, from an exact copy, against positions worked out here."""
    for retrieve in ("pqcache", "oracle"):
        cache = SelectiveCache(llama, both("kvcrush", retrieve, 0.5))
        measures, exact = Measures(), Exact(1)
        cache.watchers += [exact, measures]
        with attach(llama):
            session = Session(llama, cache, [tokens(120, 1)])
            for token in tokens(5, 2):
                session.step([token])
        arrays = measures.arrays()
        assert len(exact.mass) == 5
        assert arrays["attended"][1, 0].T.tolist() == [[tokens_] * 4 for tokens_ in exact.attended]
        mass = torch.stack(exact.mass, -1).to(arrays["mass"].dtype)  # (h, steps)
        torch.testing.assert_close(arrays["mass"][1, 0], mass, rtol=1e-5, atol=1e-6)
        assert bool((arrays["mass"] < 1).all())
        assert bool((arrays["set_error"] <= arrays["bound"]).all())
        if retrieve == "oracle":  # whose attended set and output agree, so the real error is the set's
            assert bool((arrays["recall_kv"] > 0.2).all())


@torch.no_grad()
def test_a_new_turn_evicts_again_and_indexes_anew(llama: PreTrainedModel) -> None:
    for retrieve, store in (("pqcache", "host"), ("clusterkv", "resident"), ("sparq", "resident")):
        cache = SelectiveCache(llama, both("snapkv", retrieve, 0.5, options={"store": store}))
        with attach(llama):
            session = Session(llama, cache, [tokens(120, 1), tokens(66, 2)])
            for token in tokens(10, 3):
                session.step([token, token])
            layer: Any = cache.layers[0]
            before, index = layer.held_positions().clone(), layer.index
            assert layer.store.lengths == [4 + (s - 4) // 2 + 10 for s in (120, 66)]
            session.turn([tokens(30, 4), tokens(30, 5)], 11)
            after = layer.held_positions()
            for row, s in enumerate((120, 66)):
                assert layer.store.lengths[row] == 4 + (s + 10 + 30 - 4) // 2
                for head in range(2):
                    now = [p for p in after[row, head].tolist() if p >= 0]
                    assert now == sorted(set(now)) and now[-8:] == list(range(s + 32, s + 40))
                    assert {p for p in now if p < s + 10} <= set(before[row, head].tolist())  # what is gone stays gone
            assert layer.index is not index and layer.index.layer.store is layer.store
            for token in tokens(4, 6):
                session.step([token, token])


@torch.no_grad()
def test_bytes_add_up(llama: PreTrainedModel) -> None:
    """Half of 968 tokens and 32 sinks, 10 generated ones: K and V, positions, and the index of these alone; nothing else."""
    layers, h_kv, d, s, steps = 3, 2, 16, 1000, 10
    held = 32 + 484 + steps
    capacity = -(-held // 256) * 256

    def kv(n: int) -> int:
        return 2 * h_kv * n * d * 8

    positions, codes = h_kv * 4 * capacity, h_kv * 2 * -(-(held - 32) // 256) * 256
    index = h_kv * 2**6 * d * 4 + codes
    cache = run(llama, EvictRetrieve(budget=Budget(ratio=0.1)), s, steps)
    assert cache.layers[0].store.lengths == [held]
    assert cache.resident_bytes() == {"device": layers * (kv(capacity) + positions + index)}

    host = run(llama, EvictRetrieve(budget=Budget(ratio=0.1), retrieve_options={"store": "host"}), s, steps)
    window = 96 // 2 + 1  # a tenth of 968 tokens seen, half of it the local window
    device = kv(32) + kv(-(-(window + 128) // 256) * 256) + positions + index
    assert host.resident_bytes() == {"device": layers * device, "host": layers * kv(-(-(held - 32) // 256) * 256)}
    assert host.ledger.bytes_per_step()["demand_fetch"] == layers * kv(96 - 48)
    for ran in (cache, host):
        assert ran.ledger.attended(all_layers=True) == 32 + 96 + 1
        for layer in ran.layers:
            tiers = layer.tensors()
            total = sum(unique_bytes(part) for part in tiers.values())
            assert total == sum(ran.resident_bytes().values()) // layers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"evict": "snapkvv"}, "did you mean snapkv"),
        ({"retrieve": "pq"}, "retrieve=pq: allowed is"),
        ({"keep": 0}, "keep=0: allowed is a number in"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"evict_options": {"widow": 3}}, "evict_options=.*widow"),
        ({"evict_options": {"w": 0}}, "evict_options=.*w=0: allowed is"),
        ({"evict": "h2o", "evict_options": {"mode": "dynamic"}}, "prunes once"),
        ({"retrieve_options": {"store": "disk"}}, "retrieve_options=.*store=disk"),
        ({"retrieve_options": {"budget": 3}}, "without budget"),
    ],
)
def test_bad_values_are_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        EvictRetrieve(**wrong)
    assert "\n" not in str(caught.value)


def test_a_budget_the_retriever_cannot_honour_is_not_applicable() -> None:
    with pytest.raises(NotApplicable):
        EvictRetrieve(budget=Budget(tokens=64), retrieve_options={"n_sink": 70})


def test_protocols() -> None:
    paper = EvictRetrieve(protocol="paper", budget=FIFTH, retrieve="clusterkv")
    assert paper.evictor.n_sink == 0 and paper.retriever.protocol == "paper" and paper.dense_layers == 0
    assert EvictRetrieve(budget=FIFTH).plan(8192, 0, 32).total == 32 + 1632
