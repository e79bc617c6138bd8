"""The page itself: `write(folder)` makes report.html, which needs no network and no other file to be viewed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pqcache.atomic import write_text
from pqcache.harness.config.options import Refused, masked
from pqcache.harness.report.any_table import MEASURES
from pqcache.harness.report.escaping import printable
from pqcache.harness.report.footnotes import deviations
from pqcache.harness.report.frame import budget_text, frame, pooled_groups
from pqcache.harness.report.page.cells import CellView, cell_views
from pqcache.harness.report.page.charts import charts
from pqcache.harness.report.rows import Row, skipped_text
from pqcache.harness.report.table import number, several, signed, spread
from pqcache.registry import METHODS, method_class

NAME = "report.html"
TEMPLATE = Path(__file__).with_name("page.html.jinja")
SHOWN = ("tt2t", "tpot", "tpot_p95", "prefill", "index_build", "resident", "peak", "moved", "attended", "prompt")
FACTS: dict[str, Callable[[Row], Any]] = {
    "models": lambda row: row["model"],
    "tasks": lambda row: row["task"],
    "machines": lambda row: row["device"],
    "commits": lambda row: row["git_commit"],
    "number formats of K and V": lambda row: row["kv_dtype"],
    "protocols": lambda row: row["protocol"] if row["method"] != "full" else None,
    "versions": lambda row: ", ".join(f"{name} {of}" for name, of in (row["versions"] or {}).items() if of),
}


def write(root: Path, out: Path, name: str) -> Path:
    """Write the page of a folder's rows into `out`. name: of the folder, for the title. Raises Refused without plotly."""
    path = out / NAME
    write_text(path, page(root, name))
    return path


def page(root: Path, name: str) -> str:
    """The page as a text."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    views = cell_views(root)
    groups, left_out = pooled_groups(view.row for view in views if view.row is not None)
    rows = [row for group in groups for row in group]
    drawn = charts(rows, [view.folder / "heatmap.json" for view in views if view.row is not None])
    data = {"charts": [vars(chart) for chart in drawn], "cells": [_browsed(view) for view in views if view.samples]}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=printable(name),
        library=_library(),
        data=as_script(data),
        views=views,
        bad=[view for view in views if not view.ended_well],
        skipped=[view for view in views if view.status == "not applicable"],
        table=_table(views),
        charts=drawn,
        facts={title: several(map(of, rows)) for title, of in FACTS.items()},
        notes=_notes(rows, left_out),
        deviations=_deviations(rows),
        smoke=any(row["smoke"] for row in rows),
    )


def as_script(value: Any) -> str:
    """JSON that can stand inside a script element: no text in it ends the element or begins a comment."""
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _plain(value: Any) -> Any:
    """A value for JSON: numbers that are none become null, texts lose characters that hide others, and secrets."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return printable(masked(value)) if isinstance(value, str) else value


def _library() -> str:
    """plotly's JavaScript, which the page carries."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise Refused(["report=: needs the package plotly; make setup installs it"]) from None
    return get_plotlyjs().replace("</script", "<\\/script")


# -- the table of cells ------------------------------------------------------------------------------------------------


def _table(views: Iterable[CellView]) -> dict[str, Any]:
    """{head, lines}: a line per row. Each cell is (what is shown, what it is sorted by)."""
    known = [view for view in views if view.row is not None]
    records = frame(view.row for view in known if view.row is not None).to_dict("records")
    shown = [MEASURES[key] for key in SHOWN if any(MEASURES[key].of(record) is not None for record in records)]
    head = ["model", "task", "method", "budget", "seed", "options", "samples", "score", "95 %", "to Full", "95 % "]
    lines = []
    for view, record in zip(known, records, strict=True):
        row: Row = record["row"]
        ratio, options = row["budget_ratio"], _changed(view)
        line: list[tuple[str, Any]] = [(row[key], row[key]) for key in ("model", "task", "method")]
        line += [(budget_text(row), row["budget_tokens"] if ratio is None else ratio), (str(row["seed"]), row["seed"])]
        line += [(options, options), (f"{row['n_samples']}{skipped_text(row)}", row["n_samples"])]
        for name, show in (("score", number), ("to_full", signed)):
            value, interval = MEASURES[name].of(record), MEASURES[name].interval(record)
            full = name == "to_full" and row["method"] == "full"
            texts = ("", "") if full else (show(value), spread(value, interval, show))
            line += zip(texts, (value, interval[0] if interval else None), strict=True)
        line += [(number(value, measure.digits), value) for measure in shown for value in [measure.of(record)]]
        lines.append({"id": view.name, "cells": line, "failed": not view.ended_well})
    return {"head": [*head, *(measure.title for measure in shown)], "lines": lines}


def _changed(view: CellView) -> str:
    """The options that are not at their default, as the folder's name has them."""
    return " ".join(part for part in view.name.split("__")[5:-1] if "=" in part)


def _browsed(view: CellView) -> dict[str, Any]:
    row, title = view.row, view.name
    if row is not None:
        title = f"{row['method']} {budget_text(row)} {row['task']} seed {row['seed']} {_changed(view)}".strip()
    return {"id": view.name, "title": title, "samples": view.samples, "of": view.n_samples}


# -- what must be known ------------------------------------------------------------------------------------------------


def _notes(rows: Sequence[Row], left_out: int) -> list[str]:
    """What a reader must know of these numbers."""
    notes = [
        "Score: 0 to 100, with a 95 % bootstrap interval over samples; n/a with one sample of a sub-task.",
        "To Full: the mean difference of the same samples, with its own interval. Compare differences, not scores.",
        "TT2T: seconds from the prompt to the second token, the index included. TPOT: milliseconds of a decode step.",
        "MiB: cache after the last step, all tiers. KiB per step: bytes moved between tiers and read to select.",
        "Charts pool seeds: scores over the samples of all, times and bytes as means. The table has a line per cell.",
    ]
    if any(row["timed_samples"] is not None and row["timed_samples"] < row["n_samples"] for row in rows):
        notes.append(
            "Times are of the samples that had a prefill of their own; the others shared one with other cells."
        )
    if unverified := sum(row["unverified_samples"] or 0 for row in rows):
        notes.append(f"{unverified} samples are of older lines, which do not name their configuration.")
    if any("-dirty" in (row["git_commit"] or "") for row in rows):
        notes.append("A commit that ends with -dirty had changes that are not committed.")
    if left_out:
        notes.append(
            f"{left_out} rows are not in the charts: another one of the same configuration and seed has as many samples."
        )
    return notes


def _deviations(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Where the shown methods differ from what was published."""
    names = dict.fromkeys(row["method"] for row in rows if row["method"] in METHODS)
    return [(name, lines) for name in names if (lines := deviations(method_class(name)))]
