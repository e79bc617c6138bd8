"""docs/reproducing.md: one line per table, figure and prose number of the papers.

    python -m pqcache.harness.report.reproducing            write it
    python -m pqcache.harness.report.reproducing --check    exit code 1 if it is out of date

It is made from results/published/settings.yaml, the experiment files, the names of the tests, and the rows in
results/reference. `status` makes the same lines for another folder of rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pqcache import places
from pqcache.atomic import write_text
from pqcache.embedded import WEIGHTS
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.report import prose
from pqcache.harness.report.check import compare, with_documents
from pqcache.harness.report.entries import Entry, table_entries
from pqcache.harness.report.footnotes import methods_of
from pqcache.harness.report.items import PAPERS, Item, downloads, items, models, plan_at_paper_scale
from pqcache.harness.report.rows import Row, rows_under

ROOT = places.ROOT  # of a clone: the page is made from its tests and reference rows
PAGE = ROOT / "docs" / "reproducing.md"
REFERENCE = ROOT / "results" / "reference"
TFLOPS, GB_PER_S, REACHED_COMPUTE, REACHED_MEMORY = 312.0, 1555.0, 0.4, 0.6  # an A100 40GB in 16 bits, how much of it
HEAD = (
    "item",
    "what it shows",
    "experiment",
    "protocol",
    "settings beside the paper's",
    "a run needs (estimate)",
    "measured",
)

Plans = Mapping[str, RunPlan]
Tables = Mapping[str, Sequence[Entry]]


def plans(names: Iterable[str]) -> dict[str, RunPlan]:
    """The experiments' cells at the paper's sizes; nothing is loaded."""
    return {name: plan_at_paper_scale(name, "results/runs") for name in names}


def named_experiments() -> list[str]:
    """The experiments of all items."""
    return list(dict.fromkeys(name for item in items() for name in item.experiments))


# -- the columns -------------------------------------------------------------------------------------------------------


def _size_name(cell: Cell) -> str:
    """The model whose sizes a cell has: that of random weights is their geometry."""
    model = cell.identity["model"]
    return str(model["geometry"] if model["name"] == "random" else model["name"])


def hours(item: Item, cells: Sequence[Cell]) -> float | None:
    """Estimated hours of an A100 for all cells of an item; None for a model of unknown size.

    Per sample: 2 P s / compute for a prompt of s tokens, 2 P bytes / bandwidth for each new token; P parameters.
    """
    sizes = [models().get(_size_name(cell)) for cell in with_documents(cells)]
    if None in sizes:
        return None
    parameters = sum(known[0] for known in sizes if known) * 1e9
    prefill = item.prompt_tokens / (REACHED_COMPUTE * TFLOPS * 1e12)
    decode = item.new_tokens / (REACHED_MEMORY * GB_PER_S * 1e9)
    return 2 * parameters * item.samples * (prefill + decode) / 3600


def longest_prompt(item: Item, cells: Sequence[Cell]) -> int:
    """Tokens of the longest prompt of an item's cells, as their options say; else the mean that settings.yaml has."""
    found = [item.prompt_tokens]
    for task in (cell.identity["task"] for cell in cells):
        lengths = task.get("lengths") if isinstance(task.get("lengths"), list) else []
        found += [n for n in (*map(task.get, ("max_length", "length", "tokens")), *lengths) if isinstance(n, int)]
    return max(found)


def needs(item: Item, cells: Sequence[Cell]) -> str:
    """GPU hours, memory and downloads of an item, all estimates."""
    known = [models()[name] for name in dict.fromkeys(map(_size_name, cells)) if name in models()]
    if not known or not item.samples:
        return "unknown"
    time = hours(item, cells)
    memory = max(2 * p + kv * 1024 * longest_prompt(item, cells) / 1e9 for p, kv in known)
    real = dict.fromkeys(c.identity["model"]["name"] for c in cells if c.identity["model"]["name"] != "random")
    weights = sum(2 * models()[name][0] for name in real if name in models())
    data = sum(downloads().get(task, 0) for task in dict.fromkeys(c.identity["task"]["name"] for c in cells)) / 1e3
    load = f"downloads {weights + data:.0f} GB" if real else "no downloads"
    spent = "" if time is None else f"{time:.0f} GPU hours, " if time >= 1 else "under 1 GPU hour, "
    return f"{spent}{memory:.0f} GB, {load}"


def _protocols(cells: Sequence[Cell]) -> str:
    own = dict.fromkeys(str(c.identity["protocol"]) for c in cells if c.identity["method"]["name"] != "full")
    dtypes = dict.fromkeys(str(c.identity["model"]["dtype"]) for c in cells)
    return f"{', '.join(own) or 'aligned'}; {', '.join(dtypes)}"


def _settings(item: Item, plan: RunPlan) -> str:
    states = [one.state for one in compare(plan, item)]
    return ", ".join(f"{states.count(s)} {s}" for s in ("same", "noted", "DIFFERS") if s in states) or "none printed"


def tests_of(plan: RunPlan) -> tuple[list[str], list[str]]:
    """(test files of the tasks, test files of the methods) that run without the paper's models."""
    tests = ROOT / "tests"
    tasks = dict.fromkeys(str(c.identity["task"]["name"]).partition("_cot")[0] for c in plan.cells)
    methods = dict.fromkeys(name for c in plan.cells for name in methods_of(c))
    of_tasks = [tests / "harness" / ("test_latency.py" if t == "latency" else f"tasks/test_{t}.py") for t in tasks]
    of_methods = [tests / ("pq/test_pq.py" if m == "pqcache" else f"baselines/test_{m}.py") for m in methods]
    return [f.stem for f in of_tasks if f.exists()], [f.stem for f in of_methods if f.exists()]


