"""TOVA, KeyDiff and Expected Attention keep what their papers' formulas say, computed here without the methods' code."""

import torch
from transformers import PreTrainedModel

from baselines.expected_attention import ExpectedAttention
from baselines.keydiff import KeyDiff
from baselines.tova import TOVA
from pqcache.diagnostics import Capture
from pqcache.selective import Budget
from tests.baselines.common import OneLayer
from tests.baselines.drive import held, run
from tests.baselines.test_evictors import D, draw_inputs


def test_tova_drops_what_the_current_query_attends_to_least() -> None:
    """All heads alike, whatever earlier queries attended to; the paper's protocol may drop the newest token."""
    for protocol, newest in (("aligned", 1), ("paper", 0)):
        q, k, v = draw_inputs(1, 6, 3, 60, torch.float32, 5)
        method = TOVA(budget=Budget(ratio=0.5), n_sink=0, protocol=protocol)
        one = OneLayer(method, k[:, :, :40], v[:, :, :40], 6, q=q[:, :, :40])
        kept = list(range(40))
        for at in range(39, 60):
            if at > 39:
                one.step(*(x[:, :, at : at + 1] for x in (q, k, v)))
                kept.append(at)
            weights = (q[0, :, at, None] @ k[0, :, kept].repeat_interleave(2, 0).mT * D**-0.5).softmax(-1).mean((0, 1))
            if newest:
                weights[-1] = 1
            kept = sorted(kept[i] for i in weights.topk(20).indices)
            assert held(one.layer) == [kept] * 3


def test_keydiff_keeps_keys_that_point_elsewhere() -> None:
    angles = torch.tensor([0.1, 0.0, 3.0, 0.2, 1.5, -0.1, 0.3, -1.2, 0.15, 0.05])
    k = torch.zeros(1, 1, 10, D)
    k[0, 0, :, 0], k[0, 0, :, 1] = angles.cos(), angles.sin()
    k *= torch.linspace(1, 9, 10)[:, None]  # lengths do not count
    method = KeyDiff(budget=Budget(ratio=0.3), protocol="release")
    assert held(OneLayer(method, k, k, 2, q=torch.randn(1, 2, 10, D)).layer) == [[2, 4, 7]]


def test_expected_attention_is_that_of_normal_queries_at_future_positions(llama: PreTrainedModel) -> None:
    s, sinks, future = 120, 4, 16
    method = ExpectedAttention(budget=Budget(ratio=0.25), protocol="release", n_future=future, epsilon=0.01)
    cache = run(llama, method, s, watchers=[capture := Capture()])
    chunked = run(llama, method, s, chunk=50)
    for index, call in enumerate(capture.calls):
        module, d, h_kv = call.ctx.module, call.q.shape[3], call.k.shape[1]
        plain = module.q_proj(call.ctx.hidden[0, sinks:]).unflatten(-1, (-1, d)).transpose(0, 1)
        # rotations of the halves by position times frequency
        angle = torch.arange(s, s + future)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
        rotation = torch.zeros(d, d, dtype=plain.dtype)
        for half in range(d // 2):
            cos, sin = angle[:, half].cos().mean(), angle[:, half].sin().mean()
            rotation[half, half] = rotation[half + d // 2, half + d // 2] = cos
            rotation[half + d // 2, half], rotation[half, half + d // 2] = sin, -sin
        kept = []
        for head in range(h_kv):
            keys, weights = call.k[0, head, sinks:], 0
            for query in plain.unflatten(0, (h_kv, -1))[head]:
                mean, covariance = rotation @ query.mean(0), rotation @ query.T.cov(correction=0) @ rotation.T
                scores = keys @ mean / d**0.5 + torch.stack([key @ covariance @ key for key in keys]) / d / 2
                weights = weights + scores.softmax(-1) + 0.01
            best = (weights * call.v[0, head, sinks:].norm(dim=-1)).topk(s // 4 - sinks).indices + sinks
            kept.append([*range(sinks), *sorted(best.tolist())])
        assert held(cache.layers[index]) == held(chunked.layers[index]) == kept
