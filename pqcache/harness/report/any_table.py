"""A table of any folder of rows; the user names its lines, columns and values. Nothing is run.

    python run.py tables=results/runs                                             a line per method, columns by budget
    python run.py tables=results/runs rows=method,method.m columns=task.length values=score,tpot
    python run.py tables=results/runs rows=method columns=dataset values=score    a column per sub-task

rows and columns: model, method, task, budget, seed, dataset, protocol, any option (method.m, task.length, model.dtype) and any
top-level key of a command. values: the names of configurations.MEASURES, metric.<lm-eval's metric>, or any number of a row
(extra.cluster_hit_rate). Seeds are pooled unless they are named. Models and tasks get a table each; other options that would
put two configurations into one place become columns of their own.

Writes <folder>/tables/table.md, .tex, .csv, and .png and .pdf where there are several points to draw.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pqcache.atomic import write_text
from pqcache.harness.config.options import Refused
from pqcache.harness.report import any_figure, budget_marks, latex
from pqcache.harness.report.configurations import (
    AVERAGE,
    DATASET,
    Configuration,
    Measure,
    Number,
    configurations,
    measure,
    natural,
)
from pqcache.harness.report.escaping import in_markdown
from pqcache.harness.report.footnotes import Footnote
from pqcache.harness.report.rows import Row, batch_text
from pqcache.harness.report.table_layout import EMPTY, NOT_RANKED, Block, Field, Text, block_markdown
from pqcache.harness.report.tables import MISSING, number, signed, span
from pqcache.naming import suggestion

FOLDER = "tables"  # under the folder of rows
STEM = "table"
ROWS, COLUMNS, VALUES = ("method",), ("budget",), ("score", "to_full", "resident", "tpot")
OWN_TABLE = ("model", "task")  # get a table each, unless they are named
MOST_MARKS = 12  # notes on marked lines
UNTOLD = ("seed", "device")  # differ without making another configuration


@dataclass(frozen=True)
class Place:
    """A configuration where a table shows it: a method without a budget is at every budget."""

    of: Configuration
    budget: str
    dataset: str = AVERAGE

    def value(self, key: str) -> str:
        if key == DATASET:
            return self.dataset
        return self.budget if key == "budget" else self.of.value(key)

    def values(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(map(self.value, keys))

    def number(self, of: Measure) -> Number:
        return self.of.number(of, self.dataset)


@dataclass
class Panel:
    """One table: line -> column -> what is there."""

    title: str
    rows: tuple[str, ...]  # keys
    columns: tuple[str, ...]
    lines: dict[tuple[str, ...], dict[tuple[str, ...], Place]] = field(default_factory=dict)

    @property
    def across(self) -> list[tuple[str, ...]]:
        """The columns in order, the average last."""
        found = dict.fromkeys(column for places in self.lines.values() for column in places)
        return sorted(found, key=lambda c: (AVERAGE in c, *(natural(part) for part in c)))


@dataclass
class Layout:
    """What a request shows."""

    panels: list[Panel]
    measures: list[Measure]
    notes: list[str]
    every: list[Configuration]


def lay_out(rows: Sequence[Row], lines: Sequence[str], columns: Sequence[str], values: Sequence[str]) -> Layout:
    """Place the configurations of these rows. Raises Refused for a key or a value that no row has."""
    every, left_out = configurations(rows)
    known = dict.fromkeys([DATASET, *(key for one in every for key in one.keys)])
    errors = [
        f"{option}={key}: unknown; {suggestion(key, known)}"
        for option, keys in (("rows", lines), ("columns", columns))
        for key in keys
        if key not in known
    ]
    if twice := [key for key in lines if key in columns]:
        errors.append(f"columns={','.join(columns)}: {twice[0]} is in rows")
    if "seed" in (*lines, *columns):
        every = [Configuration([row], one.full) for one in every for row in one.rows]
    measures = []
    for name in values:
        try:
            measures.append(measure(name, every))
        except ValueError as error:
            errors.append(f"values={name}: no row has it; {error}")
    if errors:
        raise Refused(errors)
    spread = "budget" in columns or ("budget" in lines and "method" not in lines)
    places = _places(every, spread=spread, datasets=DATASET in (*lines, *columns))
    own = [key for key in OWN_TABLE if key not in (*lines, *columns) and len({p.value(key) for p in places}) > 1]
    extra, hidden = _told_apart(places, [*lines, *columns, *own])
    own += [key for key in extra if key in OWN_TABLE]
    down = (*lines, *(key for key in extra if key not in OWN_TABLE))
    panels: dict[str, Panel] = {}
    for place in sorted(places, key=lambda p: (_rank(p), *(natural(v) for v in p.values(down)))):
        title = ", ".join(v for v in place.values(own) if v)
        panel = panels.setdefault(title, Panel(title, down, tuple(columns)))
        panel.lines.setdefault(place.values(down), {}).setdefault(place.values(columns), place)
    notes = _notes(every, (*own, *down, *columns))
    if hidden:
        notes.append(f"{hidden} configurations that no option tells apart from others are not shown")
    notes += _beside_the_budget(every)
    if left_out:
        notes.append(
            f"{left_out} rows are left out: another one of the same configuration and seed has as many samples"
        )
    return Layout(list(panels.values()), measures, notes, every)


def _rank(place: Place) -> int:
    """Full first, then Oracle."""
    method = place.of.first["method"]
    return NOT_RANKED.index(method) if method in NOT_RANKED else len(NOT_RANKED)


def _places(every: Sequence[Configuration], *, spread: bool, datasets: bool) -> list[Place]:
    """spread: show a method without a budget at every budget. datasets: show the sub-tasks apart."""
    budgets: dict[tuple[str, str], dict[str, None]] = {}
    for one in every:
        if not one.ignores_budget:
            budgets.setdefault((one.first["model"], one.first["task"]), {})[one.budget] = None
    places = []
    for one in every:
        at = [one.value("budget")]
        if one.ignores_budget and spread:
            at = list(budgets.get((one.first["model"], one.first["task"]), {"": None}))
        names = one.datasets if datasets else [AVERAGE]
        places += [Place(one, budget, dataset) for budget in at for dataset in names]
    return places


def _told_apart(places: Sequence[Place], shown: list[str]) -> tuple[list[str], int]:
    """(Further keys, so that no two configurations share a place; how many still do)."""
    candidates = list(dict.fromkeys([*OWN_TABLE, "budget", *(key for p in places for key in p.of.keys)]))
    extra: list[str] = []
    while True:
        shared: dict[tuple[str, ...], list[Place]] = {}
        for place in places:
            shared.setdefault(place.values([*shown, *extra]), []).append(place)
        several = [group for group in shared.values() if len(group) > 1]
        key = next(
            (
                key
                for key in candidates
                if key not in (*shown, *extra, *UNTOLD)
                and any(len({place.value(key) for place in group}) > 1 for group in several)
            ),
            None,
        )
        if key is None:
            return extra, sum(len(group) - 1 for group in several)
        extra.append(key)


def _notes(every: Sequence[Configuration], shown: Sequence[str]) -> list[str]:
    """What differs between lines and is not shown."""
    keys = dict.fromkeys(key for one in every for key in one.keys)
    differ = [
        key
        for key in keys
        if key not in (*shown, *UNTOLD, "budget")
        and not key.startswith("method.")
        and len({o.value(key) for o in every}) > 1
    ]
    return [f"Not the same in all lines, and not shown: {', '.join(differ)}"] if differ else []


def _beside_the_budget(every: Sequence[Configuration]) -> list[str]:
    """Why configurations are marked: they attend clearly more or less than their budget."""
    named = [(f"{one.first['method']} at {one.budget} ({one.first['task']})", one.first) for one in every]
    notes = budget_marks.footnotes(named)
    more = [f"{len(notes) - MOST_MARKS} more are marked"] if len(notes) > MOST_MARKS else []
    return [f"Marked {budget_marks.MARK}: {note}" for note in [*notes[:MOST_MARKS], *more]]


# -- as text -----------------------------------------------------------------------------------------------------------


def block(panel: Panel, measures: Sequence[Measure]) -> Block:
    """A panel as a table, with the best of each column in bold, Full and Oracle excluded."""
    across = panel.across
    alone = len(across) == 1
    head = list(panel.rows)
    body: list[list[Field]] = [[(Text(part or EMPTY),) for part in line] for line in panel.lines]
    for column in across:
        for one in measures:
            name = " ".join(part for part in column if part)
            head.append(one.title if alone else name if len(measures) == 1 else f"{name} {one.title}")
            best = _best([places[column] for places in panel.lines.values() if column in places], one)
            for shown, places in zip(body, panel.lines.values(), strict=True):
                marks = _marks(places.get(column)) if one is measures[0] else ()
                shown.append((*_field(places.get(column), one, best), *marks))
    return Block(_title(panel, measures, across), head, body, len(panel.rows))


def _title(panel: Panel, measures: Sequence[Measure], across: Sequence[tuple[str, ...]]) -> str:
    parts = [panel.title]
    if len(across) == 1:
        parts += [f"{key} {value}" for key, value in zip(panel.columns, across[0], strict=True) if value]
    else:
        what = measures[0].title if len(measures) == 1 else ""
        parts.append(f"{what} by {', '.join(panel.columns)}".strip())
    return ", ".join(part for part in parts if part)


def _best(places: Sequence[Place], of: Measure) -> float | None:
    ranked = [p.number(of).value for p in places if of.better is not None and p.of.first["method"] not in NOT_RANKED]
    known = [value for value in ranked if value is not None]
    return of.better(known) if of.better is not None and len(known) > 1 else None


def _marks(place: Place | None) -> Field:
    """The mark of a configuration that attends clearly more or less than its budget, at its first number."""
    marked = place is not None and place.dataset == AVERAGE and budget_marks.mark(place.of.first)
    return (Text(budget_marks.MARK),) if marked else ()


def _field(place: Place | None, of: Measure, best: float | None) -> Field:
    if place is None:
        return (Text(""),)
    method = place.of.first["method"]
    if of.name in ("to_full", "p") and method == "full":
        return (Text(""),)
    known = place.number(of)
    text = text_of(known, of)
    bold = best is not None and known.value == best and method not in NOT_RANKED
    interval = interval_text(known, of)
    return (Text(text, bold), Text(f" {interval}")) if interval else (Text(text, bold),)


def text_of(known: Number, of: Measure) -> str:
    """A number as a text."""
    if known.value is None:
        return MISSING if known.sampled else EMPTY
    if of.name == "p":
        return "<0.001" if known.value < 0.001 else f"{known.value:.3f}"
    return signed(known.value, of.digits) if of.name == "to_full" else number(known.value, of.digits)


def interval_text(known: Number, of: Measure) -> str:
    """Its interval: [low, high]; [n/a] where too few samples give none; empty where a number has none."""
    if known.value is None or not known.sampled or of.name == "p":
        return ""
    if known.low is None or known.high is None:
        return f"[{MISSING}]"
    show = signed if of.name == "to_full" else number
    return span([known.low, known.high], lambda x: show(x, of.digits))


def caption(layout: Layout) -> str:
    """What the tables show, in a few sentences."""
    every = layout.every
    rows = [row for one in every for row in one.rows]
    names = (
        ", ".join(dict.fromkeys(row["model"] for row in rows)),
        ", ".join(dict.fromkeys(row["task"] for row in rows)),
    )
    counts = sorted({row["n_samples"] for row in rows})
    each = "-".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    seeds = sorted({row["seed"] for row in rows})
    pooled = f", seeds {', '.join(map(str, seeds))} pooled" if any(len(one.rows) > 1 for one in every) else ""
    text = f"{names[0]}: {names[1]}; {each} samples a cell and seed{pooled}, {batch_text(rows)}."
    asked = {one.name for one in layout.measures}
    if asked & {"score", "to_full"}:
        text += " In brackets: 95 % bootstrap interval over samples."
    if "to_full" in asked:
        text += " to Full: mean difference of the same samples."
    if any(one.better for one in layout.measures):
        text += " Bold: the best of a column, Full and Oracle excluded."
    text += f" Machine: {' / '.join(dict.fromkeys(row['device'] for row in rows if row['device']))}."
    return ("SMOKE RUN, no results. " if any(row["smoke"] for row in rows) else "") + text


def markdown(layout: Layout) -> str:
    parts = [in_markdown(caption(layout))]
    parts += [block_markdown(block(panel, layout.measures)) for panel in layout.panels]
    parts += [f"- {in_markdown(note)}" for note in layout.notes]
    return "\n\n".join(parts) + "\n"


def as_csv(layout: Layout) -> str:
    """A line per number."""
    rows, columns = layout.panels[0].rows, layout.panels[0].columns
    keys = tuple(dict.fromkeys([*OWN_TABLE, *rows, *columns]))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, "value", "number", "low", "high", "samples", "seeds", "folders"])
    for panel in layout.panels:
        for places in panel.lines.values():
            for place in places.values():
                samples = sum(row["n_samples"] for row in place.of.rows)
                seeds = " ".join(str(row["seed"]) for row in place.of.rows)
                folders = " ".join(row["folder"] for row in place.of.rows)
                for one in layout.measures:
                    known = place.number(one)
                    numbers = [one.name, known.value, known.low, known.high, samples, seeds, folders]
                    writer.writerow([*place.values(keys), *numbers])
    return text.getvalue()


def write(layout: Layout, folder: Path, name: str) -> tuple[str, list[Path]]:
    """Write table.md, .tex, .csv and .png into a folder. Returns (Markdown, files). name: of the rows, for LaTeX's title."""
    text = markdown(layout)
    tables = [block(panel, layout.measures) for panel in layout.panels]
    notes = [Footnote("Notes", tuple(layout.notes))] if layout.notes else []
    made = {
        ".md": text,
        ".tex": latex.fragment(f"Rows of {name}", caption(layout), tables, notes),
        ".csv": as_csv(layout),
    }
    for suffix, content in made.items():
        write_text(folder / f"{STEM}{suffix}", content)
    files = [folder / f"{STEM}{suffix}" for suffix in made]
    picture = any_figure.draw(lines_of(layout), folder / f"{STEM}.png", caption(layout))
    return text, [*files, *([picture, picture.with_suffix(".pdf")] if picture else [])]


def lines_of(layout: Layout) -> list[any_figure.Panel]:
    """The numbers as a picture shows them: a panel per table and value."""
    panels = []
    for panel in layout.panels:
        for one in layout.measures:
            if one.name in ("p", "samples"):
                continue
            across = panel.across
            drawn = any_figure.Panel(panel.title, one.title, ", ".join(panel.columns), [" ".join(c) for c in across])
            for line, places in panel.lines.items():
                numbers = [places[c].number(one) if c in places else Number() for c in across]
                if any(known.value is not None for known in numbers):
                    first = next(iter(places.values())).of
                    label = " ".join(part for part in line if part)
                    drawn.lines.append(any_figure.Line(label, first.first["method"], first.ignores_budget, numbers))
            if drawn.lines:
                panels.append(drawn)
    return panels