# -- the lines ---------------------------------------------------------------------------------------------------------


def lines_of(item: Item, own: Plans, rows: Mapping[str, Row]) -> list[list[str]]:
    """The lines of an item, one per experiment. rows: folder name -> row, of everything that was measured."""
    if item.drawing:
        return [[item.name, item.shows, "a drawing: nothing to measure", "", "", "", ""]]
    if not item.experiments:
        return [[item.name, item.shows, "**no experiment**", "", "", "", "no"]]
    lines = []
    for name, plan in ((name, own[name]) for name in item.experiments):
        cells = plan.cells
        size = f"`{name}` ({len(cells)} cell{'' if len(cells) == 1 else 's'})"
        measured = sum(cell.name in rows for cell in cells)
        done = "no" if not measured else f"{measured} of {len(cells)} cells"
        run = [_protocols(cells), _settings(item, plan), needs(item, cells)]
        lines.append([item.name, item.shows, size, *run, done])
    return lines


def status_table(paper: str, own: Plans, rows: Mapping[str, Row]) -> str:
    """Markdown: the lines of a paper's items."""
    lines = [line for item in items() if item.paper == paper for line in lines_of(item, own, rows)]
    return _table(HEAD, lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in lines)]
    )


def counted(own: Plans, rows: Mapping[str, Row]) -> str:
    """How much of the papers was measured on their models, in one sentence."""
    cells = {cell.name: cell for plan in own.values() for cell in plan.cells}
    of_models = [c for c in cells.values() if c.identity["model"]["name"] not in ("random", *WEIGHTS)]
    done = sum(cell.name in rows for cell in of_models)
    if not done:
        return f"**None of the {len(of_models)} cells of the papers' models has been measured.**"
    return f"**{done} of the {len(of_models)} cells of the papers' models have been measured.**"


def status(out: Path) -> str:
    """A line per item of the papers, with how many of its cells a folder has."""
    own = plans(named_experiments())
    rows = {row["folder"]: row for row in rows_under(out)}
    parts = [f"## {title}\n\n{status_table(paper, own, rows)}\n" for paper, title in PAPERS.items()]
    return "\n\n".join([counted(own, rows), *parts])


def page(own: Plans, rows: Mapping[str, Row], tables: Tables) -> str:
    """docs/reproducing.md."""
    measurable = [item for item in items() if not item.drawing]
    missing = [f"{PAPERS[i.paper].partition(',')[0]} {i.name}" for i in measurable if not i.experiments]
    parts = [
        "# Reproducing the papers",
        "Made by `python -m pqcache.harness.report.reproducing`; do not edit.",
        f"{counted(own, rows)} They need a GPU and the models' weights. What exists without them: the prompts, the scores and"
        " the sets of tokens that are kept are tested (below), the settings are compared with the papers"
        " (`python -m pqcache.harness.report.check`), and every experiment runs end to end on small random models"
        " (`smoke=true`).",
        f"The four papers have {len(measurable)} tables, figures and panels with measurements,"
        f" {len(measurable) - len(missing)} of them with an experiment"
        + (f"; without one: {', '.join(missing)}." if missing else "."),
        "Run one with `python run.py experiment=<name>`; `make tables` shows what was measured beside what is printed."
        " Efficiency figures take `scale=paper` for the paper's sizes.",
        "Settings: `same` as the paper says, `noted`: they differ and a note under the table says why.",
        f"Estimates, not measurements: GPU hours = cells x samples x (2 P s / ({REACHED_COMPUTE:g} x {TFLOPS:g} TFLOP/s)"
        f" + new tokens x 2 P bytes / ({REACHED_MEMORY:g} x {GB_PER_S:g} GB/s)) on an A100, P parameters, s prompt tokens;"
        " methods add their own work. Memory = weights + K and V of the longest prompt in 16 bits. Downloads = weights + data.",
    ]
    for paper, title in PAPERS.items():
        parts += [f"## {title}", status_table(paper, own, rows)]
        parts += ["Numbers of the text:", prose.table(tables, paper).rstrip()]
    tested = [[name, *(", ".join(names) for names in tests_of(plan))] for name, plan in own.items()]
    head = ("experiment", "prompts and scores", "what is kept, selected or quantized")
    return "\n\n".join([*parts, "## What is tested without the papers' models", _table(head, tested)]) + "\n"


def current() -> str:
    """The page as it should be."""
    own = plans(named_experiments())
    rows = {row["folder"]: row for row in rows_under(REFERENCE)}
    found = {name: {c.name: rows[c.name] for c in plan.cells if c.name in rows} for name, plan in own.items()}
    return page(own, rows, {name: table_entries(own[name], of_plan) for name, of_plan in found.items() if of_plan})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/reproducing.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    only_check = parser.parse_args(argv).check
    text = current()
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    if only_check:
        print(
            f"docs/reproducing.md is {'out of date: python -m pqcache.harness.report.reproducing' if stale else 'up to date'}"
        )
        return int(stale)
    write_text(PAGE, text)
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
