"""The papers' tables and figures: what was measured beside what is printed, and what is still missing.

python -m pqcache.harness.report.papers tables [experiment ...] [--out results/runs]  Markdown, LaTeX, CSV, PNG
python -m pqcache.harness.report.papers missing [experiment ...] [--out results/runs]  the command of every empty cell

An experiment file says with `report:` how its cells are shown:

    report:
      title: PQCache, table 2
      columns: {score: score}                     # a column's name -> its number in a row, see entries.measured
      figure: {kind: lines, x: budget, y: score}  # see paper_figures.draw; none for a table

`score` is the mean over the data sets, each of which has a column of its own. Numbers of a paper are those of
results/published, table by experiment, model, method (or the cell's name) and budget. Difference to Full: of the same
samples of the same run, with a 95 % bootstrap interval and a sign-flip p-value.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pqcache.atomic import write_text
from pqcache.harness.config.cells import Cell, RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.report import paper_figures
from pqcache.harness.report.entries import AVERAGE, Entry, rows_of, status, table_entries
from pqcache.harness.report.rows import Row
from pqcache.harness.report.tables import number, signed, span

if TYPE_CHECKING:
    import pandas as pd

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FOLDER = "tables"  # under out=
EMPTY = "-"


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
    """The command that fills this cell alone, run from the repository's root."""
    out = str(Path(cell.run.out).parent if cell.run.smoke else cell.run.out)
    typed = [text for text in cell.typed if not text.startswith(("out=", "smoke=", "hydra.mode="))]
    extra = [f"out={out}", *(["smoke=true"] if cell.run.smoke else []), "hydra.mode=RUN"]
    return shlex.join(["python", "run.py", *typed, *extra])


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


def grid(table: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """(column names, lines) of one model's table. A cell has the measured number, and in brackets the paper's."""
    columns = list(dict.fromkeys((e.dataset, e.metric) for e in table))
    columns.sort(key=lambda c: c[0] == AVERAGE)  # stable: the average comes last
    datasets, metrics = {d for d, _ in columns}, {m for _, m in columns}
    names = [m if len(datasets) == 1 else d if len(metrics) == 1 else f"{d} {m}" for d, m in columns]
    headline = next((c for c in columns if c[0] == AVERAGE), columns[0])  # the column of the differences
    settings = any(e.setting for e in table)
    head = ["method", "budget", *(["setting"] if settings else []), *names]
    head += ["to Full", "95 %", "p", "printed to Full"]
    lines: dict[tuple, dict[tuple[str, str], Entry]] = {}
    for e in table:
        lines.setdefault((e.line, e.budget, e.setting), {})[e.dataset, e.metric] = e
    body = []
    for (line, budget, setting), cells in lines.items():
        texts = [_cell(cells.get(column)) for column in columns]
        last = cells.get(headline) or next(iter(cells.values()))
        ends = None if last.to_full_low is None or last.to_full_high is None else [last.to_full_low, last.to_full_high]
        shown = [
            "" if last.to_full is None else signed(last.to_full, 2),
            span(ends, lambda x: signed(x, 2)),
            "" if last.p is None else "<0.001" if last.p < 0.001 else f"{last.p:.3f}",
            "" if last.published_to_full is None else signed(last.published_to_full, 2),
        ]
        body.append([line, "" if budget is None else f"{budget:g}", *([setting] if settings else []), *texts, *shown])
    used = [i for i, name in enumerate(head) if i < len(head) - 4 or any(line[i] for line in body)]
    return [head[i] for i in used], [[line[i] for i in used] for line in body]


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return ""
    printed = "" if entry.published is None else f" ({entry.published:g})"
    if entry.measured is None:
        return (EMPTY if entry.status in ("ok", "missing") else entry.status) + printed
    return number(entry.measured, 2) + printed


def caption(plan: RunPlan, table: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """What a table shows, in one or two sentences."""
    counts = sorted({e.samples for e in table if e.samples is not None})
    sizes = (
        "nothing measured yet"
        if not counts
        else f"{'-'.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} samples"
    )
    machines = " / ".join(dict.fromkeys(row["device"] for row in rows.values()))
    text = f"{plan.report.get('title') or plan.experiment}: {sizes}{f' on {machines}' if machines else ''}."
    if any(e.published is not None for e in table):
        text += " In brackets: as printed. Compare differences to Full; the papers' Full rows differ among themselves."
    if any(row["smoke"] for row in rows.values()):
        text = "SMOKE RUN, no results. " + text
    return text


def markdown(plan: RunPlan, table: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """The table of an experiment, one block per model."""
    parts = [caption(plan, table, rows)]
    for model, block in _by_model(table).items():
        head, body = grid(block)
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in body)]
        parts.append(f"**{model}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def latex(plan: RunPlan, table: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """The table of an experiment as LaTeX (booktabs), one tabular per model."""
    parts = [f"% {caption(plan, table, rows)}", "% needs \\usepackage{booktabs}"]
    for model, block in _by_model(table).items():
        head, body = grid(block)
        left = 3 if "setting" in head else 2
        lines = [f"% {model}", f"\\begin{{tabular}}{{{'l' * left}{'r' * (len(head) - left)}}}", "\\toprule"]
        lines += [" & ".join(map(_tex, head)) + r" \\", "\\midrule"]
        lines += [" & ".join(map(_tex, line)) + r" \\" for line in body]
        parts.append("\n".join([*lines, "\\bottomrule", "\\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def _tex(text: str) -> str:
    for mark in "&%$#_{}":
        text = text.replace(mark, f"\\{mark}")
    return f"${text}$" if text[:1] in ("+", "-") and text[1:2].isdigit() else text.replace("[", "{[}")


def _by_model(table: Iterable[Entry]) -> dict[str, list[Entry]]:
    blocks: dict[str, list[Entry]] = {}
    for entry in table:
        blocks.setdefault(entry.model, []).append(entry)
    return blocks


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
    picture = paper_figures.draw(plan, table, rows, stem.with_suffix(".png"))
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
    sys.exit(main())
