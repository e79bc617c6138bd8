"""Double Sparsity: heavy channels by hand, the choice against a plain reference, the label cache's bytes."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from baselines.double_sparsity import DoubleSparsity
from baselines.oracle import Oracle
from pqcache.api.drive import logits, tokens
from pqcache.selective import Budget, SelectiveCache

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


def test_all_channels_in_full_are_the_oracle(llama: PreTrainedModel) -> None:
    prompt, steps = [tokens(120, 1), tokens(70, 2)], [[t, t] for t in tokens(8, 3)]
    exact = prepared(llama, channel_ratio=1.0, label_bits=16)
    oracle = Oracle(budget=QUARTER, n_sink=4, scope="candidates")
    torch.testing.assert_close(logits(llama, exact, prompt, steps), logits(llama, oracle, prompt, steps))


@pytest.mark.parametrize(
    ("protocol", "bits", "least"), [("aligned", 4, 0.8), ("aligned", 16, 1.0), ("release", 8, 0.97)]
)
def test_tokens_are_ranked_by_heavy_channels(llama: PreTrainedModel, protocol: str, bits: int, least: float) -> None:
    """Against the keys that a full cache holds; few bits may exchange tokens of nearly equal weight.

    As released: for each query head by channels of its own, and the query is rounded, too.
    """
    released = protocol == "release"
    own: dict[str, Any] = {"n_sink": 0} if released else {"reduce": "sum_logit"}
    method = prepared(llama, channel_ratio=0.5, label_bits=bits, protocol=protocol, **own)
    agreed: list[float] = []

    def check(layer: Any, q: torch.Tensor, selected: Any) -> None:
        keys = layer.store.view()[0][0]  # (h_kv, length, d)
        channels = method.channels[llama.model.layers[layer.layer_idx].self_attn]
        sinks, (end,) = selected.candidates.sinks, selected.candidates.ends
        assert channels.shape == ((4, 8) if released else (2, 8))
        for head, chosen in enumerate(selected.indices[0].tolist()):
            group = 4 // len(channels)
            query = q[0, group * head : group * head + group, 0].sum(0)[channels[head]]
            if released:
                low, step = query.min(), (query.max() - query.min()) / 255
                query = ((query - low) / step).round() * step + low
            weight = keys[head * group // 2, sinks:end][:, channels[head]] @ query
            best = (weight.argsort(descending=True)[: len(chosen)] + sinks).tolist()
            agreed.append(len(set(best) & set(chosen)) / len(chosen))

    cache = SelectiveCache(llama, method)
    cache.observers.append(check)
    logits(llama, method, [tokens(100, 1)], [[token] for token in tokens(4, 2)], cache=cache)
    assert len(agreed) == 4 * 3 * (4 if released else 2)
    assert sum(agreed) / len(agreed) >= least
