"""The numbers of an experiment's table. Each `Entry` is a measured number beside the paper's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.report import derived, published, score_statistics
from pqcache.harness.report.rows import ROWS, Row, find_full, read_row, read_rows
from pqcache.harness.report.tables import cell_label, varying_keys

AVERAGE = published.AVERAGE


@dataclass(frozen=True)
class Entry:
    """One number of a table. None: not measured, or not printed."""

    experiment: str
    model: str
    line: str  # the experiment's name of the cell, or the method
    method: str
    budget: float | int | None  # None: the method has none
    setting: str  # the other options that differ between lines
    dataset: str  # `average` over several
    metric: str  # the column
    measured: float | None
    low: float | None  # 95 % bootstrap interval
    high: float | None
    to_full: float | None  # difference to Full, on the same samples
    to_full_low: float | None
    to_full_high: float | None
    p: float | None  # of the difference, by sign flips
    published: float | None  # the paper's number
    published_to_full: float | None  # its difference to the paper's Full
    samples: int | None
    status: str  # ok | missing | not applicable | failed | printed: a printed row of no method
    folder: str  # the cell's name
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
    if state in ("not applicable", "failed"):
        return state, str(recorded.get("reason") or "")
    return "missing", ""


def table_entries(plan: RunPlan, rows: Mapping[str, Row] | None = None) -> list[Entry]:
    """Every number of an experiment's table. Cells that were not measured have the paper's numbers alone.

    rows: cell name -> row; None: those on disk.
    """
    rows = rows_of(plan) if rows is None else rows
    columns = dict(plan.report.get("columns") or {"score": "score"})
    keys = [key for key in varying_keys(plan) if key not in ("cell", "method", "model", "task")]
    table: list[Entry] = []
    for cell in plan.cells:
        row = rows.get(cell.name)
        budget = None if cell.ignores_budget else cell.identity["budget"]
        shown = _apart(plan, cell, keys) if cell.names and "seed" not in keys else keys
        setting = ", ".join(f"{k.rpartition('.')[2]}={v}" for k in shown if (v := cell_label(cell, k)))
        common = {
            "experiment": plan.experiment or "",
            "model": cell.identity["model"]["name"],
            "line": ", ".join(cell.names) or cell.identity["method"]["name"],
            "method": cell.identity["method"]["name"],
            "budget": budget,
            "setting": setting,
            "samples": row["n_samples"] if row is not None else None,
            "status": status(cell)[0] if row is None else "ok",
            "folder": cell.name,
        }
        full = find_full(row, rows.values()) if row is not None else None
        for metric, where in columns.items():
            for dataset in _datasets(cell, row, where):
                numbers = _numbers(plan, cell, row, full, dataset, metric, where)
                if derived.is_derived(where):
                    numbers["measured"] = derived.derive(where, cell, rows, plan.cells, measured)
                table.append(Entry(**common, **numbers, metric=metric))
    return [*table, *_best_of(plan, table)]


def printed_rows(plan: RunPlan) -> list[Entry]:
    """The printed rows that are of no model and no method, such as the words of each data set: once for every model."""
    models = dict.fromkeys(cell.identity["model"]["name"] for cell in plan.cells)
    column = next(iter(plan.report.get("columns") or {"score": "score"}))
    empty = dict.fromkeys(field.name for field in fields(Entry))
    common = {
        **empty,
        "experiment": plan.experiment or "",
        "method": "",
        "setting": "",
        "folder": "",
        "status": "printed",
    }
    return [
        Entry(
            **{
                **common,
                "model": model,
                "line": n.printed_as,
                "dataset": n.dataset,
                "metric": column,
                "published": n.value,
            }
        )
        for model in models
        for n in published.numbers(plan.experiment or "")
        if not n.model and not n.method
    ]


def _apart(plan: RunPlan, cell: Cell, keys: Sequence[str]) -> list[str]:
    """The keys in which cells of one name, model, task and budget differ: a cell that is swept over has several lines."""
    same = [
        c
        for c in plan.cells
        if c.names == cell.names
        and c.identity["budget"] == cell.identity["budget"]
        and all(c.identity[group]["name"] == cell.identity[group]["name"] for group in ("model", "task"))
    ]
    return [key for key in keys if len({cell_label(c, key) for c in same}) > 1]


def _datasets(cell: Cell, row: Row | None, where: str) -> list[str]:
    """The data sets of a cell, then their average. For a single data set: the task's name."""
    task = cell.identity["task"]
    if row is not None and len(row["tasks"]) > 1:
        names = [name.removeprefix(f"{row['task']}_") for name in row["tasks"]]
    else:
        names = [str(name) for name in task.get("datasets") or ()]
    if where != "score":
        names = []  # other figures are of the cell as a whole
    return [*names, AVERAGE] if len(names) > 1 else [str(task["name"])]


