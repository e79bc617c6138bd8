"""One method's choice in another method's bits: what is attended, what is stored, what it weighs."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined.coded import Coded
from baselines.snapkv import SnapKV
from baselines.zipcache import ZipCache
from pqcache.api.drive import logits, tokens
from pqcache.diagnostics import Capture
from pqcache.pq import PQCache
from pqcache.registry import method_class
from pqcache.selective import Budget, SelectiveCache
from pqcache.store.packed import PackedStore
from tests.baselines.drive import held, run
from tests.baselines.fed import Fed

QUARTER = {"budget": Budget(ratio=0.25)}
PQ = {"n_sink": 8, "b": 4}


def test_the_codec_stores_what_it_stores_alone(llama: PreTrainedModel) -> None:
    alone = run(llama, ZipCache(budget=Budget(ratio=0.2)), 150).layers
    coded = run(llama, Coded(**QUARTER, policy_options=PQ), 150).layers
    for a, b in zip(alone, coded, strict=True):
        assert torch.equal(a.store.widths.bits(), b.packed.widths.bits())
        for x, y in zip(a.store.view(), b.packed.view(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("codec", ["kivi", "gear"])
def test_an_evictor_drops_first_and_what_stays_is_packed(llama: PreTrainedModel, codec: str) -> None:
    """The same tokens stay, and decode to what the codec makes of them alone; a turn evicts among them again."""
    snapkv = {"n_sink": 4, "w": 8}
    options = {"kivi": {"group": 4, "residual": 8}, "gear": {"residual": 8}}[codec]
    method = Coded(**QUARTER, policy="snapkv", policy_options=snapkv, codec=codec, codec_options=options)
    first, alone = run(llama, method, 150).layers[0], run(llama, SnapKV(**QUARTER, **snapkv), 150).layers[0]
    assert held(first) == held(alone)
    packed = Fed(method_class(codec)(**options), *alone.store.view())
    for x, y in zip(first.packed.view(), packed.store.view(), strict=True):
        assert torch.equal(x, y)
    turned = run(llama, method, 150, steps=20, turn=30).layers[0]
    assert turned.packed.lengths == [len(head) for head in held(turned)][:1]
    assert all(x.isfinite().all() for x in turned.packed.view())


@pytest.mark.parametrize(
    ("codec", "options", "dtype", "served"),
    [
        ("zipcache", {"gap": 5}, torch.float64, False),
        ("zipcache", {"gap": 5}, torch.float32, True),
        ("int8", {}, torch.float32, True),
        ("kivi", {"group": 16, "residual": 32}, torch.float32, False),
    ],
)
def test_attention_over_chosen_codes_equals_a_naive_computation(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, codec: str, options: dict, dtype: torch.dtype, served: bool
) -> None:
    """From the whole decoded store, by a kernel where one serves: softmax over sinks, selected, window and current token."""
    pytest.importorskip("numba")
    model = deepcopy(llama).to(dtype)
    cache = SelectiveCache(model, Coded(**QUARTER, policy_options=PQ, codec=codec, codec_options=options))
    layer: Any = cache.layers[0]
    read, parts, chosen = [], [], []
    stock = PackedStore.attend_in_place

    def counted(store: PackedStore, q: torch.Tensor, *args: Any) -> Any:
        if store is layer.packed:  # before the step packs
            read.append((q[0, :, 0], *(x[0].clone() for x in store.view())))
        part = stock(store, q, *args)
        parts.append(part is not None)
        return part

    monkeypatch.setattr(PackedStore, "attend_in_place", counted)
    cache.watchers.append(capture := Capture())
    cache.observers.append(lambda seen, q, selected: chosen.append(selected) if seen is layer else None)
    logits(model, cache.method, [tokens(150, 1)], [[token] for token in tokens(12, 2)], cache=cache)
    outs = [call.out[0, 0] for call in capture.calls if call.layer is layer and call.ctx.step.decode]
    assert parts == [served] * 12 * len(cache.layers)
    for (q, k, v), out, selected in zip(read, outs, chosen, strict=True):
        length = k.shape[1]
        scores = torch.einsum("hd,hmd->hm", q, k.repeat_interleave(2, 0)) * 16**-0.5
        mask = torch.zeros(2, length, dtype=torch.bool)
        mask[:, :8] = mask[:, length - 1 - selected.local[0] :] = True
        mask.scatter_(1, selected.indices[0], True)
        weights = scores.masked_fill(~mask.repeat_interleave(2, 0), -torch.inf).softmax(-1)
        want = torch.einsum("hm,hmd->hd", weights, v.repeat_interleave(2, 0))
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.rest
def test_probes_of_generated_tokens_see_the_selection(llama: PreTrainedModel) -> None:
    cache = run(llama, Coded(**QUARTER, policy_options=PQ, codec_options={"gap": 20}), 150, 18)
    store = cache.layers[0].packed
    probes = ZipCache(budget=Budget(ratio=0.2), gap=20).rule().positions(20, 150)
    seen = [p for p in probes if p < 18]
    assert int(store.seen_by[0, 0, 0]) == len(seen)
    assert bool(store.sums.any()) == bool(seen)


@pytest.mark.rest
def test_exact_codec_equals_the_policy_alone(llama: PreTrainedModel) -> None:
    prompt, steps = [tokens(120, 1)], [[t] for t in tokens(20, 2)]
    for policy, options, cls in (("pqcache", PQ, PQCache), ("snapkv", {"n_sink": 4, "w": 8}, SnapKV)):
        coded = Coded(**QUARTER, policy=policy, policy_options=options, codec_budget=1.0)
        torch.testing.assert_close(
            logits(llama, coded, prompt, steps), logits(llama, cls(**QUARTER, **options), prompt, steps)
        )
