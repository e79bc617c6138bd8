"""Evict, then retrieve: the limits are the parts alone, positions are right, what is dropped is gone, bytes add up."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined.evict_retrieve import EvictRetrieve, EvictRetrieveLayer
from pqcache.registry import method_class
from pqcache.selective import Budget
from pqcache.selective.eviction import EvictionLayer
from pqcache.store.lanes import Lanes
from tests.baselines.common import RETRIEVERS, OneLayer
from tests.drawn import Pick, drawn, examples
from tests.store.test_lanes import run as converse
from tests.thin import thin

FIFTH = Budget(ratio=0.2)
EVICTORS: dict[str, dict[str, Any]] = {
    "snapkv": {"n_sink": 4, "w": 8},
    "pyramidkv": {"n_sink": 4},
    "h2o": {"n_sink": 4, "mode": "static"},
    "kvcrush": {"base_options": {"n_sink": 4, "w": 8}},
}


def options_of(retrieve: str) -> dict[str, Any]:
    return RETRIEVERS[retrieve] | ({} if retrieve == "quest" else {"n_sink": 4})


def both(evict: str = "snapkv", retrieve: str = "pqcache", keep: float = 0.5, **extra: Any) -> EvictRetrieve:
    options = {**options_of(retrieve), **extra.pop("options", {})}
    return EvictRetrieve(
        evict=evict, evict_options=EVICTORS[evict], keep=keep, retrieve=retrieve, retrieve_options=options,
        **{"budget": FIFTH, **extra},
    )  # fmt: skip


@pytest.mark.parametrize("retrieve", thin(RETRIEVERS, 3))
@pytest.mark.parametrize("store", thin(["resident", "host"], 2))
def test_keeping_everything_is_the_retriever_alone(llama: PreTrainedModel, retrieve: str, store: str) -> None:
    options = {**options_of(retrieve), "store": store}
    alone, _ = converse(llama, method_class(retrieve)(budget=FIFTH, **options), Lanes(), 1)
    torch.testing.assert_close(converse(llama, both("h2o", retrieve, 1.0, options=options), Lanes(), 1)[0], alone)


@examples(24)
def test_a_step_attends_chosen_entries_of_what_the_evictor_alone_holds(pick: Pick) -> None:
    """Held: the evictor's tokens, bit by bit, and all generated ones. Attended: sinks, window and k others of them."""
    seed, lengths, evict, retrieve = pick.seed, pick.some(12, 90), pick([*EVICTORS]), pick([*RETRIEVERS])
    group, keep, budget = pick([1, 3]), pick(0.2, 1.0), pick(0.05, 0.8)
    store, dtype = pick(["resident", "host", "block_cache"]), pick([torch.float32, torch.bfloat16])
    steps = pick(1, 9)
    n, s, h_kv, h = len(lengths), max(lengths), 2, 2 * group
    q, k, v = (drawn(seed + i, n, x, s, 8, dtype=dtype) for i, x in enumerate((h, h_kv, h_kv)))
    method = both(evict, retrieve, keep, budget=Budget(ratio=budget), options={"store": store})
    one = OneLayer(method, k, v, h, lengths, q)
    alone = OneLayer(method_class(evict)(budget=Budget(ratio=keep), **EVICTORS[evict]), k, v, h, lengths, q).layer
    layer = one.layer
    assert isinstance(layer, EvictRetrieveLayer) and isinstance(alone, EvictionLayer)
    assert torch.equal(layer.held_positions(), alone.held_positions())
    seen = [[k[r, :, :length], v[r, :, :length]] for r, length in enumerate(lengths)]
    for step in range(steps):
        qs, new_k, new_v = (
            drawn(seed + 9 + 3 * step + i, n, x, 1, 8, dtype=dtype) for i, x in enumerate((h, h_kv, h_kv))
        )
        out = one.step(qs, new_k, new_v)
        seen = [[torch.cat([a, b[r]], 1) for a, b in zip(own, (new_k, new_v))] for r, own in enumerate(seen)]
    held, keys, values = layer.held_positions(), *layer.store.view()
    selected, cand = layer.selected, layer.selected.candidates
    for row, length in enumerate(layer.store.lengths):
        assert length == alone.store.lengths[row] + steps
        spent = method.retriever.plan(lengths[row], 0, 1)
        for head in range(h):
            where = held[row, head // group, :length].tolist()
            assert where == sorted(set(where)) and where[-steps:] == list(range(lengths[row], one.lengths[row]))
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
