"""The numbers of an experiment's table. Each `Entry` is a measured number beside the paper's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.report import derived, published
from pqcache.harness.report.rows import ROWS, Row, compared, find_full, read_row, read_rows
from pqcache.harness.report.tables import apart, cell_label, varying_keys

AVERAGE = published.AVERAGE


@dataclass(frozen=True)
class Entry:
    """One number of a table. None: not measured, or not printed."""

    experiment: str
    model: str
    line: str  # the experiment's name of the cell, or the method
    method: str = ""
    budget: float | int | None = None  # None: the method has none
    setting: str = ""  # the other options that differ between lines
    dataset: str = ""  # `average` over several
    metric: str = ""  # the column
    measured: float | None = None
    low: float | None = None  # 95 % bootstrap interval
    high: float | None = None
    to_full: float | None = None  # difference to Full, on the same samples
    to_full_low: float | None = None
    to_full_high: float | None = None
    p: float | None = None  # of the difference, by sign flips
    published: float | None = None  # the paper's number
    published_to_full: float | None = None  # its difference to the paper's Full
    samples: int | None = None
    status: str = "ok"  # ok | missing | not applicable | failed | printed: a printed row of no method
    folder: str = ""  # the cell's name
    paired: bool = False  # to_full is a mean over samples; without interval and p: of one sample of a sub-task


def rows_of(plan: RunPlan) -> dict[str, Row]:
    """The rows of a plan's cells that are on disk, by the cell's name."""
    kept = {folder: read_rows(folder / ROWS) for folder in {cell.folder.parent for cell in plan.cells}}
    rows = {row["folder"]: row for many in kept.values() for row in many}
    rows |= {cell.name: row for cell in plan.cells if (row := read_row(cell.folder / "row.json")) is not None}
    return {cell.name: rows[cell.name] for cell in plan.cells if cell.name in rows}


def status(cell: Cell) -> tuple[str, str]:
    """(ok | missing | not applicable | failed, the reason) of a cell, from its folder."""
    if (cell.folder / "row.json").exists():
        return "ok", ""
    if cell.skip is not None:
        return "not applicable", cell.skip
    try:
        recorded = json.loads((cell.folder / "status.json").read_text())
    except (OSError, ValueError):
        return "missing", ""
    state = str(recorded.get("status"))
    return (state, str(recorded.get("reason") or "")) if state in ("not applicable", "failed") else ("missing", "")


def table_entries(plan: RunPlan, rows: Mapping[str, Row] | None = None) -> list[Entry]:
    """Every number of an experiment's table. Cells that were not measured have the paper's numbers alone.

    rows: cell name -> row; None: those on disk.
    """
    rows = rows_of(plan) if rows is None else rows
    every = list(rows.values())
    columns = dict(plan.report.get("columns") or {"score": "score"})
    keys = [key for key in varying_keys(plan) if key not in ("cell", "method", "model", "task")]
    table: list[Entry] = []
    for cell in plan.cells:
        row = rows.get(cell.name)
        full = find_full(row, every) if row is not None else None
        if row is not None and full is not None and full["folder"] != row["folder"]:
            row = compared(row, every)
        else:
            full = None
        shown = apart(_alike(plan, cell), keys) if cell.names and "seed" not in keys else keys
        entry = Entry(
            experiment=plan.experiment or "",
            model=cell.identity["model"]["name"],
            line=", ".join(cell.names) or cell.identity["method"]["name"],
            method=cell.identity["method"]["name"],
            budget=None if cell.ignores_budget else cell.identity["budget"],
            setting=", ".join(f"{k.rpartition('.')[2]}={v}" for k in shown if (v := cell_label(cell, k))),
            samples=row["n_samples"] if row is not None else None,
            status=status(cell)[0] if row is None else "ok",
            folder=cell.name,
        )
        for metric, where in columns.items():
            for dataset in _datasets(cell, row, where):
                numbers = _measured(row, full, dataset, where) if row is not None else {}
                if derived.is_derived(where):
                    numbers = {"measured": derived.derive(where, cell, rows, plan.cells, measured)}
                numbers |= _printed(plan, cell, dataset, metric)
                table.append(replace(entry, dataset=dataset, metric=metric, **numbers))
    return [*table, *_best_of(plan, table)]


def printed_rows(plan: RunPlan) -> list[Entry]:
    """The printed rows that are of no model and no method, such as the words of each data set: once for every model."""
    name, column = plan.experiment or "", next(iter(plan.report.get("columns") or {"score": "score"}))
    return [
        Entry(name, model, n.printed_as, dataset=n.dataset, metric=column, published=n.value, status="printed")
        for model in dict.fromkeys(cell.identity["model"]["name"] for cell in plan.cells)
        for n in published.numbers(name)
        if not n.model and not n.method
    ]


def _alike(plan: RunPlan, cell: Cell) -> list[Cell]:
    """The cells of one name, model, task and budget: a cell that is swept over has several lines."""
    own = [(c.names, c.identity["budget"], cell_label(c, "model"), cell_label(c, "task")) for c in plan.cells]
    this = own[plan.cells.index(cell)]
    return [c for c, known in zip(plan.cells, own, strict=True) if known == this]


def _datasets(cell: Cell, row: Row | None, where: str) -> list[str]:
    """The data sets of a cell, then their average. For a single data set: the task's name."""
    task = cell.identity["task"]
    names: list[str] = []
    if where == "score":  # other figures are of the cell as a whole
        several = row is not None and len(row["tasks"]) > 1
        names = (
            [n.removeprefix(f"{row['task']}_") for n in row["tasks"]] if several and row else task.get("datasets") or []
        )
    return [*map(str, names), AVERAGE] if len(names) > 1 else [str(task["name"])]


