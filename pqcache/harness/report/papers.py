"""The papers' tables and figures: what was measured beside what is printed, and what is still missing.

python -m pqcache.harness.report.papers tables [experiment ...] [--out results/runs]  Markdown, LaTeX, CSV, PNG
python -m pqcache.harness.report.papers missing [experiment ...] [--out results/runs]  the command of every empty cell

`tables` without names (make tables) writes <out>/tables: <experiment>.md, .tex, .csv and .png of all experiments that have rows
or whose paper prints numbers; status.md (a line per item of the papers), prose.md (numbers of the papers' text), tables.tex
(all tables, one document) and contact_sheet.png (all figures).

An experiment file says with `report:` how its cells are shown:

    report:
      title: PQCache, table 2
      paper: pqcache                              # pqcache | kvcrush | clusterkv | zipcache
      item: Table 2                               # as printed
      guesses: [...]                              # what the paper does not say and this file chose, a sentence each
      notes: [...]                                # where this differs from what was printed, a sentence each
      columns: {score: score}                     # a column's name -> its number in a row, see entries.measured
      figure: {kind: lines, x: budget, y: score}  # see figures.draw; none for a table
      layout, names, labels, datasets, best, lower  # see layout

`score` is the mean over the data sets, each of which has a column of its own. Numbers of a paper are those of
results/published, table by experiment, model, method (or the cell's name) and budget. Difference to Full: of the same
samples of the same run, with a 95 % bootstrap interval and a sign-flip p-value.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd

from pqcache.atomic import write_text
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import Refused, masked
from pqcache.harness.report import figures, plots, published
from pqcache.harness.report.entries import Entry, printed_rows, rows_of, status, table_entries
from pqcache.harness.report.footnotes import footnotes
from pqcache.harness.report.layout import tables_of
from pqcache.harness.report.published import experiment_plan, experiments, words
from pqcache.harness.report.rows import Row, batch_text, rows_or_refused, rows_under
from pqcache.harness.report.table import MISSING, Report, Table, document, several

FOLDER = "tables"  # under out=


# -- what is missing ---------------------------------------------------------------------------------------------------


def command(cell: Cell) -> str:
    """The command that fills this cell alone, run from the repository's root. Secrets are masked."""
    typed = [text for text in cell.typed if not text.startswith(("out=", "hydra.mode="))]
    return shlex.join(["python", "run.py", *map(masked, [*typed, f"out={cell.run.out}", "hydra.mode=RUN"])])


def missing(plan: RunPlan) -> list[str]:
    """One line per empty cell that a run could fill: its command, after the reason where the last run failed."""
    rows = rows_of(plan)
    states = [(cell, *status(cell)) for cell in plan.cells if cell.name not in rows]
    return [
        command(cell) + (f"    # failed: {reason[:100]}" if state == "failed" else "")
        for cell, state, reason in states
        if state in ("missing", "failed")
    ]


# -- tables ------------------------------------------------------------------------------------------------------------


def report(plan: RunPlan, table: Sequence[Entry], rows: Mapping[str, Row]) -> Report:
    """The table of an experiment: caption, a table per model or as `report.layout` says, footnotes."""
    title, each = str(plan.report.get("title") or plan.experiment), several(e.samples for e in table)
    sizes = f"{each} sample{'' if each == '1' else 's'}, {batch_text(rows.values())}," if each else ""
    machines = several(row["device"] for row in rows.values())
    caption = f"{title}: {sizes or 'nothing measured yet'}{f' on {machines}' if machines else ''}."
    if any(e.published is not None for e in table):
        caption += " In brackets: as printed. Bold: the best, Full and Oracle excluded. Compare differences to Full;"
        caption += " the papers' Full rows differ among themselves."
    smoke = "SMOKE RUN, no results. " if any(row["smoke"] for row in rows.values()) else ""
    tables = tables_of([*table, *printed_rows(plan)], plan.report, plan.best_of)
    return Report(title, smoke + caption, tables, footnotes(plan, rows))


def write(plan: RunPlan, folder: Path | None = None) -> tuple[str, list[Path]]:
    """Write <out>/tables/<experiment>.md, .tex and .csv, and .png if there is a figure to draw. Returns (Markdown, files)."""
    rows = rows_of(plan)
    table = table_entries(plan, rows)
    stem = (folder or Path(plan.cells[0].run.out).expanduser() / FOLDER) / (plan.experiment or "table")
    made = report(plan, table, rows)
    files = made.write(stem, pd.DataFrame([asdict(e) for e in table], columns=[f.name for f in fields(Entry)]))
    picture = figures.draw(plan, table, rows, stem.with_suffix(".png"))
    return made.markdown(), [*files, *([picture] if picture else [])]


