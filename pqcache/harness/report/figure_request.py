"""The request for an experiment's figure: its options, and the entries, rows and cells that it is drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.rows import Row, batch_text

MIN_TOP = 0.1  # an axis of scores shows at least this part of the scale, so that small scores look small


@dataclass(frozen=True)
class FigureRequest:
    """`report.figure` of an experiment file, and what was measured so far."""

    plan: RunPlan
    entries: Sequence[Entry]
    # cell name -> row
    rows: Mapping[str, Row]
    # the file to write
    path: Path
    kind: str
    # the other keys of `report.figure`
    options: Mapping[str, Any]

    @property
    def metric(self) -> str:
        """The column that is drawn."""
        columns = list(self.plan.report.get("columns") or {"score": "score"})
        return str(self.options.get("y", columns[0]))

    @property
    def cells(self) -> dict[str, Cell]:
        """Folder name -> cell."""
        return {cell.name: cell for cell in self.plan.cells}

    def caption(self) -> str:
        """Title, samples, prompt length and machine."""
        rows = self.rows.values()
        counts = sorted({row["n_samples"] for row in rows})
        each = "-".join(str(n) for n in dict.fromkeys([counts[0], counts[-1]]))
        prompt = fmean(row["prompt_tokens"] for row in rows)
        devices = " / ".join(dict.fromkeys(row["device"] for row in rows))
        title = self.plan.report.get("title") or self.plan.experiment
        smoke = "SMOKE RUN, no results. " if any(row["smoke"] for row in rows) else ""
        dtypes = dict.fromkeys(str(row.get("kv_dtype")) for row in rows if row.get("kv_dtype"))
        own = dict.fromkeys(str(r.get("protocol")) for r in rows if r.get("protocol") and r.get("method") != "full")
        run = "".join(
            f"{text}, "
            for text in (batch_text(rows), "/".join(dtypes), f"protocol {'/'.join(own)}" if own else "")
            if text
        )
        noun = "sample" if each == "1" else "samples"
        return f"{smoke}{title}. {each} {noun} a cell, {prompt:.0f} prompt tokens on average, {run}{devices}."

    def point_title(self, entry: Entry) -> str:
        """A line's printed name, with its budget and setting where these tell lines of one name apart."""
        alike = {(e.budget, e.setting) for e in self.entries if e.line == entry.line}
        name = str((self.plan.report.get("names") or {}).get(entry.line, entry.line))
        return line_title(replace(entry, line=name)) if len(alike) > 1 else name

    def limits(
        self, metric: str, values: Iterable[float | None], *, difference: bool = False
    ) -> tuple[float | None, float | None]:
        """(bottom, top) of the y axis for a column's numbers; None: matplotlib's choice.

        The scale of a score is 100, that of a share 1. Their axis begins at 0 and ends above the largest value, at most just
        above the scale. The axis of differences shows at least a hundredth of the scale below and above 0.
        """
        where = str((self.plan.report.get("columns") or {"score": "score"}).get(metric, ""))
        percent = where == "score" or where.startswith("metric:")
        if not percent and not where.startswith("row:diagnostics."):
            return None, None
        whole = 100.0 if percent else 1.0
        numbers = [value for value in values if value is not None]
        low, high = min(numbers, default=0.0), max(numbers, default=0.0)
        if difference:
            return min(1.08 * low, -0.01 * whole), max(1.08 * high, 0.01 * whole)
        top = max(1.08 * high, MIN_TOP * whole)
        return 0.0, min(top, 1.02 * whole) if high <= whole else top


def key_of(cell: Cell, key: str) -> Any:
    """The value of a configuration's key: budget, seed, task.lines, method.r, ..."""
    group, _, rest = key.partition(".")
    value: Any = cell.identity.get(group)
    for name in rest.split(".") if rest else ():
        value = value.get(name) if isinstance(value, dict) else None
    return value


def cell_title(cell: Cell) -> str:
    """The experiment's names of a cell, or its method."""
    return ", ".join(cell.names) or cell.identity["method"]["name"]


def line_title(entry: Entry) -> str:
    """An entry's line, budget and setting."""
    budget = f"{entry.budget:g}" if entry.budget is not None else ""
    return " ".join(part for part in (entry.line, budget, entry.setting) if part)
