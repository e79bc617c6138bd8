"""Rows of a group of tasks, one column per task, and their score against the budget as a picture.

python -m pqcache.harness.groups <out>     prints the table; <out>/groups.md and <out>/groups.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pqcache.harness.cells import write_text
from pqcache.harness.results import Row, rows_under
from pqcache.harness.tables import MISSING, budget_text, number, signed, size, span


def group_rows(folder: Path) -> list[Row]:
    """Every row under a folder whose task is a group, Full first, then by method, budget and changed keys."""
    return sorted(
        (row for row in rows_under(folder) if len(row["tasks"]) > 1),
        key=lambda row: (row["method"] != "full", row["method"], -(row["budget_ratio"] or 0.0), row["folder"]),
    )


def changed(row: Row) -> str:
    """The keys of method.* that the cell's folder names: what was varied."""
    return " ".join(part for part in row["folder"].split("__") if part.startswith("method."))


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: a line per row, the mean with its interval, each task, and what the method read and moved."""
    if not rows:
        return ""
    tasks = list(dict.fromkeys(task for row in rows for task in row["tasks"]))
    prefix = f"{rows[0]['task']}_"
    head = ["method", "budget", "samples", "mean", "95 %", "to Full", "95 %", *(t.removeprefix(prefix) for t in tasks)]
    head += ["attended", "bytes per step", "TT2T s", "TPOT ms"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        full = row["method"] == "full"
        cells = [
            f"{row['method']} {changed(row)}".strip(),
            budget_text(row),
            str(row["n_samples"]),
            number(row["score"]),
            span(row["score_interval"]),
            "" if full else signed(row["paired_difference"]),
            "" if full else span(row["paired_interval"], signed),
            *(_family(row, task) for task in tasks),
            number(row["attended_tokens"], 0),
            size(sum(row["bytes_per_step"].values())),
            number(row["tt2t_s"], 3),
            number(row["tpot_p50_ms"], 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{_caption(rows)}"


def _family(row: Row, task: str) -> str:
    """A sub-task's score and interval."""
    if task not in row["tasks"]:
        return MISSING
    found = row["tasks"][task]
    return f"{number(found['score'])} {span(found['score_interval'])}".strip()


def _caption(rows: Sequence[Row]) -> str:
    """What the columns are of: prompt, samples, where TT2T was measured, machines."""
    prompt = sum(row["prompt_tokens"] for row in rows) / len(rows)
    lines = [
        f"{rows[0]['model']}, {rows[0]['task']}: {prompt:.0f} prompt tokens and"
        f" {sum(row['generated_tokens'] for row in rows) / len(rows):.0f} new ones on average;"
        " mean: unweighted over the tasks; intervals: 95 % bootstrap over samples."
    ]
    timed = sorted({row["timed_samples"] for row in rows if row["timed_samples"] < row["n_samples"]})
    if timed:
        lines.append(
            f"Times: of {'-'.join(map(str, timed[:: max(len(timed) - 1, 1)]))} samples a cell with a prefill of their own;"
            " the scores of the others come from one dense prefill for all methods."
        )
    return " ".join([*lines, f"Machine: {' / '.join(dict.fromkeys(row['device'] for row in rows))}."])


def _point(row: Row) -> tuple[float, float, float, float]:
    """(budget, score, its interval's ends) of a measured row."""
    score = row["score"] or 0.0
    low, high = row["score_interval"] or [score, score]
    return row["budget_ratio"] or row["budget_applied"] or 0.0, score, low, high


def picture(rows: Sequence[Row], path: Path) -> Path | None:
    """Mean score against budget, a line per method (and what was varied), intervals as bars; Full is the level above."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row["score"] is not None and row["method"] != "full" and row["budget_applied"] is not None:
            lines.setdefault(f"{row['method']} {changed(row)}".strip(), []).append(row)
    if not lines:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for label, members in lines.items():
        points = sorted(_point(row) for row in members)
        x, y = [p[0] for p in points], [p[1] for p in points]
        bars = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
        axis.errorbar(x, y, yerr=bars, label=label, marker="o", markersize=4, capsize=2, linewidth=1)
    for row in rows:
        if row["method"] == "full" and row["score"] is not None:
            axis.axhline(row["score"], color="black", linewidth=0.8, linestyle=":", label="full")
            break
    axis.set(xscale="log", xlabel="budget (share of the prompt)", ylabel="score", ylim=(0, 102))
    first = rows[0]
    axis.set_title(f"{first['model']}, {first['task']}, {first['prompt_tokens']:.0f} prompt tokens", fontsize=9)
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the out= folder of the runs")
    out = parser.parse_args(argv).out.expanduser()
    rows = group_rows(out)
    if not rows:
        parser.error(f"{out}: no row of a group of tasks below; run task=pocket with out={out} first")
    text = table(rows)
    write_text(out / "groups.md", text + "\n")
    picture(rows, out / "groups.png")
    print(text)


if __name__ == "__main__":
    main()
