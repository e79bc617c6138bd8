"""A table of any folder of rows; the user names its lines, columns and values. Nothing is run.

    python run.py tables=results/runs                                             a line per method, columns by budget
    python run.py tables=results/runs rows=method,method.m columns=task.length values=score,tpot
    python run.py tables=results/runs rows=method columns=dataset values=score    a column per sub-task
    python run.py tables=results/runs against=quest                               differences to Quest instead of Full

rows and columns: model, method, task, budget, seed, dataset, protocol, any option (method.m, task.length, model.dtype) and any
top-level key of a command. values: the names of MEASURES, metric.<lm-eval's metric>, or any number of a row
(extra.cluster_hit_rate). Seeds are pooled unless they are named. Models and tasks get a table each; other options that would
put two configurations into one place become columns of their own.

Writes <folder>/tables/table.md, .tex, .csv, and .png and .pdf where there are several points to draw.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from pqcache.harness.config.options import Refused, show
from pqcache.harness.report import frame, plots, table
from pqcache.harness.report.rows import Row, batch_text
from pqcache.naming import suggestion

FOLDER = "tables"  # under the folder of rows
STEM = "table"
ROWS, COLUMNS, VALUES = ("method",), ("budget",), ("score", "to_full", "device", "of_full", "tpot")
OWN_TABLE = ("model", "task")  # get a table each, unless they are named
BUDGET = "budget (share of the prompt)"
MOST_MARKS = 12  # notes on marked lines
UNTOLD = ("seed", "device")  # differ without making another configuration

Record = Mapping[str, Any]  # a line of the frame: keys as texts, numbers, `row`


@dataclass(frozen=True)
class Measure:
    """What a table may show of a configuration."""

    name: str  # as it is asked for
    title: str
    column: str  # of the frame
    digits: int = 1
    better: Callable[[Iterable[float]], float] | None = None  # max or min; None: neither is better
    scale: float = 1.0

    def of(self, record: Record) -> float | None:
        value = record.get(self.column)
        return None if value is None or value != value else value * self.scale

    def interval(self, record: Record) -> list[float] | None:
        ends = [record.get(f"{self.column}.{end}") for end in ("low", "high")]
        return None if any(end is None or end != end for end in ends) else [end * self.scale for end in ends]  # type: ignore[operator]


MEASURES = {
    one.name: one
    for one in (
        Measure("score", "score", "score", better=max),
        Measure("to_full", "to Full", "to_full", better=max),
        Measure("p", "p", "to_full.p", 3),
        Measure("kl", "KL to Full", "metric.kl", 4, min),
        Measure("fall", "fall", "metric.fall", 1, min, 100.0),
        Measure("samples", "samples", "samples", 0),
        Measure("tpot", "TPOT ms", "tpot_p50_ms", 2, min),
        Measure("tpot_p95", "TPOT p95 ms", "tpot_p95_ms", 2, min),
        Measure("tt2t", "TT2T s", "tt2t_s", 3, min),
        Measure("prefill", "prefill s", "prefill_s", 3, min),
        Measure("index_build", "index build s", "index_build_s", 3, min),
        Measure("device", "device MiB", "held_bytes.device", 1, min, 1 / 2**20),
        Measure("host", "host MiB", "held_bytes.host", 1, min, 1 / 2**20),
        Measure("of_full", "of Full's bytes", "of_full.device", 2, min),
        Measure("resident", "MiB with buffers", "resident_bytes", 2, min, 1 / 2**20),
        Measure("peak", "peak MiB", "peak_bytes", 2, min, 1 / 2**20),
        Measure("moved", "KiB per step", "bytes_per_step", 1, min, 1 / 2**10),
        Measure("attended", "attended", "attended_tokens", 0),
        Measure("prompt", "prompt tokens", "prompt_tokens", 0),
        Measure("recall", "recall", "diagnostics.recall_kv", 3, max),
        Measure("mass", "mass", "diagnostics.mass", 3, max),
        Measure("output_error", "output error", "diagnostics.output_error", 3, min),
    )
}
TIMES = {"tpot", "tpot_p95", "tt2t", "prefill", "index_build"}
LOWER = ("_s", "_ms", "_bytes", "error", "perplexity")  # the end of a number of which less is better


@dataclass
class Layout:
    """What a request shows."""

    tables: dict[str, list[Record]]  # title -> what is in it
    rows: tuple[str, ...]  # keys down
    columns: tuple[str, ...]  # keys across
    measures: list[Measure]
    notes: list[str]
    every: list[Row]
    against: str = "full"  # what `to_full` compares with


def lay_out(
    rows: Sequence[Row], lines: Sequence[str], columns: Sequence[str], values: Sequence[str], against: str = "full"
) -> Layout:
    """Place the configurations of these rows. Raises Refused for a key or a value that no row has."""
    asked = (*lines, *columns)
    groups, left_out = frame.pooled_groups(rows)
    kept = [row for group in groups for row in group]
    made = frame.frame(kept, datasets="dataset" in asked, pool="seed" not in asked, against=against)
    keys: list[str] = made.attrs["keys"]
    placed = [("rows", key) for key in lines] + [("columns", key) for key in columns]
    errors = [f"{option}={key}: unknown; {suggestion(key, keys)}" for option, key in placed if key not in keys]
    if twice := [key for key in lines if key in columns]:
        errors.append(f"columns={','.join(columns)}: {twice[0]} is in rows")
    if against not in (methods := [*sorted(set(made.method)), "full"]):
        errors.append(f"against={against}: no row has it; {suggestion(against, methods)}")
    numbers = [name for name in made.select_dtypes("number").columns if name not in keys]
    measures = [measure(name, numbers) for name in values]
    errors += [one for one in measures if isinstance(one, str)]
    if errors:
        raise Refused(errors)
    for key in keys:
        made[key] = [as_text(value) for value in made[key]] if key in made else ""
    if (mark := "method.revision") in keys and mark not in asked:  # it tells apart the versions of one method only
        made[mark] = made[mark].where(made.groupby("method")[mark].transform("nunique") > 1, "")
    if "budget" in columns or ("budget" in lines and "method" not in lines):
        # a method without a budget is shown at each of its model and task
        budgets = made[~made.ignores_budget].groupby(["model", "task"]).budget.unique()
        places = zip(made.model, made.task, strict=True)
        of_place = pd.Series([list(budgets.get(place, [""])) for place in places], made.index)
        made = made.assign(budget=made.budget.where(~made.ignores_budget, of_place)).explode("budget")
    own = [key for key in OWN_TABLE if key not in asked and made[key].nunique() > 1]
    # a task of other options is other work; `source` may be another path to the same
    settings = [key for key in keys if key.startswith("task.") and key not in ("task.source", *asked)]
    own += [key for key in settings if (made.groupby(["model", "task"])[key].nunique() > 1).any()]
    extra, hidden = _told_apart(made, [*asked, *own], keys)
    own += [key for key in extra if key in OWN_TABLE]
    down = (*lines, *(key for key in extra if key not in OWN_TABLE))
    tables: dict[str, list[Record]] = {}
    records: list[Record] = sorted(made.to_dict("records"), key=lambda r: [frame.natural(r[key]) for key in down])
    # Full first, then Oracle
    for record in sorted(records, key=lambda r: [r["method"] != name for name in table.NOT_RANKED]):
        title = ", ".join(record[k] if k in OWN_TABLE else f"{k}={record[k]}" for k in own if record[k])
        tables.setdefault(title, []).append(record)
    firsts = [group[0] for group in groups]
    shown = (*own, *down, *columns, *UNTOLD, "budget", "dataset")
    others = [key for key in keys if key not in shown and not key.startswith("method.")]
    differ = [key for key in others if made[key].nunique() > 1]
    notes = [f"Not the same in all lines, and not shown: {', '.join(differ)}"] if differ else []
    if hidden:
        notes.append(f"{hidden} configurations that no option tells apart from others are not shown")
    named = [(f"{r['method']} at {frame.budget_text(r)} ({r['task']})", r) for r in firsts]
    marked = frame.budget_notes(named)
    more = [f"{len(marked) - MOST_MARKS} more are marked"] if len(marked) > MOST_MARKS else []
    notes += [f"Marked {frame.BUDGET_MARK}: {note}" for note in [*marked[:MOST_MARKS], *more]]
    reasons = dict.fromkeys(made.paired_reason.dropna()) if "to_full" in values else {}
    notes += [f"{_to(against)} is {table.EMPTY}: {reason}" for reason in reasons]
    if left_out:
        other = "another one of the same configuration and seed has as many samples"
        notes.append(f"{left_out} rows are left out: {other}")
    measures = [replace(one, title=_to(against)) if one is MEASURES["to_full"] else one for one in measures]
    return Layout(tables, down, tuple(columns), measures, notes, kept, against)  # type: ignore[arg-type]


def _to(method: str) -> str:
    return "to Full" if method == "full" else f"to {method}"


def measure(name: str, numbers: Sequence[str]) -> Measure | str:
    """The measure of a name: one of MEASURES, or a column of numbers; what is wrong with the name, if no row has it."""
    if name in MEASURES:
        return MEASURES[name]
    if name in numbers:
        title = name.removeprefix("extra.").removeprefix("metric.").replace("_", " ")
        return Measure(name, title, name, 3, min if name.endswith(LOWER) else None)
    return f"values={name}: no row has it; {suggestion(name, [*MEASURES, *numbers] if '.' in name else MEASURES)}"


def as_text(value: Any) -> str:
    """The value of a key; empty where a configuration has none."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    return f"{value:g}" if isinstance(value, float) else show(value)


