"""protocol=release of the evictors, against values worked out by hand from the authors' code."""

from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from baselines.kvcrush import KVCrush
from baselines.pyramidkv import PyramidKV
from baselines.snapkv import SnapKV
from baselines.streaming import RollingLayer, StreamingLLM
from pqcache.selective import Budget, Plan
from pqcache.store.resident import ResidentStore
from tests.baselines.drive import choose, held, run

RELEASE = {"protocol": "release"}


def test_snapkv_pools_over_zeros() -> None:
    """(0 + 4 + 1) / 3 at the edges, where the other protocols divide by the two tokens there are."""
    scores = torch.tensor([[4.0, 1.0, 1.0, 7.0, 1.0, 9.0]])
    got = SnapKV(kernel=3, pooling="avg", **RELEASE).smooth(scores, 5)
    torch.testing.assert_close(got, torch.tensor([[5 / 3, 2, 3, 3, 8 / 3, 9]]))
    for protocol in ("aligned", "paper"):
        mean, most = (SnapKV(kernel=3, pooling=how, protocol=protocol).smooth(scores, 5) for how in ("avg", "max"))
        assert (mean.tolist(), most.tolist()) == ([[2.5, 2, 3, 3, 4, 9]], [[4, 4, 7, 7, 7, 9]])


@pytest.mark.parametrize("cls", [SnapKV, PyramidKV, KVCrush])
def test_a_new_turn_is_added(llama: PreTrainedModel, cls: type) -> None:
    """64 tokens of the prompt, 5 generated ones, and all 30 of the turn."""
    options = {"base_options": {"n_sink": 4, "w": 8, "recent": 16}, "page": 4} if cls is KVCrush else {"w": 8}
    method = cls(budget=Budget(tokens=64), **options, **RELEASE)
    before, cache = run(llama, method, 150, steps=5), run(llama, method, 150, steps=5, turn=30)
    for old, layer in zip(before.layers, cache.layers, strict=True):
        for was, now in zip(held(old), held(layer), strict=True):
            assert now == [*was, *range(155, 185)]


def test_streaming_makes_room_for_a_turn_and_rolls(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 sinks and 60 recent tokens; before a turn of 30 only the newest 30 stay beside the sinks, before one of 70 none."""
    make_room, left = RollingLayer.make_room, []

    def watched(self: RollingLayer, store: ResidentStore, coming: list[int]) -> None:
        make_room(self, store, coming)
        left.append(sorted(self.positions.data[0, 0, : store.lengths[0]].tolist()))

    monkeypatch.setattr(RollingLayer, "make_room", watched)
    for turn, newest in ((30, 30), (70, 0)):
        left.clear()
        cache = run(llama, StreamingLLM(budget=Budget(tokens=64), **RELEASE), 150, steps=5, turn=turn)
        assert left == [[0, 1, 2, 3, *range(155 - newest, 155)]] * 3
        for layer in cache.layers:
            assert held(layer) == [[0, 1, 2, 3, *range(95 + turn, 155 + turn)]] * 2


def test_streaming_never_holds_more_than_a_budget_below_its_sinks(llama: PreTrainedModel) -> None:
    method = StreamingLLM(budget=Budget(ratio=0.1), protocol="paper", mode="dynamic")
    assert (method.revisions(), StreamingLLM().revisions()) == ({"streaming": 1}, {})
    for steps in (0, 4):
        cache = run(llama, method, 30, steps=steps)
        assert held(cache.layers[0]) == [[0, 1, 29 + steps]] * 2


def test_a_bit_per_kv_head() -> None:
    """Four query heads, two KV heads: the toy scores' group means; each head's better half of eight tokens has bit 1."""
    scores = torch.tensor(
        [[8, 1, 7, 2, 6, 3, 5, 4], [2, 1, 1, 2, 2, 1, 1, 2], [8, 7, 6, 5, 4, 3, 2, 1], [1, 1, 9, 9, 1, 1, 9, 9]]
    ).float()
    method = KVCrush(base="h2o", base_options={"n_sink": 0}, signature="kv", reps=3, anchor="alternate")
    padded = torch.cat([scores, torch.zeros(4, 1)], 1)
    with patch.object(method, "distance", wraps=method.distance) as distance:
        chosen = choose(method, padded, Plan(0, 1, 5))
    # means: 5 1 4 2 4 2 3 3 and 4.5 4 7.5 7 2.5 2 5.5 5
    assert distance.call_args_list[0].args[0].int().tolist() == [[1, 0, 1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0, 1, 1]]
    # distances to (0, 1): 2 1 1 0 2 1 1 0; KV head 0 keeps 0 and 2, then of 3 7 1 5 6 4 the first, third and last
    assert chosen[0] == [0, 1, 2, 3, 4, 8]
    # KV head 1 keeps 2 and 3, then of 7 1 5 6 0 4 the first, third and last
    assert chosen[1] == [2, 3, 4, 5, 7, 8]
