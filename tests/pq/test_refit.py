"""refit_every: clustered again over all keys so far, the same over every store; off, nothing changes."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.api.drive import logits, tokens
from pqcache.pq import PQCache, codebook
from pqcache.pq.fit import fit
from pqcache.pq.index import PQIndex
from pqcache.selective import Budget, SelectiveCache
from pqcache.selective.retrieval import RetrievalLayer
from pqcache.store.lanes import Lanes
from tests.store.test_lanes import run, slow

SINKS, EVERY, PROMPT = 8, 5, 60


def pqcache(**hyper: Any) -> PQCache:
    return PQCache(budget=Budget(ratio=0.25), n_sink=SINKS, **{"b": 3, "refit_every": EVERY, **hyper})


def after(model: PreTrainedModel, method: PQCache, steps: int) -> SelectiveCache:
    """The cache after a prompt of PROMPT tokens and some steps."""
    cache = SelectiveCache(model, method)
    logits(model, method, [tokens(PROMPT, 1)], [[5 + step] for step in range(steps)], cache=cache)
    cache.wait()
    return cache


def parts(cache: SelectiveCache) -> tuple[RetrievalLayer, PQIndex]:
    """The last layer and its index."""
    layer = cache.layers[-1]
    assert isinstance(layer, RetrievalLayer) and isinstance(layer.index, PQIndex)
    return layer, layer.index


@pytest.mark.parametrize("store", ["resident", "host", "block_cache"])
@pytest.mark.rest
def test_a_refit_is_a_fit_of_all_keys(llama: PreTrainedModel, store: str) -> None:
    """Two tokens after the second refit: centroids of the keys there were then, later keys by their nearest centroid."""
    cache = after(llama, pqcache(store=store, cache_block=4, cache_tokens=16), 2 * EVERY + 2)
    layer, index = parts(cache)
    assert index.centroids is not None and index.codes is not None
    count = PROMPT - SINKS + 2 * EVERY
    assert index.fitted == [count] and cache.ledger.reported()["refits"] == 2
    keys = layer.store.view()[0][:, :, SINKS:]
    fresh = fit(keys[:, :, :count], torch.zeros_like(index.centroids), [count], [0], index.how)
    assert torch.equal(index.centroids, fresh.centroids)
    held = index.codes.data[:, :, : keys.shape[2]].view(1, keys.shape[1], 2, -1)
    assert torch.equal(held.long(), codebook.encode(keys, index.centroids))


def test_the_first_centroids_stay_without_it(llama: PreTrainedModel) -> None:
    layer, index = parts(cache := after(llama, pqcache(refit_every=0), EVERY))
    assert index.fitted == [PROMPT - SINKS] and "refits" not in cache.ledger.reported()
    again = parts(after(llama, pqcache(), EVERY))[1]
    assert index.centroids is not None and again.centroids is not None
    assert not torch.equal(index.centroids, again.centroids)


@pytest.mark.parametrize("hyper", [{"store": "host"}, {"store": "block_cache"}, {"codes_store": "host"}])
@pytest.mark.rest
def test_outputs_do_not_depend_on_the_store(llama: PreTrainedModel, hyper: dict[str, Any]) -> None:
    """Padded rows that are refitted at different steps; a reorder; a new turn."""
    block = {"cache_block": 4, "cache_tokens": 16} if hyper.get("store") == "block_cache" else {}
    expected, _ = run(llama, pqcache(refit_every=2), Lanes(), 1)
    out, cache = run(llama, pqcache(refit_every=2, **hyper, **block), slow(0), 1)
    assert torch.equal(out, expected)
    assert cache.ledger.reported()["refits"] > 1


def test_bytes_of_a_refit(llama: PreTrainedModel) -> None:
    """K-Means on the host reads host rows in place. Codes on the host are sent once more, for the step goes on with new ones."""
    method = pqcache(store="host", codes_store="host")
    before, now = (after(llama, method, steps).ledger.moved for steps in (EVERY - 1, EVERY))
    plain = [after(llama, pqcache(store="host", codes_store="host", refit_every=0), n).ledger.moved for n in (4, 5)]
    shape = SelectiveCache(llama, method).shape
    size = shape.n_layers * shape.h_kv * 2 * (PROMPT - SINKS + EVERY)
    extra = {kind: (now[kind] - before[kind]) - (plain[1][kind] - plain[0][kind]) for kind in now}
    table = shape.n_layers * shape.h_kv * shape.d * 2**3 * 4
    assert extra == {"codes": size, "centroids": table, "fetch": 0, "write_back": 0}


def test_kernels_leave_the_step_alone(llama: PreTrainedModel) -> None:
    """They would go on with the centroids that they were lent."""
    assert parts(after(llama, pqcache(refit_every=0), 1))[1].pq_codes() is not None
    assert parts(after(llama, pqcache(), 1))[1].pq_codes() is None
