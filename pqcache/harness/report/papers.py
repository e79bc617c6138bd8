"""The papers' tables and figures: what was measured beside what is printed, and what is still missing.

python -m pqcache.harness.report.papers tables [experiment ...] [--out results/runs]  Markdown, LaTeX, CSV, PNG
python -m pqcache.harness.report.papers missing [experiment ...] [--out results/runs]  the command of every empty cell

An experiment file says with `report:` how its cells are shown:

    report:
      title: PQCache, table 2
      columns: {score: score}                     # a column's name -> where its number stands in a row, see `measured`
      figure: {kind: lines, x: budget, y: score}  # see paper_figures.draw; none for a table

`score` is the mean over the data sets, each of which has a column of its own. Numbers of a paper are those of
results/published, found by experiment, model, method (or the cell's name) and budget. Difference to Full: of the same
samples of the same run, with a 95 % bootstrap interval and the p of random signs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pqcache.atomic import write_text
from pqcache.harness.config.cells import Cell, RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.report import published, score_statistics
from pqcache.harness.report import rows as results
from pqcache.harness.report.rows import Row
from pqcache.harness.report.tables import cell_label, number, signed, span, varying_keys

if TYPE_CHECKING:
    import pandas as pd

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
AVERAGE = published.AVERAGE
FOLDER = "tables"  # under out=
EMPTY = "-"


@dataclass(frozen=True)
class Entry:
    """One number of a table. None: not measured, or not printed."""

    experiment: str
    model: str
    line: str  # the experiment's name of the cell, or the method
    method: str
    budget: float | int | None  # None: the method takes none
    setting: str  # what else tells this line from others
    dataset: str  # `average` over several
    metric: str
    measured: float | None
    low: float | None  # 95 % bootstrap interval
    high: float | None
    to_full: float | None
    to_full_low: float | None
    to_full_high: float | None
    p: float | None
    published: float | None
    published_to_full: float | None
    samples: int | None
    status: str  # ok | missing | not applicable | failed
    folder: str


# -- experiments -------------------------------------------------------------------------------------------------------


def experiments(configs: Path = CONFIGS, *, every: bool = False) -> list[str]:
    """The experiments that repeat a paper's table or figure (`report:`); every: all there are."""
    files = sorted((configs / "experiment").glob("*.yaml"))
    return [f.stem for f in files if every or "report" in (yaml.safe_load(f.read_text(encoding="utf-8")) or {})]


def experiment_plan(name: str, out: str | Path, *, smoke: bool = False, configs: Path = CONFIGS) -> RunPlan:
    """The cells of an experiment as `python run.py experiment=<name> out=<out>` would run them; nothing is loaded."""
    return make_plan(compose_all([*words(name, configs), f"out={out}", f"smoke={str(smoke).lower()}"], configs))


