"""The papers' tables and figures: what was measured beside what is printed, and what is still missing.

python -m pqcache.harness.report.papers tables [experiment ...] [--out results/runs]  Markdown, LaTeX, CSV, PNG
python -m pqcache.harness.report.papers missing [experiment ...] [--out results/runs]  the command of every empty cell

An experiment file says with `report:` how its cells are shown:

    report:
      title: PQCache, table 2
      paper: pqcache                              # pqcache | kvcrush | clusterkv | zipcache
      item: Table 2                               # as printed
      guesses: [...]                              # what the paper does not say and this file chose, a sentence each
      notes: [...]                                # where this differs from what was printed, a sentence each
      columns: {score: score}                     # a column's name -> its number in a row, see entries.measured
      figure: {kind: lines, x: budget, y: score}  # see figures.py; none for a table
      layout, names, labels, datasets, best, lower  # see table_layout

`score` is the mean over the data sets, each of which has a column of its own. Numbers of a paper are those of
results/published, table by experiment, model, method (or the cell's name) and budget. Difference to Full: of the same
samples of the same run, with a 95 % bootstrap interval and a sign-flip p-value.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pqcache import places
from pqcache.atomic import write_text
from pqcache.harness.config.cells import Cell, RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused, masked
from pqcache.harness.config.smoke import FOLDER as SMOKE_FOLDER
from pqcache.harness.report import figures
from pqcache.harness.report.entries import Entry, printed_rows, rows_of, status, table_entries
from pqcache.harness.report.escaping import in_markdown
from pqcache.harness.report.footnotes import footnotes
from pqcache.harness.report.latex import fragment
from pqcache.harness.report.rows import Row, batch_text, rows_or_refused
from pqcache.harness.report.table_layout import block_markdown, blocks

if TYPE_CHECKING:
    import pandas as pd

CONFIGS = places.CONFIGS
FOLDER = "tables"  # under out=


# -- experiments -------------------------------------------------------------------------------------------------------


def experiments(configs: Path = CONFIGS, *, every: bool = False) -> list[str]:
    """The experiments that repeat a paper's table or figure (`report:`); every: all there are."""
    files = sorted((configs / "experiment").glob("*.yaml"))
    return [f.stem for f in files if every or "report" in (yaml.safe_load(f.read_text(encoding="utf-8")) or {})]


def experiment_plan(name: str, out: str | Path, *, smoke: bool = False, configs: Path = CONFIGS) -> RunPlan:
    """The cells of an experiment as `python run.py experiment=<name> out=<out>` would run them; nothing is loaded."""
    return make_plan(compose_all([*words(name, configs), f"out={out}", f"smoke={str(smoke).lower()}"], configs))


