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
from types import SimpleNamespace

from pqcache.harness.report import published
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.table import MISSING, Table

HOW: Mapping[str, Callable[[float, float], float]] = {
    "value": lambda own, _: own,
    "percent": lambda own, _: 100.0 * own,
    "minus": lambda own, other: own - other,
    "inverse": lambda own, other: other / own,
    "less": lambda own, other: 100.0 * (1.0 - own / other),
    "more": lambda own, other: 100.0 * (own / other - 1.0),
}


@functools.cache
def numbers() -> tuple[SimpleNamespace, ...]:
    """The lines of the file, each with its columns: none in an installation without it.

    paper, source, says, value, printed_as, then what it is of: experiment (empty: none measures it), model (empty: any), line,
    other, budget (None: any), dataset, metric, setting (what the entry's setting contains), how.
    """
    lines = published.lines_of("prose")
    numbers = ({"value": float(n["value"]), "budget": float(n["budget"]) if n["budget"] else None} for n in lines)
    return tuple(SimpleNamespace(**{**line, **own}) for line, own in zip(lines, numbers, strict=True))


def is_of(number: SimpleNamespace, entry: Entry) -> bool:
    """Whether a number is of an entry's line, model, data set, budget and setting."""
    return (
        entry.metric == number.metric
        and number.line in entry.line.split(", ")
        and number.model in ("", entry.model)
        and number.dataset in ("", entry.dataset)
        and number.budget in (None, entry.budget)
        and {part for part in number.setting.split(", ") if part} <= set(entry.setting.split(", "))
    )


def measured(number: SimpleNamespace, table: Sequence[Entry], field: str = "measured") -> list[float]:
    """What an experiment's entries give for a number, one per setting and budget that it is of; empty: not measured.

    field: `published` takes the paper's own table instead.
    """
    others = set(number.other.split("|")) if number.other else set()
    values = []
    for entry in (e for e in table if is_of(number, e) and getattr(e, field) is not None):
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


def table(tables: Mapping[str, Sequence[Entry]]) -> str:
    """Markdown: each number beside what was measured. tables: experiment -> its entries."""
    body = []
    for one in numbers():
        values = measured(one, tables.get(one.experiment, ())) if one.experiment else []
        ends = sorted({f"{v:.3g}" for v in (min(values), max(values))}, key=float) if values else []
        shown = " to ".join(ends) or ("not measured yet" if one.experiment else MISSING)
        body.append([one.paper, one.source, one.says, one.printed_as, shown, one.experiment or "none"])
    return Table("", ["paper", "where", "what", "printed", "measured", "experiment"], body).markdown() + "\n"
