"""The table of a group of tasks, with a column per task, and the picture of its scores against the budget.

python -m pqcache.harness.report.groups <out>     prints the table; <out>/groups.md and <out>/groups.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pqcache.atomic import write_text
from pqcache.harness.report import axes as drawing
from pqcache.harness.report import budget_marks, plots
from pqcache.harness.report.escaping import in_markdown, printable
from pqcache.harness.report.frame import budget_text, natural
from pqcache.harness.report.plots import Panel
from pqcache.harness.report.rows import Row, rows_under
from pqcache.harness.report.table import MISSING, Table, number, signed, size, spread


def group_rows(folder: Path) -> list[Row]:
    """Every row under a folder whose task is a group: Full first, then by method, varied options and budget."""
    rows = [row for row in rows_under(folder) if len(row["tasks"]) > 1]
    names = dict(zip((row["folder"] for row in rows), labels(rows), strict=True))
    return sorted(
        rows, key=lambda row: (row["method"] != "full", natural(names[row["folder"]]), -(row["budget_ratio"] or 0.0))
    )


def labels(rows: Sequence[Row]) -> list[str]:
    """Each row's method with its hyper-parameters that differ among the rows, and the prompt length if that differs."""
    varied: dict[str, dict[str, None]] = {}
    for row in rows:
        for part in row["folder"].split("__"):
            if part.startswith("method."):
                key = part.removeprefix("method.").partition("=")[0]
                varied.setdefault(row["method"], {})[key] = None
    lengths = {row["task_options"].get("length") for row in rows}
    names = []
    for row in rows:
        values = row["hyper_parameters"]
        parts = [f"{key}={values[key]}" for key in sorted(varied.get(row["method"], ())) if key in values]
        if len(lengths) > 1:
            parts.append(f"{row['task_options'].get('length')} tokens")
        names.append(" ".join([row["method"], *parts]))
    return names


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: a line per row, the mean with its interval, each task, and what the method read and moved."""
    if not rows:
        return ""
    tasks = list(dict.fromkeys(task for row in rows for task in row["tasks"]))
    prefix = f"{rows[0]['task']}_"
    head = ["method", "budget", "samples", "mean", "95 %", "to Full", "95 %", *(t.removeprefix(prefix) for t in tasks)]
    head += ["attended", "bytes per step", "TT2T s", "TPOT ms"]
    body = []
    for row, label in zip(rows, labels(rows), strict=True):
        to_full = [signed(row["paired_difference"]), spread(row["paired_difference"], row["paired_interval"], signed)]
        moved = size(sum(row["bytes_per_step"].values())) if row["bytes_per_step"] else MISSING
        body.append([
            label, budget_text(row), str(row["n_samples"]), number(row["score"]), spread(row["score"], row["score_interval"]),
            *(["", ""] if row["method"] == "full" else to_full), *(_family(row, task) for task in tasks),
            number(row["attended_tokens"], 0) + budget_marks.mark(row), moved, number(row["tt2t_s"], 3),
            number(row["tpot_p50_ms"], 2),
        ])  # fmt: skip
    named = ((f"{label} at {budget_text(row)}", row) for row, label in zip(rows, labels(rows), strict=True))
    notes = "".join(f"\n- {in_markdown(note)}" for note in budget_marks.footnotes(named))
    marked = f"\n\nMarked with an asterisk:\n{notes}" if notes else ""
    return f"{Table('', head, body).markdown()}\n\n{_caption(rows)}{marked}"


def _family(row: Row, task: str) -> str:
    """A sub-task's score and interval."""
    if task not in row["tasks"]:
        return MISSING
    result = row["tasks"][task]
    return f"{number(result['score'])} {spread(result['score'], result['score_interval'])}".strip()


def _caption(rows: Sequence[Row]) -> str:
    """Prompt length, how many samples are timed, machines."""
    prompt = fmean(row["prompt_tokens"] for row in rows)
    lines = [
        f"{rows[0]['model']}, {rows[0]['task']}: {prompt:.0f} prompt tokens and"
        f" {fmean(row['generated_tokens'] for row in rows):.0f} new ones on average;"
        " mean: unweighted over the tasks; intervals: 95 % bootstrap over samples."
    ]
    timed = sorted({row["timed_samples"] for row in rows if row["timed_samples"] < row["n_samples"]})
    if timed:
        lines.append(
            f"Times: of {'-'.join(map(str, timed[:: max(len(timed) - 1, 1)]))} samples a cell with a prefill of their own;"
            " the scores of the others come from one dense prefill for all methods."
        )
    return " ".join([*lines, f"Machine: {' / '.join(dict.fromkeys(row['device'] for row in rows))}."])


def picture(rows: Sequence[Row], path: Path) -> Path | None:
    """Mean scores with intervals. Several budgets: score against budget, a line per method. One budget: a mark per row."""
    points: list[dict[str, Any]] = []
    for label, row in zip(labels(rows), rows, strict=True):
        low, high = row["score_interval"] or (None, None)
        budget = None if row["method"] == "full" else row["budget_ratio"] or row["budget_applied"]
        ends = {"y": row["score"], "low": low, "high": high, "text": number(row["score"])}
        points.append({"line": label, "x": budget, **ends})
    budgets = {point["x"] for point in points if point["x"] and point["y"] is not None}
    if not budgets:
        return None
    lengths = sorted({round(row["prompt_tokens"]) for row in rows})
    tokens = " to ".join(map(str, dict.fromkeys([lengths[0], lengths[-1]])))
    title = f"{rows[0]['model']}, {rows[0]['task']}, {tokens} prompt tokens"
    table = plots.frame(points)
    if len(budgets) == 1:
        title += f", budget {next(iter(budgets)):g}"
        return plots.draw(
            [Panel(title, table, "", "score", "dots", limits=(0, 104))], path, size=(7.0, 1.0 + 0.25 * len(rows))
        )
    panel = Panel(title, table, "budget (share of the prompt)", "score", log="x", limits=(0, 102))
    return plots.draw([panel], path, size=(7.0, 4.2))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the out= folder of the runs")
    out = parser.parse_args(argv).out.expanduser()
    rows = group_rows(out)
    if not rows:
        parser.error(f"{out}: no row of a group of tasks below; run task=pocket with out={out} first")
    text = table(rows)
    write_text(out / "groups.md", text + "\n")
    drawing.keep_files(out)
    picture(rows, out / "groups.png")
    print(printable(text))


if __name__ == "__main__":
    main()
