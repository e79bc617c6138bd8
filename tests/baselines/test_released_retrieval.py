"""protocol=release of PQCache, the oracle, SparQ and Double Sparsity: where it leaves the papers' protocol, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.double_sparsity import DoubleSparsity
from baselines.full import Full
from baselines.oracle import Oracle
from baselines.sparq import SparQ
from pqcache.pq import PQCache
from pqcache.selective import Budget, NotApplicable, SelectiveCache, attach
from pqcache.selective.retrieval import RetrievalMethod
from tests.invariants.conftest import _one_thread, llama
from tests.invariants.drive import Session, logits, tokens

__all__ = ["_one_thread", "llama"]

FIFTH = Budget(ratio=0.2)
METHODS = (PQCache, Oracle, SparQ, DoubleSparsity)


@pytest.mark.parametrize(
    ("cls", "s", "aligned", "release"),
    [
        # 8165 of the tokens after the sinks: 1633 in all, or 816.5 for each half, rounded down
        (PQCache, 8197, (32, 816, 817), (32, 816, 816)),
        (PQCache, 8192, (32, 816, 816), (32, 816, 816)),
        # the current token is the last of the window's 816, or of 817
        (Oracle, 8192, (32, 816, 816), (32, 815, 816)),
        (Oracle, 8197, (32, 816, 817), (32, 816, 816)),
        # of the whole prompt: 1638
        (SparQ, 8192, (32, 816, 816), (32, 819, 819)),
        # no sinks, no window
        (DoubleSparsity, 8192, (32, 816, 816), (0, 0, 1638)),
    ],
)
def test_partitions(cls: type[RetrievalMethod], s: int, aligned: tuple, release: tuple) -> None:
    for protocol, want in (("aligned", aligned), ("release", release)):
        plan = cls(budget=FIFTH, protocol=protocol).plan(s, 0, 32)
        assert (plan.sinks, plan.local, plan.k) == want


def test_defaults_that_depend_on_the_protocol() -> None:
    own: dict[str, dict[str, Any]] = {
        "pqcache": {"cache_policy": "lfu", "max_iter": 5, "reduce": "sum_softmax"},
        "oracle": {"cache_policy": "lru", "reduce": "sum_softmax", "scope": "all"},
        "sparq": {"reduce": "sum_logit", "n_sink": 32, "reallocate": False},
        "double_sparsity": {"reduce": "none", "n_sink": 0, "recent_ratio": 0.0, "per_query_head": True},
    }
    for cls in METHODS:
        assert cls.released
        for protocol in ("aligned", "paper"):
            hyper = cls(protocol=protocol).hyper_parameters()
            expected = ("lru", "sum_softmax", 32, 0.5)
            assert tuple(hyper[k] for k in ("cache_policy", "reduce", "n_sink", "recent_ratio")) == expected
        hyper = cls(protocol="release").hyper_parameters()
        assert {key: hyper[key] for key in own[cls.name]} == own[cls.name]
        typed = cls(protocol="release", cache_policy="lru", reduce="max_logit", n_sink=5, recent_ratio=0.25)
        assert (typed.cache_policy, typed.reduce, typed.n_sink, typed.recent_ratio) == ("lru", "max_logit", 5, 0.25)
    with pytest.raises(NotApplicable, match="no code of full is published"):
        Full(protocol="release")  # the command line runs it as aligned: it has nothing to differ in


def test_double_sparsity_chooses_for_each_query_head(llama: PreTrainedModel) -> None:
    """Channels, rounding and choice of every query head, from the keys that the store holds."""
    method = DoubleSparsity(
        budget=Budget(ratio=0.25), protocol="release", channel_ratio=0.5, label_bits=8, calibration_tokens=64
    )
    method.prepare(llama, torch.tensor([tokens(64, 9)]), None)
    shared = DoubleSparsity(budget=Budget(ratio=0.25), channel_ratio=0.5, calibration_tokens=64)
    shared.prepare(llama, torch.tensor([tokens(64, 9)]), None)
    seen: list[Any] = []
    cache = SelectiveCache(llama, method)
    cache.observers.append(lambda layer, q, selected: seen.append((layer, q.clone(), selected)))
    with attach(llama), torch.no_grad():
        Session(llama, cache, [tokens(100, 1)]).step([7])
    modules = {layer.layer_idx: llama.model.layers[layer.layer_idx].self_attn for layer, _, _ in seen}
    agreed, own = [], 0
    for layer, q, selected in seen:
        keys, (end,) = layer.store.view()[0][0], selected.candidates.ends
        channels = method.channels[modules[layer.layer_idx]]
        assert channels.shape == (4, 8) and (selected.candidates.sinks, end) == (0, 100)
        own += sum(not torch.equal(channels[h], channels[h - 1]) for h in (1, 3))
        for head, chosen in enumerate(selected.indices[0].tolist()):
            assert len(chosen) == 25
            query = q[0, head, 0, channels[head]].double()
            low, step = query.min(), (query.max() - query.min()) / 255
            query = ((query - low) / step).round() * step + low
            weight = keys[head // 2, :end][:, channels[head]].double() @ query
            best = weight.argsort(descending=True)[:25].tolist()
            agreed.append(len(set(best) & set(chosen)) / 25)
    assert own > 0 and sum(agreed) / len(agreed) > 0.97  # labels of 8 bits may exchange tokens of nearly equal weight


def test_double_sparsity_scores_positions_as_it_scores_all(llama: PreTrainedModel) -> None:
    method = DoubleSparsity(budget=Budget(ratio=0.25), protocol="release", channel_ratio=0.5, calibration_tokens=64)
    method.prepare(llama, torch.tensor([tokens(64, 9)]), None)
    seen: list[Any] = []
    cache = SelectiveCache(llama, method)

    def check(layer: Any, q: torch.Tensor, selected: Any) -> None:
        at = torch.tensor([[[3, 40, 90], [0, 1, 99]]])
        ctx = type("Scaled", (), {"scaling": 1.0})()
        every = layer.index.score(q, 0, 100, ctx)
        some = layer.index.score_at(q, at, ctx)
        seen.append(torch.allclose(some, every.gather(2, at.repeat_interleave(2, 1)), rtol=1e-5, atol=1e-6))

    cache.observers.append(check)
    with attach(llama), torch.no_grad():
        Session(llama, cache, [tokens(100, 1)]).step([7])
    assert seen == [True] * 3


def test_sparq_sums_logits(llama: PreTrainedModel) -> None:
    """The released comparison's ranking is that of reduce=sum_logit, and not that of the softmaxes."""
    prompt, steps = [tokens(120, 1)], [[t] for t in tokens(4, 3)]
    hyper: dict[str, Any] = {"budget": Budget(ratio=0.2), "n_sink": 4, "r": 2}
    release = logits(llama, SparQ(protocol="release", **hyper), prompt, steps)
    assert torch.equal(release, logits(llama, SparQ(protocol="paper", reduce="sum_logit", **hyper), prompt, steps))
    assert not torch.equal(release, logits(llama, SparQ(protocol="paper", **hyper), prompt, steps))
