"""MagicPIG samples as often as its formula says, and its weighted softmax estimates the whole one."""

import contextlib

import pytest
import torch

from baselines.magicpig import FLOOR, MagicPIG, sampled_probability
from pqcache import kernels
from pqcache.selective import Budget
from tests.baselines.common import OneLayer
from tests.thin import thin

BITS, TABLES, SEEDS, S, D = 3, 6, 300, 48, 16


@pytest.mark.parametrize("ratio", thin([0.3, 0.9], 2))  # 0.3: more is sampled than the budget has room for
def test_samples_and_weights(ratio: float) -> None:
    draw, shapes = torch.Generator().manual_seed(4), ((2, S), (2, S), (4, 1), (2, 1), (2, 1))
    k, v, q, key, value = (torch.randn(1, heads, t, D, generator=draw) for heads, t in shapes)
    plan = MagicPIG(budget=Budget(ratio=ratio), n_sink=4, recent=6).plan(S, 0, 1)
    often, total = torch.zeros(4, S), torch.zeros(4)
    keys = k[0].repeat_interleave(2, 0)
    candidates = slice(4, S - plan.local)
    apart = keys - keys[:, candidates].mean(1, keepdim=True)
    chance = sampled_probability(torch.cosine_similarity(q[0], apart, dim=-1), BITS, TABLES)[:, candidates]
    logits = (keys @ q[0].mT / 4)[..., 0]
    for seed in range(SEEDS):
        method = MagicPIG(budget=Budget(ratio=ratio), n_sink=4, recent=6, bits=BITS, tables=TABLES, seed=seed)
        one = OneLayer(method, k, v, h=4)
        chosen: list = []
        select = one.layer.index.select
        one.layer.index.select = lambda *args, select=select, chosen=chosen: chosen.append(select(*args)) or chosen[0]
        with kernels.plain_torch() if seed % 2 else contextlib.nullcontext():
            one.step(q, key, value)
        indices, weight = chosen[0].indices[0], chosen[0].log_weight[0]
        assert int((indices >= 0).sum(-1).max()) <= plan.k
        for head in range(4):
            mine = indices[head] >= 0
            often[head, indices[head, mine]] += 1
            total[head] += (logits[head, indices[head, mine]] + weight[head, mine]).exp().sum() / SEEDS
    if ratio == 0.9:
        error = (often[:, candidates] / SEEDS - chance).abs()
        assert (error < 4.5 * (chance * (1 - chance) / SEEDS).sqrt() + 1e-3).all()
    # the weighted sum of what is sampled estimates the sum over all candidates
    expected = (logits[:, candidates].exp() * chance / (chance + FLOOR)).sum(-1)
    assert (total / expected - 1).abs().max() < 0.15


def test_bytes() -> None:
    """A code of 2 bytes per key and table; the directions of 16 layers are there once."""
    method = MagicPIG(budget=Budget(ratio=0.5), n_sink=4)
    k = torch.randn(1, 2, 300, D)
    one = OneLayer(method, k, k, h=4)
    codes, mean, directions = one.layer.index.tensors()["device"]
    assert codes.numel() * codes.element_size() == 512 * 2 * 150 * 2  # 301 tokens in buffers of 256
    assert mean.numel() == 2 * D and directions is method.directions(15, k) is not method.directions(16, k)
    assert directions.numel() == 2 * D * 150 * 10