def words(name: str, configs: Path = CONFIGS) -> list[str]:
    """The words after `python run.py` in the command that an experiment file's first line gives."""
    first = (configs / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return shlex.split(first.partition("run.py ")[2]) or [f"experiment={name}"]


# -- what is missing ---------------------------------------------------------------------------------------------------


def command(cell: Cell) -> str:
    """The command that fills this cell alone, run from the repository's root. Secrets are masked."""
    out = str(Path(cell.run.out).parent if cell.run.smoke else cell.run.out)
    typed = [text for text in cell.typed if not text.startswith(("out=", "smoke=", "hydra.mode="))]
    extra = [f"out={out}", *(["smoke=true"] if cell.run.smoke else []), "hydra.mode=RUN"]
    return shlex.join(["python", "run.py", *map(masked, [*typed, *extra])])


def missing(plan: RunPlan) -> list[str]:
    """One line per empty cell that a run could fill: its command, after the reason where the last run failed."""
    lines = []
    for cell in plan.cells:
        state, reason = status(cell)
        if state in ("missing", "failed"):
            lines.append(command(cell) + (f"    # failed: {reason[:100]}" if state == "failed" else ""))
    return lines


# -- tables ------------------------------------------------------------------------------------------------------------


def frame(table: Iterable[Entry]) -> pd.DataFrame:
    """The entries as one tidy frame, a line per number."""
    import pandas as pd

    return pd.DataFrame([asdict(e) for e in table], columns=[f.name for f in fields(Entry)])


def caption(plan: RunPlan, table: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """What a table shows, in one or two sentences."""
    counts = sorted({e.samples for e in table if e.samples is not None})
    sizes = "nothing measured yet"
    if counts:
        each = "-".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
        sizes = f"{each} sample{'s' if counts[-1] > 1 else ''}, {batch_text(rows.values())},"
    machines = " / ".join(dict.fromkeys(row["device"] for row in rows.values()))
    text = f"{title_of(plan)}: {sizes}{f' on {machines}' if machines else ''}."
    if any(e.published is not None for e in table):
        text += " In brackets: as printed. Bold: the best, Full and Oracle excluded. Compare differences to Full;"
        text += " the papers' Full rows differ among themselves."
    if any(row["smoke"] for row in rows.values()):
        text = "SMOKE RUN, no results. " + text
    return text


def markdown(plan: RunPlan, table: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """The table of an experiment: caption, a block per model or as `report.layout` says, footnotes."""
    parts = [in_markdown(caption(plan, table, rows))]
    for block in blocks([*table, *printed_rows(plan)], plan.report, plan.best_of):
        parts.append(block_markdown(block))
    for note in footnotes(plan, rows):
        parts.append(f"*{note.title}:*\n\n" + "\n".join(f"- {in_markdown(line)}" for line in note.lines))
    return "\n\n".join(parts) + "\n"


def latex(plan: RunPlan, table: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """The same as LaTeX (booktabs), split where it is wider or longer than a page."""
    tables = blocks([*table, *printed_rows(plan)], plan.report, plan.best_of)
    return fragment(title_of(plan), caption(plan, table, rows), tables, footnotes(plan, rows))


def title_of(plan: RunPlan) -> str:
    """The paper's item and what it shows."""
    return str(plan.report.get("title") or plan.experiment)


def write(plan: RunPlan, folder: Path | None = None) -> tuple[str, list[Path]]:
    """Write <out>/tables/<experiment>.md, .tex and .csv, and .png if there is a figure to draw. Returns (Markdown, files)."""
    rows = rows_of(plan)
    table = table_entries(plan, rows)
    folder = folder or Path(plan.cells[0].run.out).expanduser() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / (plan.experiment or "table")
    text = markdown(plan, table, rows)
    write_text(stem.with_suffix(".md"), text)
    write_text(stem.with_suffix(".tex"), latex(plan, table, rows))
    write_text(stem.with_suffix(".csv"), frame(table).to_csv(index=False))
    picture = figures.draw(plan, table, rows, stem.with_suffix(".png"))
    return text, [stem.with_suffix(s) for s in (".md", ".tex", ".csv")] + ([picture] if picture else [])


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["tables", "missing"])
    parser.add_argument(
        "experiments", nargs="*", help="all that repeat a paper's table or figure; missing: all there are"
    )
    parser.add_argument("--out", default="results/runs", help="the out= folder of the runs")
    parser.add_argument("--smoke", action="store_true", help="of smoke runs")
    arguments = parser.parse_args(argv)
    known = experiments(every=True)
    names = arguments.experiments or experiments(every=arguments.what == "missing")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown experiment: {', '.join(unknown)}")
    if arguments.what == "tables":
        try:
            rows_or_refused(Path(arguments.out, *([SMOKE_FOLDER] if arguments.smoke else [])), f"--out {arguments.out}")
        except Refused as refused:
            print(f"error: {refused}", file=sys.stderr)
            return 2
    for name in names:
        try:
            plan = experiment_plan(name, arguments.out, smoke=arguments.smoke)
        except Refused as refused:
            print(f"# {name}: {'; '.join(refused.lines)}", file=sys.stderr)
            continue
        if arguments.what == "missing":
            lines = missing(plan)
            if lines:
                print(f"# {name}: {len(lines)} of {len(plan.cells)} cells; all: python run.py {' '.join(words(name))}")
                print("\n".join(lines))
        elif arguments.experiments or rows_of(plan):
            text, files = write(plan)
            print(f"## {name}\n\n{text}\n" + "\n".join(map(str, files)) + "\n")
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `... missing | head` ends in silence
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
