"""Run a plan's cells one after the other and print what was measured.

Exit codes: 0 all is well (cells whose method does not apply are skipped), 1 a cell failed, 2 refused, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.harness.config import environment, machine
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.launch import LocalLaunch
from pqcache.harness.run import precheck, printing, stale, tracking
from pqcache.harness.run.session import Session, Watch, model_key
from pqcache.harness.run.units import groups

if TYPE_CHECKING:
    from pqcache.harness.run.one_cell import Outcome


class Interrupted(Exception):
    """Ctrl-C in the cell that the message names."""


def run_plan(plan: RunPlan, watch: Watch | None = None) -> int:
    """Run every cell of a checked plan and print the result. Returns the exit code. watch: is told what happens."""
    out = Path(plan.cells[0].run.out).expanduser()
    if plan.cells[0].run.wandb == "sync":
        return tracking.sync(plan)
    try:
        outcomes = run_cells(plan, Session(watch))
    except Interrupted as interrupted:
        print(f"\ninterrupted in {interrupted}; the same command goes on where it stopped", file=sys.stderr)
        return 130
    printing.print_result(plan, outcomes, out)
    if not plan.sweep and all(outcome.status == "not applicable" for outcome in outcomes.values()):
        return 2
    return 1 if any(outcome.status == "failed" for outcome in outcomes.values()) else 0


def run_cells(plan: RunPlan, session: Session) -> dict[str, Outcome]:
    """Run every cell of a checked plan: cell name -> how it ended. Several plans may share a session."""
    out = Path(plan.cells[0].run.out).expanduser()
    machine.check_out(out)
    environment.quiet()
    precheck.check_models(plan, session)
    environment.keep_files_under(out, Path(plan.cells[0].run.cache_dir).expanduser())
    precheck.check_data(plan)
    stale.set_aside(plan)
    try:
        return _run_here(plan, session) if isinstance(plan.launch, LocalLaunch) else _run_elsewhere(plan, session)
    finally:
        if session.watch is not None:
            session.watch.end()


def _run_here(plan: RunPlan, session: Session) -> dict[str, Outcome]:
    """Run the cells in this process."""
    # After the refusals: importing lm-eval takes seconds.
    from pqcache.harness.run.one_cell import run_or_record

    if session.watch is not None:
        session.watch.begin(plan, session)
    cells = _by_model(plan.cells)
    outcomes: dict[str, Outcome] = {}
    model = None
    for index, cell in enumerate(cells):
        if model != model_key(cell):
            model = model_key(cell)
            _share_prefills([c for c in cells if model_key(c) == model and c.name not in session.misfits], session)
        if plan.sweep:
            print(f"[{index + 1}/{len(cells)}] {cell.label}", flush=True)
        try:
            outcomes[cell.name] = run_or_record(session, cell)
        except KeyboardInterrupt:
            raise Interrupted(cell.label) from None
        if session.watch is not None:
            session.watch.ended(cell.name)
        if plan.sweep:
            print(f"      {printing.outcome_line(outcomes[cell.name])}", flush=True)
    if plan.sweep and (distinct := sum(session.prefills.values())):
        shared = session.prefills.get("shared", 0)
        print(f"prefills: {distinct} distinct, {shared} of them shared by several cells", flush=True)
    return outcomes


def _run_elsewhere(plan: RunPlan, session: Session) -> dict[str, Outcome]:
    """Run the cells on the engine that `launch` names."""
    from pqcache.harness.run.driver import run_on
    from pqcache.harness.run.engines import engine_for

    try:
        return run_on(engine_for(plan.launch), plan, session.unloadable, session.watch)
    except KeyboardInterrupt:
        raise Interrupted(f"{len(plan.cells)} cells on {plan.launch.name}") from None


def _by_model(cells: list[Cell]) -> list[Cell]:
    """Cells of one model next to each other, else in the order of the plan."""
    first: dict[str, int] = {}
    for cell in cells:
        first.setdefault(model_key(cell), len(first))
    return sorted(cells, key=lambda cell: first[model_key(cell)])


def _share_prefills(cells: list[Cell], session: Session) -> None:
    """Compute the samples that cells can share a prefill for. The cells find them in their logs."""
    from pqcache.harness.run import sharing

    for group in groups(cells):
        if sum(cell.decode.samples for cell in group) < 2 or group[0].run.shared_prefill is False:
            continue
        try:
            sharing.run_group(group, session)
        except KeyboardInterrupt:
            raise Interrupted(f"the prompts of {len(group)} cells") from None