def contact_sheet(pictures: Sequence[Path], path: Path) -> Path | None:
    """Small copies of PNG files side by side, each under its name; None without any."""
    if not pictures:
        return None
    figure, axes = plots.canvas(len(pictures), 4.6, 3.6)
    from matplotlib.image import imread

    for axis, picture in zip(axes, pictures, strict=True):
        axis.set_axis_off()
        axis.imshow(imread(picture), interpolation="antialiased")
        axis.set_title(picture.stem, fontsize=11)
    return plots.save(figure, path, pdf=False)


def write_all(out: Path) -> list[Path]:
    """Write everything; returns the files. An experiment that cannot be written is named and left out."""
    folder = out / FOLDER
    tables: dict[str, list[Entry]] = {}
    files: list[Path] = []
    for name in experiments():
        try:
            plan = experiment_plan(name, out)
            rows = rows_of(plan)
            if rows or published.numbers(name):
                files += write(plan, folder)[1]
                tables[name] = table_entries(plan, rows)
        except Refused as refused:
            print(f"{name}: {'; '.join(refused.lines)}", file=sys.stderr)
        except Exception as error:  # one broken figure must not keep the others from being written
            print(f"{name}: not written ({type(error).__name__}: {error})", file=sys.stderr)
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix == ".tex"]
    made = {"tables.tex": document(texts), "prose.md": text_table(tables)}
    made["status.md"] = published.status(row["folder"] for row in rows_under(out))
    for name, text in made.items():
        write_text(folder / name, text)
    sheet = contact_sheet([path for path in files if path.suffix == ".png"], folder / "contact_sheet.png")
    return [*files, *(folder / name for name in made), *([sheet] if sheet else [])]


# -- numbers of the papers' text ---------------------------------------------------------------------------------------

# results/published/prose.csv has the numbers that papers print in their text alone. A line names an experiment (none: nothing
# measures it) and its entries: `line`, and for a comparison `other` (several with `|`: the best of them), at equal model (empty:
# any), budget (empty: any), setting (what the entry's contains) and data set. `how` is one of:
# value: the column itself; percent: times 100; minus: line - other; inverse: other / line; less, more: by how many % of other the
# line is lower or higher
HOW: Mapping[str, Callable[[float, float], float]] = {
    "value": lambda own, _: own,
    "percent": lambda own, _: 100.0 * own,
    "minus": lambda own, other: own - other,
    "inverse": lambda own, other: other / own,
    "less": lambda own, other: 100.0 * (1.0 - own / other),
    "more": lambda own, other: 100.0 * (own / other - 1.0),
}


def is_of(number: Any, entry: Entry) -> bool:
    """Whether a number is of an entry's line, model, data set, budget and setting."""
    return (
        entry.metric == number.metric
        and number.line in entry.line.split(", ")
        and number.model in ("", entry.model)
        and number.dataset in ("", entry.dataset)
        and number.budget in (None, entry.budget)
        and {part for part in number.setting.split(", ") if part} <= set(entry.setting.split(", "))
    )


def text_measured(number: Any, table: Sequence[Entry], field: str = "measured") -> list[float]:
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


def text_table(tables: Mapping[str, Sequence[Entry]]) -> str:
    """Markdown: each number beside what was measured. tables: experiment -> its entries."""
    body = []
    for one in published.numbers("prose"):
        values = text_measured(one, tables.get(one.experiment, ())) if one.experiment else []
        ends = sorted({f"{v:.3g}" for v in (min(values), max(values))}, key=float) if values else []
        shown = " to ".join(ends) or ("not measured yet" if one.experiment else MISSING)
        body.append([one.paper, one.source, one.says, one.printed_as, shown, one.experiment or "none"])
    return Table("", ["paper", "where", "what", "printed", "measured", "experiment"], body).markdown() + "\n"


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["tables", "missing"])
    which = "default: all that repeat a paper's table or figure; missing: all"
    parser.add_argument("experiments", nargs="*", help=which)
    parser.add_argument("--out", default="results/runs", help="the out= folder of the runs")
    given = parser.parse_args(argv)
    out = Path(given.out).expanduser()
    if unknown := [name for name in given.experiments if name not in experiments(every=True)]:
        parser.error(f"unknown experiment: {', '.join(unknown)}")
    if given.what == "tables":
        try:
            rows_or_refused(out, f"--out {given.out}")
        except Refused as refused:
            print(f"error: {refused}", file=sys.stderr)
            return 2
        if not given.experiments:
            print("\n".join(map(str, write_all(out))))
            return 0
    for name in given.experiments or experiments(every=True):
        try:
            plan = experiment_plan(name, given.out)
        except Refused as refused:
            print(f"# {name}: {'; '.join(refused.lines)}", file=sys.stderr)
            continue
        if given.what == "tables":
            text, files = write(plan)
            print(f"## {name}\n\n{text}\n" + "\n".join(map(str, files)) + "\n")
        elif lines := missing(plan):
            print(f"# {name}: {len(lines)} of {len(plan.cells)} cells; all: python run.py {' '.join(words(name))}")
            print("\n".join(lines))
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `... missing | head` ends in silence
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
