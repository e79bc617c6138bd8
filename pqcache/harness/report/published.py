"""The papers' printed numbers: results/published/<experiment>.csv, see the README there.

index("pqcache_table2")["mistral-7b-instruct-v0.2", "pqcache", 0.2, "average", "score"]     39.32
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pqcache import places

if TYPE_CHECKING:
    from pqcache.harness.config.cells import Cell

FOLDER = places.PUBLISHED
AVERAGE = "average"
Budget = float | int | None  # None: the method has none


@dataclass(frozen=True)
class Number:
    """One printed number."""

    paper: str
    table: str
    model: str
    method: str
    budget: Budget
    dataset: str
    metric: str
    value: float
    printed_as: str
    source: str


@functools.cache
def numbers(experiment: str) -> tuple[Number, ...]:
    """Every number of an experiment's table; none where the paper prints none, or in an installation without these files."""

    def budget(text: str) -> Budget:
        return None if not text else float(text) if "." in text else int(text)

    lines = ({**line, "budget": budget(line["budget"]), "value": float(line["value"])} for line in lines_of(experiment))
    return tuple(Number(**line) for line in lines)  # type: ignore[arg-type]


def lines_of(name: str) -> list[dict[str, str]]:
    """The lines of a CSV file of results/published."""
    path = FOLDER / f"{name}.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@functools.cache
def index(experiment: str) -> dict[tuple, float]:
    """(model, method, budget, data set, metric) -> the printed number."""
    return {(n.model, n.method, n.budget, n.dataset, n.metric): n.value for n in numbers(experiment)}


def pair(
    experiment: str,
    model: str,
    labels: Iterable[str],
    budget: Budget,
    dataset: str,
    metric: str,
    *,
    is_full: bool = False,
) -> dict[str, float | None]:
    """The number of the first label that has one (`published`), and its difference to the paper's Full."""
    own = index(experiment)
    printed = next((v for name in labels if (v := own.get((model, name, budget, dataset, metric))) is not None), None)
    full = None if is_full else own.get((model, "full", None, dataset, metric))
    return {"published": printed, "published_to_full": None if printed is None or full is None else printed - full}


def cell_score(cell: Cell) -> float | None:
    """The paper's score of a cell: its line's printed average, or its only score. None outside an experiment whose paper
    prints one, and for a smoke run."""
    if cell.experiment is None or cell.run.smoke:
        return None
    budget = None if cell.ignores_budget else cell.identity["budget"]
    for label in cell.labels:
        line = (cell.identity["model"]["name"], label, budget, "score")
        own = {n.dataset: n.value for n in numbers(cell.experiment) if (n.model, n.method, n.budget, n.metric) == line}
        if (score := own.get(AVERAGE, next(iter(own.values())) if len(own) == 1 else None)) is not None:
            return score
    return None


def experiments() -> list[str]:
    """The experiments whose paper prints numbers."""
    return sorted(path.stem for path in FOLDER.glob("*.csv") if path.stem != "prose")
