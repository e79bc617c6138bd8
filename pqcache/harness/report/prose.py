"""Numbers that the papers print in their text alone: results/published/prose.csv, beside what was measured.

A line of the file names an experiment's entries: `line`, and for a comparison `other` (several with `|`: the best of them), at
equal model, setting and data set. `how` says what is made of them:

    value     the column itself              percent   the column, times 100
    minus     line - other                   inverse   other / line
    less      by how many % of other the line is lower        more      by how many % it is higher
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pqcache.harness.report.entries import Entry
from pqcache.harness.report.published import FOLDER
from pqcache.harness.report.tables import MISSING

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


@functools.cache
def numbers() -> tuple[ProseNumber, ...]:
    """All of them; none in an installation without the file."""
    path = FOLDER / "prose.csv"
    if not path.exists():
        return ()
    with open(path, newline="", encoding="utf-8") as file:
        return tuple(_number(line) for line in csv.DictReader(file))


def _number(line: Mapping[str, str]) -> ProseNumber:
    budget = float(line["budget"]) if line["budget"] else None
    return ProseNumber(**{**line, "value": float(line["value"]), "budget": budget})  # type: ignore[arg-type]


def measured(number: ProseNumber, table: Sequence[Entry], field: str = "measured") -> list[float]:
    """What an experiment's entries give for a number, one per setting and budget that it is of; empty: not measured.

    field: `published` takes the paper's own table instead.
    """
    others = number.other.split("|") if number.other else []
    values = []
    for entry in table:
        own = getattr(entry, field)
        if own is None or not _is_of(number, entry) or number.line not in entry.line.split(", "):
            continue
        if not others:
            values.append(HOW[number.how](own, 0.0))
            continue
        rivals = [
            other
            for e in table
            if set(others) & set(e.line.split(", "))
            and (e.model, e.dataset, e.metric) == (entry.model, entry.dataset, entry.metric)
            and (e.setting == entry.setting or not {e.setting, entry.setting} - {""} or field == "published")
            and (e.budget == entry.budget or len(others) == 1)
            and (other := getattr(e, field)) is not None
        ]
        if rivals:
            values.append(HOW[number.how](own, max(rivals)))
    return values


def _is_of(number: ProseNumber, entry: Entry) -> bool:
    return (
        entry.metric == number.metric
        and number.model in ("", entry.model)
        and number.dataset in ("", entry.dataset)
        and number.budget in (None, entry.budget)
        and all(part in entry.setting.split(", ") for part in number.setting.split(", ") if part)
    )


def table(tables: Mapping[str, Sequence[Entry]], paper: str | None = None) -> str:
    """Markdown: each number beside what was measured. tables: experiment -> its entries."""
    head = ["paper", "where", "what", "printed", "measured", "experiment"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for one in numbers():
        if paper is not None and one.paper != paper:
            continue
        values = measured(one, tables.get(one.experiment, ())) if one.experiment else []
        ends = sorted({f"{v:.3g}" for v in (min(values), max(values))}, key=float) if values else []
        shown = " to ".join(ends) or ("not measured yet" if one.experiment else MISSING)
        texts = [one.paper, one.source, one.says, one.printed_as, shown, one.experiment or "none"]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"
