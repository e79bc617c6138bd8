"""One method's choice in another method's bits: what is attended, what is stored, what it weighs."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from baselines.combined.coded import Coded
from baselines.snapkv import SnapKV
from baselines.zipcache import ZipCache
from pqcache.api.drive import logits, tokens
from pqcache.pq import PQCache
from pqcache.registry import method_class
from pqcache.selective import Budget
from pqcache.store.packed import PackedStore
from tests.baselines.common import OneLayer
from tests.baselines.drive import held, run
from tests.baselines.fed import Fed
from tests.drawn import drawn

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
    monkeypatch: pytest.MonkeyPatch, codec: str, options: dict, dtype: torch.dtype, served: bool
) -> None:
    """From the whole decoded store, by a kernel where one serves: softmax over sinks, selected, window and current token."""
    pytest.importorskip("numba")
    stock, parts = PackedStore.attend_in_place, []

    def counted(*args: Any) -> Any:
        part = stock(*args)
        parts.append(part is not None)
        return part

    monkeypatch.setattr(PackedStore, "attend_in_place", counted)
    q, k, v = (drawn(seed, 1, heads, 162, 16, dtype=dtype) for seed, heads in enumerate((4, 2, 2)))
    method = Coded(**QUARTER, policy_options=PQ, codec=codec, codec_options=options)
    one = OneLayer(method, k[:, :, :150], v[:, :, :150], 4, q=q[:, :, :150])
    for t in range(150, 162):
        new = [x[:, :, t : t + 1] for x in (q, k, v)]
        # the new token is packed after the step
        keys, values = (torch.cat(pair, 2) for pair in zip(one.layer.packed.view(), new[1:], strict=True))
        out, selected = one.step(*new), one.layer.selected
        mask = torch.zeros(1, 2, t + 1, dtype=torch.bool)
        mask[..., :8] = mask[..., t - selected.local[0] :] = True
        mask = mask.scatter(2, selected.indices, True).repeat_interleave(2, 1)[:, :, None]
        want = scaled_dot_product_attention(new[0], keys, values, mask, enable_gqa=True)
        torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert parts == [served] * 12


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