def labels(records: Sequence[Record], keys: Iterable[str]) -> list[str]:
    """Each configuration's method, with those of these keys that differ among the method's configurations."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        alike.setdefault(record["method"], []).append(record)
    own = {m: [k for k in keys if len({repr(one.get(k)) for one in of}) > 1] for m, of in alike.items()}
    told = ([f"{key.rpartition('.')[2]}={as_text(r.get(key))}" for key in own[r["method"]]] for r in records)
    return [" ".join([r["method"], *parts]) for r, parts in zip(records, told, strict=True)]


def _told_apart(made: pd.DataFrame, shown: list[str], keys: Sequence[str]) -> tuple[list[str], int]:
    """(Further keys, so that no two configurations share a place; how many still do)."""
    extra: list[str] = []
    while True:
        taken = [*shown, *extra]
        shared = made[made.duplicated(taken, keep=False)].groupby(taken)
        candidates = (k for k in dict.fromkeys((*OWN_TABLE, "budget", *keys)) if k not in (*taken, *UNTOLD))
        key = next((k for k in candidates if (shared[k].nunique() > 1).any()), None)
        if key is None:
            return extra, int((shared.size() - 1).sum())
        extra.append(key)


# -- as text -----------------------------------------------------------------------------------------------------------


def tables(layout: Layout) -> list[table.Table]:
    """The tables, with the best of each column in bold, Full and Oracle excluded."""
    return [_table(title, records, layout) for title, records in layout.tables.items()]


def _placed(records: Sequence[Record], layout: Layout) -> tuple[table.Lines[Record], list[table.Key]]:
    """(line -> column -> record, the columns in order, the average last)."""
    texts = [lambda record, keys=keys: tuple(map(record.get, keys)) for keys in (layout.rows, layout.columns)]
    lines, across = table.pivot(records, *texts)
    return lines, sorted(across, key=lambda c: (frame.AVERAGE in c, *map(frame.natural, c)))


def _table(title: str, records: Sequence[Record], layout: Layout) -> table.Table:
    lines, across = _placed(records, layout)
    alone, measures = len(across) == 1, layout.measures
    head = list(layout.rows)
    body: list[list[table.Field]] = [[part or table.EMPTY for part in line] for line in lines]
    for column in across:
        for one in measures:
            name = " ".join(part for part in column if part)
            head.append(one.title if alone else name if len(measures) == 1 else f"{name} {one.title}")
            ranked = [r for cells in lines.values() if (r := cells.get(column)) and r["method"] not in table.NOT_RANKED]
            known = [value for r in ranked if (value := one.of(r)) is not None]
            known = known if len(set(map(_samples, ranked))) == 1 else []
            idle = one.name not in TIMES or not frame.said_of_load(layout.every)
            best = one.better(known) if one.better is not None and idle and len(known) > 1 else None
            for shown, cells in zip(body, lines.values(), strict=True):
                record = cells.get(column)
                if record is None or (one.name in ("to_full", "p") and record["method"] == layout.against):
                    shown.append("")
                else:
                    shown.append(_field(record, one, best, marked=one is measures[0]))
    if alone:
        at = [f"{key} {value}" for key, value in zip(layout.columns, across[0], strict=True) if value]
    else:
        what = measures[0].title if len(measures) == 1 else ""
        at = [f"{what} by {', '.join(layout.columns)}".strip()]
    return table.Table(", ".join(part for part in [title, *at] if part), head, body, len(layout.rows))


def _samples(record: Record) -> frozenset:
    """Seed, sub-task and keys of its samples. Only configurations with the same ones are ranked."""
    return frozenset(
        (row["seed"], task, *row["sample_scores"][task]) for row in record["rows"] for task in row["sample_scores"]
    )


def _field(record: Record, of: Measure, best: float | None, *, marked: bool) -> table.Field:
    """marked: with the mark of a configuration that attends clearly more or less than its budget."""
    value = of.of(record)
    own = {"to_full": table.signed, "p": lambda value, _: table.p_value(value)}
    show: Callable[..., str] = own.get(of.name, table.number)
    if value is not None:
        text = show(value, of.digits)
    else:  # of too few samples, or not measured
        text = table.MISSING if of.name == "p" and MEASURES["to_full"].of(record) is not None else table.EMPTY
    bold = best is not None and value == best and record["method"] not in table.NOT_RANKED
    sampled = of.name in ("score", "to_full") and bool(record["row"]["sample_scores"])
    sampled |= of.name in ("kl", "fall") and of.interval(record) is not None
    interval = table.spread(value, of.interval(record), lambda x: show(x, of.digits)) if sampled else ""
    interval = f"[{table.MISSING}]" if interval == table.MISSING else interval
    whole = marked and record["dataset"] == frame.AVERAGE
    mark = frame.BUDGET_MARK if whole and frame.budget_remark(record["row"]) else ""
    return (table.Bold(text) if bold else text, f" {interval}" if interval else "", mark)


def _caption(layout: Layout) -> str:
    """What the tables show, in a few sentences."""
    rows = layout.every
    names = [", ".join(dict.fromkeys(row[key] for row in rows)) for key in ("model", "task")]
    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    several_seeds = any(len(record["rows"]) > 1 for records in layout.tables.values() for record in records)
    pooled = f", seeds {seeds} pooled" if several_seeds else ""
    each = table.several(row["n_samples"] for row in rows)
    text = f"{names[0]}: {names[1]}; {each} samples a cell and seed{pooled}, {batch_text(rows)}."
    asked = {one.name for one in layout.measures}
    if asked & {"score", "to_full"}:
        text += " In brackets: 95 % bootstrap interval over samples."
    if "to_full" in asked:
        at = "" if layout.against == "full" else " at the same budget"
        text += f" {_to(layout.against)}: mean difference of the same samples{at}."
    if asked & {"device", "host"}:
        text += f" {frame.said_of_bytes(rows)}."
    if asked & TIMES:
        text += f" {frame.said_of_load(rows)}".rstrip()
    if any(one.better for one in layout.measures):
        text += " Bold: the best of a column of the same samples, Full and Oracle excluded."
    text += f" Machine: {table.several(row['device'] for row in rows)}."
    return ("SMOKE RUN, no results. " if any(row["smoke"] for row in rows) else "") + text


def report(layout: Layout, name: str = "") -> table.Report:
    """The tables with caption and notes. name: of the rows, for LaTeX's title."""
    notes = {"Notes": layout.notes} if layout.notes else {}
    return table.Report(f"Rows of {name}", _caption(layout), tables(layout), notes)


