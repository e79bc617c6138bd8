"""Numbers that the papers print in their text alone: results/published/prose.csv, beside what was measured.

A line of the file names an experiment's entries: `line`, and for a comparison `other` (several with `|`: the best of them), at
equal model, setting and data set. `how` says what is made of them:

    value     the column itself              percent   the column, times 100
    minus     line - other                   inverse   other / line
    less      by how many % of other the line is lower        more      by how many % it is higher
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pqcache.harness.report import published
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.table import MISSING

HOW: Mapping[str, Callable[[float, float], float]] = {
    "value": lambda own, _: own,
    "percent": lambda own, _: 100.0 * own,
    "minus": lambda own, other: own - other,
    "inverse": lambda own, other: other / own,
    "less": lambda own, other: 100.0 * (1.0 - own / other),
    "more": lambda own, other: 100.0 * (own / other - 1.0),
}


@dataclass(frozen=True)
class ProseNumber:
    """One printed number; empty fields after `printed_as`: no experiment measures it."""

    paper: str
    source: str
    says: str
    value: float
    printed_as: str
    experiment: str
    model: str  # empty: any
    line: str
    other: str
    budget: float | None  # None: any
    dataset: str
    metric: str
    setting: str  # what the entry's setting contains
    how: str

    def is_of(self, entry: Entry) -> bool:
        return (
            entry.metric == self.metric
            and self.line in entry.line.split(", ")
            and self.model in ("", entry.model)
            and self.dataset in ("", entry.dataset)
            and self.budget in (None, entry.budget)
            and {part for part in self.setting.split(", ") if part} <= set(entry.setting.split(", "))
        )


@functools.cache
def numbers() -> tuple[ProseNumber, ...]:
    """All of them; none in an installation without the file."""
    return tuple(map(_number, published.lines_of("prose")))


def _number(line: Mapping[str, str]) -> ProseNumber:
    budget = float(line["budget"]) if line["budget"] else None
    return ProseNumber(**{**line, "value": float(line["value"]), "budget": budget})  # type: ignore[arg-type]


def measured(number: ProseNumber, table: Sequence[Entry], field: str = "measured") -> list[float]:
    """What an experiment's entries give for a number, one per setting and budget that it is of; empty: not measured.

    field: `published` takes the paper's own table instead.
    """
    others = set(number.other.split("|")) if number.other else set()
    values = []
    for entry in (e for e in table if number.is_of(e) and getattr(e, field) is not None):
        rivals = [
            getattr(e, field)
            for e in table
            if others & set(e.line.split(", "))
            and (e.model, e.dataset, e.metric) == (entry.model, entry.dataset, entry.metric)
            and (e.setting == entry.setting or not {e.setting, entry.setting} - {""} or field == "published")
            and (e.budget == entry.budget or len(others) == 1)
            and getattr(e, field) is not None
        ]
        if rivals or not others:
            values.append(HOW[number.how](getattr(entry, field), max(rivals, default=0.0)))
    return values


def table(tables: Mapping[str, Sequence[Entry]], paper: str | None = None) -> str:
    """Markdown: each number beside what was measured. tables: experiment -> its entries."""
    head = ["paper", "where", "what", "printed", "measured", "experiment"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for one in (one for one in numbers() if paper in (None, one.paper)):
        values = measured(one, tables.get(one.experiment, ())) if one.experiment else []
        ends = sorted({f"{v:.3g}" for v in (min(values), max(values))}, key=float) if values else []
        shown = " to ".join(ends) or ("not measured yet" if one.experiment else MISSING)
        lines.append(
            f"| {one.paper} | {one.source} | {one.says} | {one.printed_as} | {shown} | {one.experiment or 'none'} |"
        )
    return "\n".join(lines) + "\n"
