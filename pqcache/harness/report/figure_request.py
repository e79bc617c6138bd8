"""The request for an experiment's figure: its options, and the numbers, rows and cells that it is drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.report.entries import derive
from pqcache.harness.report.plots import Limits
from pqcache.harness.report.rows import Row, batch_text
from pqcache.harness.report.table import several

MIN_TOP = 0.1  # an axis of scores shows at least this part of the scale, so that small scores look small


@dataclass(frozen=True)
class FigureRequest:
    """`report.figure` of an experiment file, and what was measured so far."""

    plan: RunPlan
    entries: pd.DataFrame  # entries.Entry, one a line; NaN: not measured
    rows: Mapping[str, Row]  # by the cell's name
    path: Path  # the file to write
    options: Mapping[str, Any]  # the keys of `report.figure`

    def having(self, **own: Any) -> FigureRequest:
        """The same with other options: those of one of its panels."""
        return replace(self, options={**self.options, **own})

    def text(self, key: str, default: Any = "") -> str:
        return str(self.options.get(key, default))

    @property
    def columns(self) -> dict[str, str]:
        return dict(self.plan.report.get("columns") or {"score": "score"})

    @property
    def metric(self) -> str:
        """The column that is drawn."""
        return self.text("y", next(iter(self.columns)))

    @property
    def measured(self) -> Iterator[tuple[Cell, Row]]:
        """The cells that have a row."""
        return ((cell, self.rows[cell.name]) for cell in self.plan.cells if cell.name in self.rows)

    @property
    def cells(self) -> dict[str, Cell]:
        """Folder name -> cell."""
        return {cell.name: cell for cell in self.plan.cells}

    def values(self, what: str) -> pd.DataFrame:
        """The entries of a column of the table, or of a number that has no column there (row:bytes_per_step.refill).

        With `cells:` among the options, those of these cells or `best_of` lines.
        """
        table = self.entries
        if ":" in what and what not in self.columns:
            table = table[table.metric == next(iter(self.columns))].drop_duplicates(["folder", "line"])
            numbers = {cell.name: derive(what, cell, self.rows, self.plan.cells) for cell, _ in self.measured}
            own = table.folder.map(numbers).astype(float)
            table = table.assign(measured=own, low=float("nan"), high=float("nan"), published=float("nan"), metric=what)
        table = table[table.metric == what]
        if (named := self.options.get("cells")) is not None:
            table = table[[bool(set(line.split(", ")) & set(map(str, named))) for line in table.line]]
        return table

    def label(self, what: str) -> str:
        """What a column is called in the figure."""
        return str((self.options.get("labels") or {}).get(what, what))

    def caption(self) -> str:
        """Title, samples, prompt length and machine."""
        rows = self.rows.values()
        each = several(row["n_samples"] for row in rows)
        title = self.plan.report.get("title") or self.plan.experiment
        smoke = "SMOKE RUN, no results. " if any(row["smoke"] for row in rows) else ""
        protocols = several(row.get("protocol") for row in rows if row.get("method") != "full")
        parts = [
            f"{each} sample{'' if each == '1' else 's'} a cell",
            *dict.fromkeys(
                f"random weights of {of.get('geometry')} with {of.get('layers') or 'all'} layers"
                for of in (row["model_options"] for row in rows if row["model"] == "random")
            ),
            f"{fmean(row['prompt_tokens'] for row in rows):.0f} prompt tokens on average",
            batch_text(rows),
            several(row.get("kv_dtype") for row in rows),
            f"protocol {protocols}" if protocols else "",
            several(row["device"] for row in rows),
        ]
        return f"{smoke}{title}. {', '.join(filter(None, parts))}."

    def limits(self, metric: str, values: Iterable[float | None], *, difference: bool = False) -> Limits:
        """(bottom, top) of the y axis for a column's numbers; None: matplotlib's choice.

        The scale of a score is 100, that of a share 1. Their axis begins at 0 and ends above the largest value, at most just
        above the scale. The axis of differences shows at least a hundredth of the scale below and above 0. Times begin at 0.
        """
        where = self.columns.get(metric, metric)
        numbers = [value for value in values if value is not None and value == value]
        low, high = min(numbers, default=0.0), max(numbers, default=0.0)
        percent = where == "score" or where.startswith("metric:")
        whole = 100.0 if percent else 1.0
        if difference:
            return min(1.08 * low, -0.01 * whole), max(1.08 * high, 0.01 * whole)
        if not percent and not where.startswith("row:diagnostics."):
            return (0.0 if low >= 0 and where.startswith(("row:", "seconds:", "ms:")) else None), None
        top = max(1.08 * high, MIN_TOP * whole)
        return 0.0, min(top, 1.02 * whole) if high <= whole else top


def key_of(cell: Cell, key: str) -> Any:
    """The value of a configuration's key: budget, seed, task.lines, method.r, ..."""
    group, _, rest = key.partition(".")
    value: Any = cell.identity.get(group)
    for name in rest.split(".") if rest else ():
        value = value.get(name) if isinstance(value, dict) else None
    return value