def numbers(layout: Layout) -> pd.DataFrame:
    """A line per number."""
    keys = dict.fromkeys([*OWN_TABLE, *layout.rows, *layout.columns])
    lines = []
    for record in (record for records in layout.tables.values() for record in records):
        rows = record["rows"]
        common = {"seeds": " ".join(str(row["seed"]) for row in rows), "folders": " ".join(r["folder"] for r in rows)}
        for one in layout.measures:
            low, high = one.interval(record) or (None, None)
            known = {"value": one.name, "number": one.of(record), "low": low, "high": high}
            samples = sum(row["n_samples"] for row in rows)
            lines.append({**{key: record[key] for key in keys}, **known, "samples": samples, **common})
    return pd.DataFrame(lines)


def write(layout: Layout, folder: Path, name: str) -> tuple[str, list[Path]]:
    """Write table.md, .tex, .csv and .png into a folder. Returns (Markdown, files). name: of the rows, for LaTeX's title."""
    made = report(layout, name)
    files = made.write(folder / STEM, numbers(layout))
    picture = _draw(layout, folder / f"{STEM}.png")
    return made.markdown(), [*files, *([picture, picture.with_suffix(".pdf")] if picture else [])]


def _draw(layout: Layout, path: Path) -> Path | None:
    """Values over the columns where these are numbers, else a mark per line; a panel per table and value."""
    panels, most = [], 0
    over = BUDGET if layout.columns == ("budget",) else ", ".join(layout.columns)
    for title, records in layout.tables.items():
        lines, across = _placed(records, layout)
        numeric = len(across) > 1 and all(pd.to_numeric(list(map(" ".join, across)), errors="coerce") > 0)
        for one in layout.measures:
            points: list[dict[str, Any]] = []
            for line, cells in lines.items():
                label = " ".join(part for part in line if part)
                level = "budget" in layout.columns and next(iter(cells.values()))["ignores_budget"]
                for column in [column for column in across if column in cells][: 1 if level else None]:
                    name = " ".join(column)
                    low, high = one.interval(cells[column]) or (None, None)
                    point = {"line": label, "y": one.of(cells[column]), "low": low, "high": high}
                    told = "" if level or len(across) == 1 else f" {name}"
                    at = {"x": None if level else float(name)} if numeric else {"x": name, "label": label + told}
                    points.append({**point, **at})
            if one.name not in ("p", "samples") and sum(point["y"] is not None for point in points) > 1:
                x, kind, log = (over, "lines", "x") if numeric else ("", "dots", "")
                panels.append(plots.Panel(title, plots.frame(points), x, one.title, kind, log))
                most = max(most, 0 if numeric else len(points))
    height = 3.4 if any(panel.kind == "lines" for panel in panels) else max(2.2, 1.0 + 0.24 * most)
    return plots.draw(panels, path, _caption(layout), size=(4.2, height))
