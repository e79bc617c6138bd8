"""Bounds of a decode step, and standard attention, on a tiny geometry."""

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from baselines.h2o import H2O
from baselines.zipcache import MiKV
from pqcache.api.drive import tokens
from pqcache.measure.machine import ceilings, slug
from pqcache.measure.roofline import bound, prompt, random_model, weight_bytes
from pqcache.pq import PQCache
from pqcache.selective import Budget, Method, SelectiveCache, attach, generate


def test_the_bound_is_what_a_step_must_move() -> None:
    """Two layers, two KV heads of 16, fp32: 256 bytes a token and layer; a host store fetches k tokens of each."""
    model = random_model("tiny")
    untied = sum(p.numel() for p in model.parameters()) - 256 * 64
    assert weight_bytes(model) == 4 * untied
    run = generate(model, PQCache(store="host", b=4, budget=Budget(ratio=0.25)), prompt(model, 400), max_new_tokens=5)
    plan = PQCache(b=4, budget=Budget(ratio=0.25)).plan(400, 0, 2)
    limits = {"memory_gb_per_s": 1.0, "link_gb_per_s": 0.1}
    measured = bound(model, run, limits)
    assert measured["weights_ms"] == pytest.approx(4 * untied / 1e6)
    assert measured["link_ms"] == pytest.approx(2 * 256 * plan.k / 1e5)
    assert run.attended_tokens == 32 + plan.local + plan.k + 1
    assert measured["cache_ms"] == pytest.approx(2 * 256 * run.attended_tokens / 1e6)
    full = bound(model, generate(model, Full(), prompt(model, 400), max_new_tokens=5), limits)
    assert full["link_ms"] == 0 and full["cache_ms"] > measured["cache_ms"]


def test_tied_embeddings_are_read_whole(llama: PreTrainedModel) -> None:
    every = sum(p.numel() * p.element_size() for p in llama.parameters())
    assert weight_bytes(llama) == every - llama.get_input_embeddings().weight.numel() * 8
    llama.lm_head.weight, old = llama.get_input_embeddings().weight, llama.lm_head.weight
    try:
        assert weight_bytes(llama) == sum(p.numel() * p.element_size() for p in llama.parameters())
    finally:
        llama.lm_head.weight = old


def test_ceilings_are_measured() -> None:
    measured = ceilings(torch.device("cpu"), nbytes=1 << 20, rounds=1)
    assert 0 < measured["link_gb_per_s"] < measured["memory_gb_per_s"]
    assert slug("AMD EPYC 7B13, 2 of 2 CPU threads") == "amd-epyc-7b13-2-of-2-cpu-threads"


@pytest.mark.parametrize(
    "make", [lambda b: H2O(budget=b), lambda b: H2O(budget=b, n_sink=4, mode="static"), lambda b: MiKV(budget=b)]
)
def test_standard_attention_gives_the_same_answers(llama: PreTrainedModel, make) -> None:
    """In float64; a method that needs column sums takes them from the same probabilities."""
    method: Method = make(Budget(ratio=0.2))
    ids = torch.tensor([tokens(120, 1)])
    ours, standard = (generate(llama, method, ids, max_new_tokens=6, attn=attn) for attn in ("sdpa", "standard"))
    assert ours.token_ids == standard.token_ids and ours.resident_bytes == standard.resident_bytes
    with attach(llama), torch.no_grad():
        caches = [SelectiveCache(llama, make(Budget(ratio=0.2)), attn=attn) for attn in ("sdpa", "standard")]
        logits = [llama(ids, past_key_values=cache).logits for cache in caches]
    torch.testing.assert_close(*logits)
    assert caches[1].layers[0].fresh is None
