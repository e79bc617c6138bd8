"""InfLLM's sizes: plans of every protocol, budgets that cover the prompt, and refusals."""

from __future__ import annotations

import pytest

from baselines.infllm import InfLLM
from pqcache.selective import Budget, NotApplicable
from pqcache.selective.dense import DenseLayer
from pqcache.selective.shape import ModelShape


def test_plans() -> None:
    fifth = InfLLM(budget=Budget(ratio=0.2)).plan(8192, 0, 1)
    assert (fifth.sinks, fifth.window, fifth.topk, fifth.exc) == (32, 816, 7, 512)
    assert fifth.total == 32 + 815 + 7 * 128  # the current token, inside the window, is not counted
    tenth = InfLLM(budget=Budget(ratio=0.1)).plan(2048, 0, 1)
    assert (tenth.window, tenth.topk, tenth.exc) == (100, 1, 100)
    some = InfLLM(budget=Budget(tokens=512), budget_rule="prompt").plan(4000, 0, 1)
    assert (some.window, some.topk) == (240, 2)
    assert InfLLM(budget=Budget(tokens=512), budget_rule="prompt").plan(500, 0, 1).window == 512
    kept = InfLLM(budget=Budget(tokens=512))  # at every step: rounded down, and the current token beside the budget
    assert (kept.plan(4000, 0, 1).topk, kept.plan(500, 0, 1).window) == (1, 513)
    paper = InfLLM(protocol="paper", budget=Budget(ratio=0.2))
    plan = paper.plan(20000, 0, 1)
    assert (plan.sinks, plan.window, plan.topk, plan.exc, paper.reps, paper.max_cached_blocks) == (
        128, 4096, 16, 512, 4, 32,
    )  # fmt: skip
    release = InfLLM(protocol="release", budget=Budget(ratio=0.2))
    assert (release.plan(20000, 0, 1), release.reps, release.n_sink) == (plan, 4, 128)
    assert isinstance(InfLLM(budget=Budget(ratio=1.0)).make_layer(0, ModelShape(1, 2, 2, 4)), DenseLayer)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"n_init": -1}, "n_init=-1: allowed is an int >= 0"),
        ({"n_local": 0}, "n_local=0: allowed is null or an int >= 1"),
        ({"topk": -1}, "topk=-1: allowed is null or"),
        ({"reps": 5, "block": 4}, "reps=5: allowed is an int in 1..4"),
        ({"exc_block": 0}, "exc_block=0: allowed is an int >= 1"),
        ({"max_cached_blocks": 0}, "max_cached_blocks=0"),
        ({"recent_ratio": 1.5}, "recent_ratio=1.5"),
        ({"store": "hosts"}, "did you mean host"),
        ({"store": "block_cache"}, "store=block_cache: allowed is resident, host"),
    ],
)
def test_refusals(hyper: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InfLLM(**hyper)


def test_what_cannot_apply() -> None:
    with pytest.raises(NotApplicable, match="needs more than 90 init tokens"):
        InfLLM(n_init=90, budget=Budget(tokens=80))
