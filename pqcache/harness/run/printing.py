"""What a command prints at its end: the row of one cell, or the table and figures of a sweep or experiment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.report import papers, pooling, tables, trade_off
from pqcache.harness.report.escaping import printable
from pqcache.harness.report.row_text import row_text, summary, summary_line
from pqcache.harness.report.rows import Row, read_row
from pqcache.harness.report.table import MISSING
from pqcache.harness.run import tracking
from pqcache.harness.run.one_cell import Outcome


def outcome_line(outcome: Outcome) -> str:
    """How a cell of a sweep ended, in half a line."""
    if outcome.row is not None:
        kept = "; row.json keeps its larger number of samples" if outcome.kept else ""
        loaded = "; loaded, nothing was computed" if outcome.loaded else ""
        return summary_line(outcome.row) + kept + loaded
    return f"{'skipped, ' if outcome.status == 'not applicable' else ''}{outcome.status}: {outcome.reason}"


def print_result(plan: RunPlan, outcomes: Mapping[str, Outcome], out: Path) -> None:
    """Print what was measured, then the failed cells."""
    rows = _rows(plan, outcomes)
    if plan.sweep:
        _print_sweep(plan, outcomes, rows, out)
    else:
        _print_cell(plan, outcomes, rows)
    for cell in plan.cells:
        if outcomes[cell.name].status == "failed":
            print(printable(f"failed: {cell.label}: {outcomes[cell.name].reason}"), file=sys.stderr)


def _rows(plan: RunPlan, outcomes: Mapping[str, Outcome]) -> dict[str, Row]:
    """Cell name -> row, with the refreshed comparison to Full; a kept cell shows the row of this run."""
    rows: dict[str, Row] = {}
    for cell in plan.cells:
        outcome = outcomes[cell.name]
        if outcome.row is not None:
            refreshed = None if outcome.kept else read_row(cell.folder / "row.json")
            rows[cell.name] = refreshed or outcome.row
    return rows


def _print_cell(plan: RunPlan, outcomes: Mapping[str, Outcome], rows: Mapping[str, Row]) -> None:
    cell = plan.cells[0]
    outcome = outcomes[cell.name]
    if outcome.status not in ("ok", "failed"):
        print(outcome_line(outcome))
    if cell.name in rows:
        print(row_text(rows[cell.name], cell.folder / "row.json"))
        if outcome.kept:
            print("  row.json keeps its larger number of samples; the figures above are of this limit")
        elif outcome.loaded:
            print("  loaded: all samples were on disk; fresh=true computes them again")


def _print_sweep(plan: RunPlan, outcomes: Mapping[str, Outcome], rows: Mapping[str, Row], out: Path) -> None:
    shown = {name: MISSING if o.status != "failed" else "failed" for name, o in outcomes.items()}
    print(f"\n{tables.sweep_table(plan, rows, shown)}\n\n{tables.sweep_caption(rows)}rows: {out}")
    if best := tables.best_of_table(plan, rows):
        print(f"\n{best}")
    if plan.report:
        _write_report(plan)
    if pooled := pooling.pooled_table(rows.values()):
        print(f"\n{pooled}")
    if plan.summary is not None:
        _print_summary(plan, plan.summary, rows, out)


def _print_summary(plan: RunPlan, method: str, rows: Mapping[str, Row], out: Path) -> None:
    """What one method saves and costs against Full, and where the picture of it is."""
    if sentences := summary(rows.values(), method):
        print("\n" + "\n".join(sentences))
    try:
        path = trade_off.draw_rows(list(rows.values()), out / f"{plan.experiment}.png")
    except Exception as error:  # the rows are on disk; the same command draws it again
        print(f"picture: not drawn ({type(error).__name__}: {error})", file=sys.stderr)
        return
    if path is not None:
        print(f"picture: {path}")


def _write_report(plan: RunPlan) -> None:
    """Print the experiment's table beside the paper's, write it and its figure below `out`, and log both."""
    try:
        text, files = papers.write(plan)
    except Exception as error:  # the rows are on disk; `python -m pqcache.harness.report.papers tables` does it again
        print(f"table: not written ({type(error).__name__}: {error})", file=sys.stderr)
        return
    print(f"\n{text}\n" + "\n".join(str(path) for path in files))
    tracking.track_report(plan, files)
