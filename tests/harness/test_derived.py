"""Columns that are computed from a row or from two: against numbers worked by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pqcache.harness.report.entries import derive
from pqcache.harness.run import models


@dataclass
class Line:
    """As much of a cell as a derived column looks at."""

    name: str
    labels: list[str]
    budget: int = 1024
    ignores_budget: bool = False
    task: dict[str, Any] = field(default_factory=lambda: {"length": 10})

    @property
    def identity(self) -> dict[str, Any]:
        return {"model": {"name": "m"}, "task": self.task, "seed": 0, "budget": self.budget}


def row(prefill: float, index: float, step_ms: float, new: int = 11, **extra: float) -> dict[str, Any]:
    times = {"prefill_s": prefill, "index_build_s": index, "tpot_p50_ms": step_ms, "generated_tokens": new}
    return {**times, "extra": extra, "tasks": {"t": {"metrics": {"perplexity": extra.get("ppl", 0.0)}}}}


FULL, SMALL, LARGE = Line("f", ["full"], ignores_budget=True), Line("s", ["ckv", "clusterkv"], 512), Line("l", ["ckv"])
OTHER = Line("o", ["full"], ignores_budget=True, task={"length": 20})
CELLS: list[Any] = [OTHER, FULL, SMALL, LARGE]
ROWS: dict[str, Any] = {
    "o": row(9.0, 0.0, 900.0),
    "f": row(1.0, 0.0, 100.0, ppl=10.0),
    "s": row(1.25, 0.25, 25.0, ppl=12.5, cluster_hit_rate=0.63),
    "l": row(1.25, 0.25, 50.0),
}


@pytest.mark.parametrize(
    ("where", "cell", "value"),
    [
        ("seconds:answer", FULL, 2.0),  # 1 s and ten steps of 0.1 s
        ("seconds:decode", SMALL, 0.25),
        ("gain:full:seconds:answer", SMALL, 2.0 / 1.5),
        ("gain:full:row:tpot_p50_ms", SMALL, 4.0),
        ("gain:ckv:row:tpot_p50_ms", FULL, 0.5),  # of its two budgets the one that is typed for Full
        ("minus:full:rate:perplexity", SMALL, 2.5),
        ("share:index:prefill", SMALL, 20.0),
        ("share:index:answer", LARGE, 100 * 0.25 / 1.75),
        ("percent:row:extra.cluster_hit_rate", SMALL, 63.0),
        ("percent:row:extra.cluster_hit_rate", LARGE, None),
        ("gain:full:seconds:answer", FULL, None),  # nothing is faster than itself
        ("gain:quest:seconds:answer", SMALL, None),
        ("gain:full:seconds:answer", Line("unmeasured", ["x"]), None),
    ],
)
def test_derived_numbers(where: str, cell: Any, value: float | None) -> None:
    got = derive(where, cell, ROWS, CELLS)
    assert got == (None if value is None else pytest.approx(value))


def test_random_weights_have_16_bits_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"name": "random", "dtype": "auto", "device": "auto"}
    for there, dtype in ((True, "float16"), (False, "float32")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert models.random_dtype(options) == models.dtype_name(None, options) == dtype  # type: ignore[arg-type]
        assert models.random_dtype({**options, "device": "cpu"}) == "float32"
        assert models.random_dtype({**options, "dtype": "bfloat16"}) == "bfloat16"
        assert models.dtype_name(None, {**options, "name": "embedded"}) == "float32"  # type: ignore[arg-type]