def measured(row: Row, where: str) -> float | None:
    """A number of a row, None if the row has none. `where` is one of

    score               the score
    metric:<metric>     lm-eval's metric, the mean over tasks, times 100
    rate:<metric>       the same, not multiplied
    row:<dotted path>   a field of the row
    ms:<dotted path>    a field in seconds, as milliseconds

    or one of `derived`, which may need another row: None here.
    """
    if derived.is_derived(where):
        return None
    kind, _, name = where.partition(":")
    if kind == "score":
        return row["score"]
    if kind in ("metric", "rate"):
        values = [task["metrics"][name] for task in row["tasks"].values() if name in task["metrics"]]
        return (100.0 if kind == "metric" else 1.0) * fmean(values) if values else None
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value * (1000.0 if kind == "ms" else 1.0)


def _numbers(
    plan: RunPlan, cell: Cell, row: Row | None, full: Row | None, dataset: str, metric: str, where: str
) -> dict[str, Any]:
    value = low = high = p = None
    to_full: float | None = None
    to_full_span: list[float] | None = None
    if row is not None and where == "score":
        task = next((t for t in row["tasks"] if t in (dataset, f"{row['task']}_{dataset}")), None)
        own = row["sample_scores"] if task is None else {task: row["sample_scores"].get(task, {})}
        value = row["score"] if task is None else row["tasks"][task]["score"]
        interval = row["score_interval"] if task is None else row["tasks"][task]["score_interval"]
        low, high = interval or (None, None)
        if full is not None and full["folder"] != row["folder"]:
            differences = score_statistics.paired(own, full["sample_scores"])
            to_full, to_full_span = score_statistics.mean(differences), score_statistics.interval(differences)
            p = score_statistics.significance(differences)
    elif row is not None:
        value = measured(row, where)
        other = measured(full, where) if full is not None and full["folder"] != row["folder"] else None
        to_full = value - other if value is not None and other is not None else None
    printed, printed_full = _printed(plan, cell, dataset, metric)
    return {
        "dataset": dataset,
        "measured": value,
        "low": low,
        "high": high,
        "to_full": to_full,
        "to_full_low": to_full_span[0] if to_full_span else None,
        "to_full_high": to_full_span[1] if to_full_span else None,
        "p": p,
        "paired": where == "score" and to_full is not None,
        "published": printed,
        "published_to_full": None if printed is None or printed_full is None else printed - printed_full,
    }


def _printed(plan: RunPlan, cell: Cell, dataset: str, metric: str) -> tuple[float | None, float | None]:
    """(the paper's number for a cell, the paper's number for Full). The second is None for Full itself."""
    experiment, model = plan.experiment or "", cell.identity["model"]["name"]
    of_table = {n.dataset for n in published.numbers(experiment)}
    task = cell.identity["task"]
    if task["name"] == "latency":  # printed for one length of prompt and answer
        dataset = f"{task['length']}+{task['new_tokens']}"
    elif len(of_table) == 1:  # a table of one data set, whatever our task is called
        dataset = next(iter(of_table))
    where: dict[str, Any] = {"model": model, "dataset": dataset, "metric": metric}
    budget = None if cell.ignores_budget else cell.identity["budget"]
    values = [published.value(experiment, method=name, budget=budget, **where) for name in cell.labels]
    printed = next((value for value in values if value is not None), None)
    full = published.value(experiment, method="full", budget=None, **where)
    return printed, None if cell.identity["method"]["name"] == "full" else full


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
            for entry in group:
                if entry.folder != best:
                    continue
                where: dict[str, Any] = {"model": model, "dataset": entry.dataset, "metric": entry.metric}
                printed = published.value(plan.experiment or "", method=name, budget=budget, **where)
                base = published.value(plan.experiment or "", method="full", budget=None, **where)
                difference = None if printed is None or base is None else printed - base
                chosen = f"best: {entry.line}" if scored else ""
                own = {"line": name, "setting": chosen, "published": printed, "published_to_full": difference}
                lines.append(Entry(**{**asdict(entry), **own}))
    return lines
