"""`pqcache.check` says what a method breaks. The tests beside it take every method of the project through the same."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pqcache
from baselines.oracle import Oracle
from baselines.snapkv import SnapKV
from pqcache.api.invariants import INVARIANTS
from pqcache.selective import Budget, Method
from pqcache.selective.budget import Plan
from pqcache.selective.dense import DenseLayer
from pqcache.selective.scorer import Scorer
from pqcache.selective.shape import ModelShape


@dataclass(kw_only=True)
class Greedy(SnapKV):
    """Plans for four times its budget."""

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        self.budget, own = Budget(tokens=4 * (self.budget.tokens or 64)), self.budget
        try:
            return super().plan(s, layer_idx, n_layers)
        finally:
            self.budget = own


@dataclass(kw_only=True)
class Dense(Method):
    """States a budget and attends everything."""

    def make_layer(self, layer_idx: int, shape: ModelShape) -> DenseLayer:
        return DenseLayer(layer_idx, shape)


class Hoarder(Oracle):
    """Keeps a copy of what it has seen that nobody counts."""

    def make_layer(self, *place: Any) -> Any:
        layer = super().make_layer(*place)
        layer.copies = [torch.ones(3, 5)]
        return layer


class Failing(SnapKV):
    """Cannot make a layer."""

    def make_layer(self, *place: Any) -> Any:
        raise ZeroDivisionError("no layer")


class Unranked(SnapKV):
    """Plans to rank tokens and has nothing that does."""

    def make_scorer(self, *place: Any) -> Scorer:
        return Scorer()


class PerHead(Scorer):
    """Scores per KV head, where query heads are asked for."""

    def head_scores(self, k: torch.Tensor, lengths: list[int], ctx: Any) -> torch.Tensor:
        return k.norm(dim=-1)


class Misshapen(SnapKV):
    def make_scorer(self, *place: Any) -> Scorer:
        return PerHead()


@pytest.mark.parametrize(
    ("cls", "options", "name", "words"),
    [
        (Greedy, {"n_sink": 4, "w": 8}, "budget held at every step", "attended"),
        pytest.param(
            *(Dense, {}, "budget held at every step", "after 300 tokens layers attended [300.0"), marks=pytest.mark.rest
        ),
        (Hoarder, {"n_sink": 8}, "bytes counted", "(3, 5)"),
        (Failing, {"n_sink": 4}, "left padding", "ZeroDivisionError: no layer (test_check.py, line"),
        (Unranked, {"n_sink": 4}, "bytes counted", "no head_scores of a scorer ranks them"),
        (Misshapen, {"n_sink": 4}, "bytes counted", "PerHead.head_scores: (1, 2, 300), expected (1, 4, 300)"),
        (SnapKV, {"n_sink": -1}, "no-op equals Full", "n_sink=-1: allowed is"),
        pytest.param(SnapKV, {"n_sink": 4, "w": 8}, "", "", marks=pytest.mark.rest),
    ],
)
def test_check_says_what_fails(cls: Any, options: Any, name: str, words: str, capsys: Any) -> None:
    failed = pqcache.check(cls, **options)
    said = capsys.readouterr().out
    assert said.count("\n") == len(INVARIANTS) + 1 and f"{cls.__name__}: {len(failed)} of 6 fail" in said
    assert words in failed[name] if name else not failed


def test_check_takes_methods_alone() -> None:
    with pytest.raises(TypeError, match="expected a name of pqcache.methods"):
        pqcache.check(dict)  # type: ignore[arg-type]
