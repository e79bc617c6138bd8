"""KV heads that keep different numbers of tokens: how many each, and that no byte more is held."""

import pytest
from transformers import PreTrainedModel

from baselines.adakv import AdaKV
from baselines.pyramidkv import PyramidKV
from baselines.snapkv import SnapKV
from pqcache.selective import Budget
from pqcache.selective.budget import Plan
from pqcache.selective.ragged import RaggedLayer
from tests.baselines.drive import held, random_scores, run

TOKEN = 2 * 16 * 8  # K and V of a token of one head of the small llama, float64
B = Budget(ratio=0.25)


@pytest.mark.parametrize("base", ["snapkv", "pyramidkv"])
@pytest.mark.parametrize("turn", [0, 60])
def test_bytes_are_the_sum_over_the_heads(llama: PreTrainedModel, base: str, turn: int) -> None:
    """K, V and an int32 position of each entry, whatever the longest head holds; a buffer's step for the tokens since."""
    method = AdaKV(budget=B, base=base, base_options={"n_sink": 4, "w": 8})
    cache = run(llama, method, 600, steps=3, turn=turn)
    total, apart, newer = 0, [], 0 if turn else 3  # what a turn ends with has no tokens since
    for layer in cache.layers:
        assert isinstance(layer, RaggedLayer)
        heads = held(layer)
        plan = method.plan(603 + turn if turn else 600, layer.layer_idx, 3)
        assert sum(map(len, heads)) == 2 * (plan.total + newer)
        apart.append(len(heads[0]) != len(heads[1]))
        total += 2 * plan.total * (TOKEN + 4) + 2 * newer * TOKEN
    assert all(apart)
    assert sum(cache.content_by_tier().values()) == total
    slack = 0 if turn else 3 * 2 * (256 - 3) * TOKEN
    assert cache.resident_bytes() == {"device": total + slack}


@pytest.mark.parametrize(
    ("floor", "protocol"), [(0.0, "aligned"), (0.3, "aligned"), (1.0, "aligned"), (0.3, "release")]
)
def test_adakv_divides_by_the_best_of_all_heads(floor: float, protocol: str) -> None:
    """Algorithms 1 and 2, by sorting all scores; with floor=1 every head keeps what SnapKV keeps."""
    options = {"n_sink": 2, "w": 4, "kernel": 1}
    method = AdaKV(budget=B, floor=floor, protocol=protocol, base_options=options)
    scores = random_scores(6, 80, 3)
    scores[2:4] *= 0.7  # the second head's group
    plan, heads = Plan(2, 4, 15), 3
    got = method.choose_heads(list(scores.unflatten(0, (heads, 2))), [80] * heads, plan, 0)
    weights = scores.unflatten(0, (heads, 2)).mean(1)[:, 2:76]
    best = weights.flatten().sort(descending=True).indices[: heads * 15] // 74
    for head in range(heads):
        deserved = int((best == head).sum())
        size = len(got[head]) - 6
        assert abs(size - ((1 - floor) * deserved + floor * 15)) < 1 + (protocol == "release")
        middle = sorted((weights[head].sort(descending=True).indices[:size] + 2).tolist())
        assert got[head].tolist() == [0, 1, *middle, 76, 77, 78, 79]
    if protocol == "aligned":
        assert sum(map(len, got)) == heads * plan.total


def test_adakv_takes_evictors_that_prune_once(llama: PreTrainedModel) -> None:
    for base in (SnapKV, PyramidKV):
        cache = run(llama, AdaKV(budget=B, base=base.name, floor=1.0), 300)
        alone = run(llama, base(budget=B), 300)
        assert [held(layer) for layer in cache.layers] == [held(layer) for layer in alone.layers]
