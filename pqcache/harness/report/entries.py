"""The numbers of an experiment's table. Each `Entry` is a measured number beside the paper's.

`report.columns` of an experiment file says what a column shows: {score: score, speedup: "gain:full:seconds:answer"}

    score                      the score
    metric:<m>, rate:<m>       lm-eval's metric, the mean over tasks: times 100, as it is
    row:<dotted path>          a field of the row; ms:<path>: one in seconds, as milliseconds
    seconds:<phase>            prefill, the index within it, the decode steps after it, or the whole answer
    share:<phase>:<phase>      the first as percent of the second
    percent:<column>           times 100
    gain:<line>:<column>       how many times as much the other line has (times as fast)
    minus:<line>:<column>      the difference to the other line
    timed:<column>             of the cell of task=latency with the same model and method

The other line is the cell of that name, or the method where cells have no names, with the same model, task and seed, and the
same budget if it has one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pqcache.harness.config.cells import Cell, RunPlan, read_status
from pqcache.harness.report import published
from pqcache.harness.report.frame import numbers_of
from pqcache.harness.report.rows import ROWS, Row, compared, find_full, read_row, read_rows
from pqcache.harness.report.tables import cell_label, varying_keys

AVERAGE = published.AVERAGE
OF_TWO = ("percent", "gain", "minus", "seconds", "share", "timed")  # columns that are computed from others
SAME = ("model", "method", "budget", "protocol", "dense_layers", "seed")  # of a cell and the one that times it


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
    folders = {cell.folder.parent for cell in plan.cells}
    rows = {row["folder"]: row for folder in folders for row in read_rows(folder / ROWS)}
    rows |= {cell.name: row for cell in plan.cells if (row := read_row(cell.folder / "row.json")) is not None}
    return {cell.name: rows[cell.name] for cell in plan.cells if cell.name in rows}


def status(cell: Cell) -> tuple[str, str]:
    """(ok | missing | not applicable | failed, the reason) of a cell, from its folder."""
    if (cell.folder / "row.json").exists():
        return "ok", ""
    if cell.skip is not None:
        return "not applicable", cell.skip
    recorded = read_status(cell.folder)
    return recorded if recorded[0] in ("not applicable", "failed") else ("missing", "")


def table_entries(plan: RunPlan, rows: Mapping[str, Row]) -> list[Entry]:
    """Every number of an experiment's table. Cells that were not measured have the paper's numbers alone.

    rows: cell name -> row.
    """
    columns = dict(plan.report.get("columns") or {"score": "score"})
    keys = [key for key in varying_keys(plan) if key not in ("cell", "method", "model", "task")]
    places = [(c.names, c.identity["budget"], cell_label(c, "model"), cell_label(c, "task")) for c in plan.cells]
    table: list[Entry] = []
    for cell, place in zip(plan.cells, places, strict=True):
        row, full = rows.get(cell.name), None
        if row is not None and (found := find_full(row, rows.values())) is not None and found["folder"] != cell.name:
            row, full = compared(row, [found]), found
        alike = [c for c, other in zip(plan.cells, places, strict=True) if other == place]  # one that is swept over
        shown = keys
        if cell.names and "seed" not in keys:  # the keys in which these differ
            shown = [key for key in keys if len({cell_label(c, key) for c in alike}) > 1]
        entry = Entry(
            experiment=plan.experiment or "",
            model=cell.identity["model"]["name"],
            line=cell.line,
            method=cell.identity["method"]["name"],
            budget=None if cell.ignores_budget else cell.identity["budget"],
            setting=", ".join(f"{k.rpartition('.')[2]}={v}" for k in shown if (v := cell_label(cell, k))),
            samples=row["n_samples"] if row is not None else None,
            status=status(cell)[0] if row is None else "ok",
            folder=cell.name,
        )
        task = cell.identity["task"]
        known = list(row["tasks"]) if row is not None and len(row["tasks"]) > 1 else task.get("datasets") or []
        names = [str(name).removeprefix(f"{task['name']}_") for name in known]
        # scores of each data set and their average; the others of the cell as a whole
        for metric, where in columns.items():
            of_each = where == "score" and len(names) > 1
            for dataset in [*names, AVERAGE] if of_each else [str(task["name"])]:
                if where.partition(":")[0] in OF_TWO:
                    numbers: dict[str, Any] = {"measured": derive(where, cell, rows, plan.cells)}
                else:
                    numbers = _measured(row, full, dataset, where) if row is not None else {}
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
    (low, high), to_full = part["paired_interval"] or (None, None), part["paired_difference"]
    ends = {"to_full_low": low, "to_full_high": high, "p": part["paired_p"]}
    return {**known, "to_full": to_full, **ends, "paired": to_full is not None}


def _printed(plan: RunPlan, cell: Cell, dataset: str, metric: str) -> dict[str, float | None]:
    """The paper's number for a cell, and its difference to the paper's Full; None for Full itself."""
    experiment, task = plan.experiment or "", cell.identity["task"]
    if task["name"] == "latency":  # printed for one length of prompt and answer
        dataset = f"{task['length']}+{task['new_tokens']}"
    elif len(of_table := {n.dataset for n in published.numbers(experiment)}) == 1:
        (dataset,) = of_table  # a table of one data set, whatever our task is called
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


# -- columns -----------------------------------------------------------------------------------------------------------


def measured(row: Row, where: str) -> float | None:
    """A column of a row that needs no other row; None if the row has no such number."""
    kind, _, name = where.rpartition(":")
    value = dict(numbers_of(row)).get(f"metric.{name}" if kind in ("metric", "rate") else name)
    return None if value is None else value * {"metric": 100.0, "ms": 1000.0}.get(kind, 1.0)


def derive(where: str, cell: Cell, rows: Mapping[str, Row], cells: Iterable[Cell]) -> float | None:
    """Any column of a cell; None if one of its parts was not measured. rows: cell name -> row."""
    kind, _, rest = where.partition(":")
    if kind == "timed":
        others = [one for one in cells if one is not cell and one.name in rows]
        others = [one for one in others if all(one.identity[key] == cell.identity[key] for key in SAME)]
        of = next((rows[one.name] for one in others if one.identity["task"]["name"] == "latency"), None)
        return None if of is None else measured(of, rest)
    if (row := rows.get(cell.name)) is None:
        return None
    if kind == "seconds":
        return seconds(row, rest)
    if kind == "share":
        part, whole = (seconds(row, name) for name in rest.split(":"))
        return None if part is None or not whole else 100 * part / whole
    if kind == "percent":
        value = derive(rest, cell, rows, cells)
        return None if value is None else 100 * value
    if kind not in ("gain", "minus"):
        return measured(row, where)
    line, _, inner = rest.partition(":")
    same = ("model", "task", "seed")
    named = [one for one in cells if line in one.labels and one.name in rows]
    alike = [one for one in named if all(one.identity[key] == cell.identity[key] for key in same)]
    alike.sort(key=lambda one: not (one.ignores_budget or one.identity["budget"] == cell.identity["budget"]))
    if not alike or alike[0] is cell:
        return None
    own, base = (derive(inner, one, rows, cells) for one in (cell, alike[0]))
    if own is None or base is None:
        return None
    return own - base if kind == "minus" else base / own if own else None


def seconds(row: Row, phase: str) -> float | None:
    """Seconds of `prefill`, of the `index` within it, of the `decode` steps after it, or of the whole `answer`."""
    prefill, index, step_ms = row["prefill_s"], row["index_build_s"], row["tpot_p50_ms"]
    decode = None if step_ms is None else (row["generated_tokens"] - 1) * step_ms / 1e3
    answer = None if prefill is None or decode is None else prefill + decode
    return {"prefill": prefill, "index": index, "decode": decode, "answer": answer}[phase]