def measured(row: Row, where: str) -> float | None:
    """A number of a row, None if the row has none. `where` is one of

    score               the score
    metric:<metric>     lm-eval's metric, the mean over tasks, times 100
    rate:<metric>       the same, not multiplied
    row:<dotted path>   a field of the row
    ms:<dotted path>    a field in seconds, as milliseconds

    or one of `derived`, which may need another row: None here.
    """
    kind, _, name = where.partition(":")
    if kind == "score":
        return row["score"]
    if kind in ("metric", "rate"):
        values = [task["metrics"][name] for task in row["tasks"].values() if name in task["metrics"]]
        return (100.0 if kind == "metric" else 1.0) * fmean(values) if values else None
    value: Any = row if kind in ("row", "ms") else None
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value * (1000.0 if kind == "ms" else 1.0)


def _measured(row: Row, full: Row | None, dataset: str, where: str) -> dict[str, Any]:
    """The measured numbers of an entry. full: whom the row is compared with."""
    if where != "score":
        value, other = measured(row, where), measured(full, where) if full is not None else None
        return {"measured": value, "to_full": value - other if value is not None and other is not None else None}
    task = next((t for t in row["tasks"] if t in (dataset, f"{row['task']}_{dataset}")), None)
    part: Mapping[str, Any] = row if task is None else row["tasks"][task]
    low, high = part["score_interval"] or (None, None)
    known = {"measured": part["score"], "low": low, "high": high}
    if full is None:
        return known
    low, high = part["paired_interval"] or (None, None)
    ends = {"to_full_low": low, "to_full_high": high, "p": part["paired_p"]}
    difference = part["paired_difference"]
    return {**known, "to_full": difference, **ends, "paired": difference is not None}


def _printed(plan: RunPlan, cell: Cell, dataset: str, metric: str) -> dict[str, float | None]:
    """The paper's number for a cell, and its difference to the paper's Full; None for Full itself."""
    experiment, task = plan.experiment or "", cell.identity["task"]
    of_table = {n.dataset for n in published.numbers(experiment)}
    if task["name"] == "latency":  # printed for one length of prompt and answer
        dataset = f"{task['length']}+{task['new_tokens']}"
    elif len(of_table) == 1:  # a table of one data set, whatever our task is called
        dataset = next(iter(of_table))
    budget = None if cell.ignores_budget else cell.identity["budget"]
    own = cell.identity["method"]["name"] == "full"
    return published.pair(experiment, cell_label(cell, "model"), cell.labels, budget, dataset, metric, is_full=own)


def _best_of(plan: RunPlan, table: Sequence[Entry]) -> list[Entry]:
    """The lines that an experiment declares as the best of several cells. They have the best cell's numbers."""
    lines = []
    tasks = {cell.name: cell.identity["task"]["name"] for cell in plan.cells}
    for name, cells in plan.best_of.items():
        groups: dict[tuple, list[Entry]] = {}
        for entry in table:
            if set(entry.line.split(", ")) & set(cells):
                groups.setdefault((entry.model, entry.budget, tasks[entry.folder]), []).append(entry)
        for (model, budget, _), group in groups.items():
            scored = [e for e in group if e.dataset in (AVERAGE, group[-1].dataset) and e.measured is not None]
            best = max(scored, key=lambda e: e.measured or 0.0).folder if scored else group[0].folder
            for entry in (entry for entry in group if entry.folder == best):
                numbers = published.pair(plan.experiment or "", model, [name], budget, entry.dataset, entry.metric)
                chosen = f"best: {entry.line}" if scored else ""
                lines.append(replace(entry, line=name, setting=chosen, **numbers))  # type: ignore[arg-type]
    return lines
