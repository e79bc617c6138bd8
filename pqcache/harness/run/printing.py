"""What a sweep or an experiment prints at its end: tables and figures."""

import sys
from collections.abc import Mapping
from pathlib import Path

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.report import papers, tables, trade_off
from pqcache.harness.report.rows import Row
from pqcache.harness.report.table import MISSING
from pqcache.harness.report.tables import summary
from pqcache.harness.run import tracking
from pqcache.harness.run.one_cell import Outcome


def print_sweep(plan: RunPlan, outcomes: Mapping[str, Outcome], rows: Mapping[str, Row], out: Path) -> None:
    """Print the table of a sweep; of an experiment also the paper's, and its picture."""
    shown = {name: MISSING if o.status != "failed" else "failed" for name, o in outcomes.items()}
    print(f"\n{tables.sweep_table(plan, rows, shown)}\n\n{tables.sweep_caption(rows)}rows: {out}")
    if best := tables.best_of_table(plan, rows):
        print(f"\n{best}")
    if plan.report:
        _write_report(plan)
    if pooled := tables.pooled_table(rows.values()):
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
