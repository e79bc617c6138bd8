"""Double Sparsity: heavy channels by hand, the choice against a plain reference, the label cache's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from baselines.double_sparsity import DoubleSparsity
from baselines.infinigen import InfiniGen
from baselines.oracle import Oracle
from pqcache.selective import Budget, SelectiveCache, attach
from tests.baselines.common import selections
from tests.baselines.drive import run
from tests.invariants.drive import Session, logits, tokens

QUARTER = Budget(ratio=0.25)


def prepared(model: PreTrainedModel, **hyper) -> DoubleSparsity:
    method = DoubleSparsity(**{"budget": QUARTER, "n_sink": 4, "calibration_tokens": 64, **hyper})
    method.prepare(model, torch.tensor([tokens(64, 9)]), None)
    return method


def rotated(model: PreTrainedModel, ids: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q (h, t, d) and k (h_kv, t, d) of a layer after RoPE, from the model's own modules."""
    attention, outputs = model.model.layers[layer].self_attn, {}
    hooks = [
        getattr(attention, name).register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
        for name in ("q_proj", "k_proj")
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    q, k = (outputs[name].unflatten(-1, (-1, 16)).transpose(1, 2) for name in ("q_proj", "k_proj"))
    cos, sin = model.model.rotary_emb(q, torch.arange(ids.shape[1])[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q[0], k[0]


@pytest.mark.parametrize("channel", ["qk", "q", "k"])
def test_heavy_channels_are_those_of_largest_weight(llama: PreTrainedModel, channel: str) -> None:
    """Token by token and head by head, from q and k of the plain model; four query heads share two KV heads."""
    ids = torch.tensor([tokens(64, 9)])
    q, k = rotated(llama, ids, layer=1)
    method = prepared(llama, channel=channel, channel_ratio=0.25)
    for kv_head, chosen in enumerate(method.channels[llama.model.layers[1].self_attn].tolist()):
        weight = [0.0] * 16
        for head in (2 * kv_head, 2 * kv_head + 1):
            for query, key in zip(q[head].tolist(), k[kv_head].tolist()):
                for c in range(16):
                    weight[c] += abs({"qk": query[c] * key[c], "q": query[c], "k": key[c]}[channel])
        assert chosen == sorted(sorted(range(16), key=lambda c, w=weight: -w[c])[:4])


def test_the_calibration_is_stored(llama: PreTrainedModel, tmp_path: Path) -> None:
    text = torch.tensor([tokens(64, 9)])
    first, second = (DoubleSparsity(budget=QUARTER, calibration_tokens=64) for _ in range(2))
    first.prepare(llama, text, tmp_path)
    (file,) = (tmp_path / "double_sparsity").iterdir()
    stamp = file.stat().st_mtime_ns
    second.prepare(llama, text, tmp_path)
    assert file.stat().st_mtime_ns == stamp
    for module, channels in first.channels.items():
        assert torch.equal(second.channels[module], channels)


def test_all_channels_in_full_are_the_oracle(llama: PreTrainedModel) -> None:
    prompt, steps = [tokens(120, 1), tokens(70, 2)], [[t, t] for t in tokens(8, 3)]
    exact = prepared(llama, channel_ratio=1.0, label_bits=16)
    oracle = Oracle(budget=QUARTER, n_sink=4, scope="candidates")
    torch.testing.assert_close(logits(llama, exact, prompt, steps), logits(llama, oracle, prompt, steps))


@pytest.mark.parametrize("bits", [4, 16])
def test_tokens_are_ranked_by_heavy_channels(llama: PreTrainedModel, bits: int) -> None:
    """Against the keys that a full cache holds; four bits may exchange tokens of nearly equal weight."""
    method = prepared(llama, channel_ratio=0.5, label_bits=bits, reduce="sum_logit")
    seen: list[Any] = []
    cache = SelectiveCache(llama, method)
    cache.observers.append(lambda layer, q, selected: seen.append((layer, q.clone(), selected)))
    agreed = []
    with attach(llama), torch.no_grad():
        session = Session(llama, cache, [tokens(100, 1)])
        for token in tokens(4, 2):
            session.step([token])
            for layer, q, selected in seen:
                keys = layer.store.view()[0][0]  # (h_kv, length, d)
                channels = method.channels[llama.model.layers[layer.layer_idx].self_attn]
                sinks, (end,) = selected.candidates.sinks, selected.candidates.ends
                for head, chosen in enumerate(selected.indices[0].tolist()):
                    query = q[0, 2 * head : 2 * head + 2, 0].sum(0)[channels[head]]
                    weight = (keys[head, sinks:end][:, channels[head]] @ query).tolist()
                    best = sorted(range(len(weight)), key=lambda i, w=weight: -w[i])[: len(chosen)]
                    agreed.append(len({i + sinks for i in best} & set(chosen)) / len(chosen))
            seen.clear()
    assert min(agreed) == 1 if bits == 16 else sum(agreed) / len(agreed) > 0.8


def test_label_bytes(llama: PreTrainedModel) -> None:
    """Two of 16 channels in four bits are a byte, and two fp16 parameters four more, per token and KV head."""
    layer = run(llama, prepared(llama, channel_ratio=1 / 8), 256).layers[0]
    channels = 2 * 2 * 8  # of two KV heads, int64
    nbytes = sum(x.numel() * x.element_size() for x in layer.index.tensors()["device"])
    assert nbytes == 256 * 2 * (1 + 4) + channels


def test_shared_calibration_with_infinigen(llama: PreTrainedModel) -> None:
    """Both watch the same pass: with A = 1 InfiniGen's sums of |q| are these."""
    ids = torch.tensor([tokens(64, 9)])
    method = InfiniGen(budget=QUARTER, skew="none", calibration_tokens=64, column_rule="q", partial_ratio=0.25)
    method.prepare(llama, ids, None)
    ours = prepared(llama, channel="q", channel_ratio=0.25)
    for module, basis in method.bases.items():
        assert torch.equal(basis.argmax(1).sort(-1).values, ours.channels[module])


@pytest.mark.parametrize(
    "hyper", [{"channel_ratio": 0.0}, {"channel": "kq"}, {"label_bits": 9}, {"calibration_tokens": 0}]
)
def test_bad_values_are_refused(hyper: dict) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        DoubleSparsity(**hyper)


def test_without_a_text_random_tokens_calibrate(llama: PreTrainedModel) -> None:
    calls = selections(llama, DoubleSparsity(budget=QUARTER, n_sink=4, calibration_tokens=32), 80, 2)
    assert len(calls) == 6
