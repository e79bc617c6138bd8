"""Double Sparsity: heavy channels by hand, the choice against a plain reference, the label cache's bytes."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from baselines.double_sparsity import DoubleSparsity
from baselines.full import Full
from baselines.oracle import Oracle
from pqcache.api.drive import logits, tokens
from pqcache.diagnostics import Capture
from pqcache.selective import Budget, generate
from tests.baselines.drive import run

QUARTER = Budget(ratio=0.25)


def prepared(model: PreTrainedModel, **hyper) -> DoubleSparsity:
    method = DoubleSparsity(**{"budget": QUARTER, "n_sink": 4, "calibration_tokens": 64, **hyper})
    method.prepare(model, torch.tensor([tokens(64, 9)]), None)
    return method


@pytest.mark.parametrize("channel", ["qk", "q", "k"])
def test_heavy_channels_are_those_of_largest_weight(llama: PreTrainedModel, channel: str) -> None:
    """From q and k of a full cache's run; four query heads share two KV heads."""
    generate(llama, Full(), torch.tensor([tokens(64, 9)]), max_new_tokens=1, watchers=[capture := Capture()])
    q, k = capture.calls[1].q[0].unflatten(0, (2, 2)), capture.calls[1].k[0][:, None]
    method = prepared(llama, channel=channel, channel_ratio=0.25)
    weight = {"qk": q * k, "q": q, "k": k}[channel].abs().sum((1, 2))
    best = weight.topk(4).indices.sort().values
    assert method.channels[llama.model.layers[1].self_attn].tolist() == best.tolist()


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

    run(llama, method, 100, 4, observers=[check])
    assert len(agreed) == 4 * 3 * (4 if released else 2)
    assert sum(agreed) / len(agreed) >= least