def words(name: str, configs: Path = CONFIGS) -> list[str]:
    """What an experiment file's first line says to type after `python run.py`."""
    first = (configs / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return shlex.split(first.partition("run.py ")[2]) or [f"experiment={name}"]


def rows_of(plan: RunPlan) -> dict[str, Row]:
    """The rows of a plan's cells that are on disk, by the cell's name."""
    found = {cell.name: results.read_row(cell.folder / "row.json") for cell in plan.cells}
    return {name: row for name, row in found.items() if row is not None}


# -- what is missing ---------------------------------------------------------------------------------------------------


def status(cell: Cell) -> tuple[str, str]:
    """(how the cell stands, why) from its folder."""
    if (cell.folder / "row.json").exists():
        return "ok", ""
    if cell.skip is not None:
        return "not applicable", cell.skip
    try:
        told = json.loads((cell.folder / "status.json").read_text())
    except (OSError, ValueError):
        return "missing", ""
    state = str(told.get("status"))
    if state in ("not applicable", "failed"):
        return state, str(told.get("reason") or "")
    return "missing", ""


def command(cell: Cell) -> str:
    """What fills this cell alone, from the repository's root."""
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


# -- numbers -----------------------------------------------------------------------------------------------------------


def entries(plan: RunPlan, rows: Mapping[str, Row] | None = None) -> list[Entry]:
    """Every number of an experiment's table, printed ones included where nothing was measured yet."""
    rows = rows_of(plan) if rows is None else rows
    columns = dict(plan.report.get("columns") or {"score": "score"})
    keys = [key for key in varying_keys(plan) if key not in ("cell", "method", "model", "task")]
    found: list[Entry] = []
    for cell in plan.cells:
        row = rows.get(cell.name)
        budget = None if cell.ignores_budget else cell.identity["budget"]
        setting = ", ".join(f"{k.rpartition('.')[2]}={v}" for k in keys if (v := cell_label(cell, k)))
        common = {
            "experiment": plan.experiment or "",
            "model": cell.identity["model"]["name"],
            "line": ", ".join(cell.names) or cell.identity["method"]["name"],
            "method": cell.identity["method"]["name"],
            "budget": budget,
            "setting": "" if cell.names and "seed" not in keys else setting,
            "samples": row["n_samples"] if row is not None else None,
            "status": status(cell)[0] if row is None else "ok",
            "folder": cell.name,
        }
        full = results.find_full(row, rows.values()) if row is not None else None
        for metric, where in columns.items():
            for dataset in _datasets(cell, row, where):
                found.append(Entry(**common, **_numbers(plan, cell, row, full, dataset, metric, where), metric=metric))
    return [*found, *_best_of(plan, found)]


def _datasets(cell: Cell, row: Row | None, where: str) -> list[str]:
    """The data sets of a cell, then their average; of a single one its task's name."""
    task = cell.identity["task"]
    if row is not None and len(row["tasks"]) > 1:
        names = [name.removeprefix(f"{row['task']}_") for name in row["tasks"]]
    else:
        names = [str(name) for name in task.get("datasets") or ()]
    if where != "score":
        names = []  # other figures are of the cell as a whole
    return [*names, AVERAGE] if len(names) > 1 else [str(task["name"])]


def measured(row: Row, where: str) -> float | None:
    """A number of a row: `score`, `metric:<lm-eval's metric>` (the mean over tasks, times 100), `rate:<metric>` (as it
    is), `row:<dotted path>`, or `ms:<path>` of seconds as milliseconds.
    """
    kind, _, name = where.partition(":")
    if kind == "score":
        return row["score"]
    if kind in ("metric", "rate"):
        values = [task["metrics"][name] for task in row["tasks"].values() if name in task["metrics"]]
        return (100.0 if kind == "metric" else 1.0) * sum(values) / len(values) if values else None
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
        "published": printed,
        "published_to_full": None if printed is None or printed_full is None else printed - printed_full,
    }


def _printed(plan: RunPlan, cell: Cell, dataset: str, metric: str) -> tuple[float | None, float | None]:
    """(the paper's number, its Full's; None for Full itself) of a cell."""
    experiment, model = plan.experiment or "", cell.identity["model"]["name"]
    of_table = {n.dataset for n in published.numbers(experiment)}
    dataset = next(iter(of_table)) if len(of_table) == 1 else dataset  # one data set: whatever our task is called
    where: dict[str, Any] = {"model": model, "dataset": dataset, "metric": metric}
    budget = None if cell.ignores_budget else cell.identity["budget"]
    labels = cell.labels
    found = [published.value(experiment, method=name, budget=budget, **where) for name in labels]
    printed = next((value for value in found if value is not None), None)
    full = published.value(experiment, method="full", budget=None, **where)
    return printed, None if "full" in labels else full


