"""The papers' printed numbers: results/published/<experiment>.csv, see the README there.

value("pqcache_table2", model="mistral-7b-instruct-v0.2", method="pqcache", budget=0.2, dataset="average")     39.32
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from pqcache import places

if TYPE_CHECKING:
    from pqcache.harness.config.cells import Cell

FOLDER = places.PUBLISHED
AVERAGE = "average"


@dataclass(frozen=True)
class Number:
    """One printed number."""

    paper: str
    table: str
    model: str
    method: str
    budget: float | int | None  # None: the method has none
    dataset: str
    metric: str
    value: float
    printed_as: str
    source: str


@functools.cache
def numbers(experiment: str) -> tuple[Number, ...]:
    """Every number of an experiment's table; none where the paper prints none, or in an installation without these files."""
    path = FOLDER / f"{experiment}.csv"
    if not path.exists():
        return ()
    with open(path, newline="", encoding="utf-8") as file:
        return tuple(_number(line) for line in csv.DictReader(file))


def _number(line: dict[str, str]) -> Number:
    text = line["budget"]
    budget = None if not text else float(text) if "." in text else int(text)
    return Number(**{**line, "budget": budget, "value": float(line["value"])})  # type: ignore[arg-type]


@functools.cache
def _index(experiment: str) -> dict[tuple, float]:
    return {(n.model, n.method, n.budget, n.dataset, n.metric): n.value for n in numbers(experiment)}


def value(
    experiment: str,
    *,
    model: str,
    method: str,
    budget: float | int | None,
    dataset: str = AVERAGE,
    metric: str = "score",
) -> float | None:
    """One printed number; None if it is not printed."""
    return _index(experiment).get((model, method, budget, dataset, metric))


def score(experiment: str, *, model: str, method: str, budget: float | int | None) -> float | None:
    """The score of a line: its printed average, or its only score."""
    line = {n.dataset: n.value for n in numbers(experiment) if _line(n) == (model, method, budget, "score")}
    return line.get(AVERAGE, next(iter(line.values())) if len(line) == 1 else None)


def cell_score(cell: Cell) -> float | None:
    """The paper's score of a cell; None outside an experiment whose paper prints one, and for a smoke run."""
    if cell.experiment is None or cell.run.smoke:
        return None
    budget = None if cell.ignores_budget else cell.identity["budget"]
    model = cell.identity["model"]["name"]
    scores = (score(cell.experiment, model=model, method=label, budget=budget) for label in cell.labels)
    return next((value for value in scores if value is not None), None)


def _line(n: Number) -> tuple:
    return n.model, n.method, n.budget, n.metric


def mean(experiment: str, *, model: str, method: str, budget: float | int | None) -> float | None:
    """The unweighted mean of a line's printed scores without the printed average, which it should equal."""
    line = [
        n for n in numbers(experiment) if (n.model, n.method, n.budget, n.metric) == (model, method, budget, "score")
    ]
    values = [n.value for n in line if n.dataset != AVERAGE]
    return fmean(values) if values else None


def experiments() -> list[str]:
    """The experiments whose paper prints numbers."""
    return sorted(path.stem for path in FOLDER.glob("*.csv") if path.stem != "prose")
