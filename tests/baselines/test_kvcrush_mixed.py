"""KVCrush with packed representatives: the same tokens, the important ones exact, the others in few bits, fewer bytes."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from baselines.combined.kvcrush_mixed import KVCrushMixed, SplitStore
from baselines.kvcrush import KVCrush
from pqcache.selective import Budget
from tests.baselines.common import OneLayer
from tests.baselines.drive import held, run
from tests.drawn import drawn

QUARTER = {"budget": Budget(ratio=0.25), "base_options": {"n_sink": 4, "w": 8}}
KINDS: list[dict[str, Any]] = [
    {},
    {"rep_ratio": 1.0, "bits": 2},
    {"grouping": "kmeans", "bits": 8, "group": 4, "keys": "token"},
    {"page": 4, "bits": 3, "group": None, "keys": "token"},
    {"base": "h2o", "base_options": {"n_sink": 4}, "reps": 9},
]


def small(kind: dict[str, Any]) -> KVCrushMixed:
    return KVCrushMixed(**{**QUARTER, "group": 8, **kind})


def alone(kind: dict[str, Any]) -> KVCrush:
    return KVCrush(**{**QUARTER, **{key: x for key, x in kind.items() if key not in ("bits", "group", "keys")}})


def by_position(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first row in the order of positions, (h_kv, m, d)."""
    order = layer.where(layer.store.lengths)[0, :, : layer.store.lengths[0]].argsort(-1)[..., None]
    k, v = (x[0].gather(1, order.expand(-1, -1, x.shape[3])) for x in layer.store.view())
    return k, v


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_tokens_stay_and_only_representatives_are_coded(llama: PreTrainedModel, kind: dict[str, Any]) -> None:
    mixed, exact = run(llama, small(kind), 170).layers[0], run(llama, alone(kind), 170).layers[0]
    assert held(mixed) == held(exact)
    store, bits = mixed.store, small(kind).bits
    packed, unit = store.packed.lengths[0], 8 if small(kind).keys == "channel" else 1  # keys in whole groups
    assert packed > 0 and store.packed.k.body == [packed // unit * unit] and store.packed.v.body == [packed]
    where = mixed.where(store.lengths)[0, :, : store.lengths[0]]
    for stream, (got, full) in zip((store.packed.k, store.packed.v), zip(by_position(mixed), by_position(exact))):
        codes, step, low = (part.data[0] for part in stream.codec.parts)
        assert codes.dtype == torch.uint8 and codes.shape[-1] == -(-got.shape[2] * bits // 8)
        assert step.dtype == low.dtype == torch.float16
        coded = torch.zeros(got.shape[:2], dtype=torch.bool)
        coded.scatter_(1, where.argsort(-1).argsort(-1)[:, : stream.body[0]], True)
        assert torch.equal(got[~coded], full[~coded])  # bit by bit
        width = step.float().amax() / 2 + 0.01 * full.abs().amax()
        assert (got[coded] - full[coded]).abs().amax() <= width
        assert not torch.equal(got[coded], full[coded])


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_attention_equals_a_naive_computation(kind: dict[str, Any]) -> None:
    """Softmax over everything held, decoded; rows of different length, one without representatives."""
    q, k, v = (drawn(heads, 3, heads, 156, 16, dtype=torch.float64) for heads in (4, 2, 2))
    one = OneLayer(small(kind), k[:, :, :150], v[:, :, :150], 4, [150, 4, 61], q[:, :, :150])
    store = one.layer.store
    for t in range(150, 156):
        out = one.step(*(x[:, :, t : t + 1] for x in (q, k, v)))
        keys, values = store.view()
        mask = torch.arange(keys.shape[2]) < torch.tensor(store.lengths)[:, None, None, None]
        want = scaled_dot_product_attention(q[:, :, t : t + 1], keys, values, mask, enable_gqa=True)
        torch.testing.assert_close(out, want.transpose(1, 2))
    assert store.packed.lengths[1] == 0 < min(store.packed.lengths[0::2])


def test_a_new_turn_chooses_and_codes_again(llama: PreTrainedModel) -> None:
    layer = run(llama, small({}), 150, steps=7, turn=40).layers[0]
    assert isinstance(layer.store, SplitStore)
    total = 4 + int((150 + 7 + 40 - 4) * 0.25 + 1e-6)
    assert layer.store.lengths == [total] and layer.store.packed.lengths == [int((total - 4) * 0.25)]
    for head in held(layer):
        assert len(set(head)) == total and head[:4] == [0, 1, 2, 3] and head[-8:] == list(range(189, 197))


def test_a_channel_that_is_large_in_every_token_takes_no_bits_from_others() -> None:
    k = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    k[..., 3] += 100
    store = small({}).make_store()
    store.load(k, k, [64])
    store.pack(everything=True)
    error = (store.view()[0] - k).abs()[..., :3]
    assert store.k.body == [64] and error.amax() < 0.3  # half a step of 15 over the range of 8 keys