def _best_of(plan: RunPlan, found: Sequence[Entry]) -> list[Entry]:
    """The lines an experiment declares as the best of several cells: the numbers of the best one, under the line's name."""
    lines = []
    for name, cells in plan.best_of.items():
        groups: dict[tuple, list[Entry]] = {}
        for entry in found:
            if set(entry.line.split(", ")) & set(cells):
                groups.setdefault((entry.model, entry.budget), []).append(entry)
        for (model, budget), group in groups.items():
            heads = [e for e in group if e.dataset in (AVERAGE, group[-1].dataset) and e.measured is not None]
            best = max(heads, key=lambda e: e.measured or 0.0).folder if heads else group[0].folder
            for entry in group:
                if entry.folder != best:
                    continue
                where: dict[str, Any] = {"model": model, "dataset": entry.dataset, "metric": entry.metric}
                printed = published.value(plan.experiment or "", method=name, budget=budget, **where)
                base = published.value(plan.experiment or "", method="full", budget=None, **where)
                difference = None if printed is None or base is None else printed - base
                chosen = f"best: {entry.line}" if heads else ""
                told = {"line": name, "setting": chosen, "published": printed, "published_to_full": difference}
                lines.append(Entry(**{**asdict(entry), **told}))
    return lines


# -- tables ------------------------------------------------------------------------------------------------------------


def frame(found: Iterable[Entry]) -> pd.DataFrame:
    """The entries as one tidy frame, a line per number."""
    import pandas as pd

    return pd.DataFrame([asdict(e) for e in found], columns=[f.name for f in fields(Entry)])


def grid(found: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """(column names, lines) of one model's table. A cell says what was measured, and in brackets what is printed."""
    columns = list(dict.fromkeys((e.dataset, e.metric) for e in found))
    columns.sort(key=lambda c: c[0] == AVERAGE)  # stable: the average comes last
    datasets, metrics = {d for d, _ in columns}, {m for _, m in columns}
    names = [m if len(datasets) == 1 else d if len(metrics) == 1 else f"{d} {m}" for d, m in columns]
    headline = next((c for c in columns if c[0] == AVERAGE), columns[0])  # what the differences are of
    settings = any(e.setting for e in found)
    head = ["method", "budget", *(["setting"] if settings else []), *names]
    head += ["to Full", "95 %", "p", "printed to Full"]
    lines: dict[tuple, dict[tuple[str, str], Entry]] = {}
    for e in found:
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


def caption(plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """What a table is of, in one or two sentences."""
    counts = sorted({e.samples for e in found if e.samples is not None})
    sizes = (
        "nothing measured yet"
        if not counts
        else f"{'-'.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} samples"
    )
    machines = " / ".join(dict.fromkeys(row["device"] for row in rows.values()))
    text = f"{plan.report.get('title') or plan.experiment}: {sizes}{f' on {machines}' if machines else ''}."
    if any(e.published is not None for e in found):
        text += " In brackets: as printed. Compare differences to Full; the papers' Full rows differ among themselves."
    if any(row["smoke"] for row in rows.values()):
        text = "SMOKE RUN, no results. " + text
    return text


def markdown(plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """The table of an experiment, one block per model."""
    parts = [caption(plan, found, rows)]
    for model, block in _by_model(found).items():
        head, body = grid(block)
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in body)]
        parts.append(f"**{model}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def latex(plan: RunPlan, found: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    """The same as LaTeX (booktabs), one tabular per model."""
    parts = [f"% {caption(plan, found, rows)}", "% needs \\usepackage{booktabs}"]
    for model, block in _by_model(found).items():
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


def _by_model(found: Iterable[Entry]) -> dict[str, list[Entry]]:
    blocks: dict[str, list[Entry]] = {}
    for entry in found:
        blocks.setdefault(entry.model, []).append(entry)
    return blocks


def write(plan: RunPlan, folder: Path | None = None) -> tuple[str, list[Path]]:
    """Write <out>/tables/<experiment>.md, .tex, .csv and, of a figure with something measured, .png: (Markdown, files)."""
    from pqcache.harness.report import paper_figures

    rows = rows_of(plan)
    found = entries(plan, rows)
    folder = folder or Path(plan.cells[0].run.out).expanduser() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / (plan.experiment or "table")
    text = markdown(plan, found, rows)
    write_text(stem.with_suffix(".md"), text)
    write_text(stem.with_suffix(".tex"), latex(plan, found, rows))
    write_text(stem.with_suffix(".csv"), frame(found).to_csv(index=False))
    picture = paper_figures.draw(plan, found, rows, stem.with_suffix(".png"))
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
