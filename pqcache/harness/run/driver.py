"""The driver of a run on an engine: claims cells, hands out units, and makes rows from what workers have written.

Samples come in two phases. First the units whose times do not count, as many at once as there are workers. Then the first
documents of every cell, with nothing else of the run on the host: TT2T and TPOT are of these.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pqcache.harness.config.cells import Cell, RunPlan, open_folder
from pqcache.harness.config.folders import write_status
from pqcache.harness.run import reduce
from pqcache.harness.run.claims import Busy, Claim
from pqcache.harness.run.job import make_job
from pqcache.harness.run.one_cell import Outcome, failed, not_applicable
from pqcache.harness.run.samples import Missing, SampleLog
from pqcache.harness.run.session import Session, Watch, model_key
from pqcache.harness.run.units import Failure, Progress, Unit, UnitResult, groups, make_units
from pqcache.selective import NotApplicable

if TYPE_CHECKING:
    from pqcache.harness.run.engines import Engine


@dataclass
class _Ended:
    """What units reported."""

    results: dict[str, UnitResult] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)  # cell -> its first failure
    watch: Watch | None = None

    def report(self, event: UnitResult | Progress) -> None:
        if isinstance(event, UnitResult):
            self.results[event.unit] = event
            for cell, failure in event.failures.items():
                self.failures.setdefault(cell, failure)
                if self.watch is not None:
                    self.watch.ended(cell)
        elif self.watch is not None:
            self.watch.sample(event.cell, event.task, event.doc_id, event.score, event.draw)


def run_on(
    engine: Engine, plan: RunPlan, unloadable: dict[str, Exception] | None = None, watch: Watch | None = None
) -> dict[str, Outcome]:
    """Run every cell of a checked plan on an engine: cell name -> how it ended.

    unloadable: models whose configuration could not be read, as Session has them. watch: is told what happens.
    """
    session = reduce.TextSession(watch)
    session.unloadable |= unloadable or {}
    if watch is not None:
        watch.begin(plan, session)
    outcomes: dict[str, Outcome] = {}
    with ExitStack() as stack:
        cells = [cell for cell in plan.cells if _claimed(cell, outcomes, stack)]
        units = _missing_units(cells, session, engine.workers, outcomes)
        ended = _Ended(watch=watch)
        if units:
            job = make_job(plan)
            try:
                for timed in (False, True):
                    if phase := [unit for unit in units if unit.timed == timed]:
                        engine.run(job, phase, ended.report, alone=timed)
            except KeyboardInterrupt:
                for cell in cells:
                    if cell.name not in outcomes:
                        write_status(cell.folder, "interrupted")
                raise
            finally:
                engine.close()
        for cell in cells:
            if cell.name not in outcomes:
                outcomes[cell.name] = _outcome(cell, session, [u for u in units if cell.name in u.cells], ended)
        prefills = sum(result.prefills for result in ended.results.values())
        if prefills:
            print(f"prefills: {prefills} distinct", flush=True)
    return outcomes


def _claimed(cell: Cell, outcomes: dict[str, Outcome], stack: ExitStack) -> bool:
    """Whether the cell is ours to run. Else its outcome says why not."""
    try:
        folder = open_folder(cell)
        if cell.skip is not None:
            write_status(folder, "not applicable", reason=cell.skip)
            outcomes[cell.name] = Outcome("not applicable", reason=cell.skip)
            return False
        stack.callback(Claim(folder).release)
    except Busy as busy:
        outcomes[cell.name] = Outcome("failed", reason=str(busy))
        return False
    except OSError as error:
        outcomes[cell.name] = Outcome("failed", reason=f"{type(error).__name__}: {error}")
        return False
    return True


def _missing_units(cells: list[Cell], session: Session, workers: int, outcomes: dict[str, Outcome]) -> list[Unit]:
    """The units of the cells that lack samples. Cells that are complete, or cannot be run, get their outcome."""
    todo = []
    for cell in cells:
        if cell.identity["task"]["name"] == "latency":
            todo.append(cell)
            continue
        try:
            outcomes[cell.name] = _reduced(cell, session)
        except Missing:
            write_status(cell.folder, "running")
            todo.append(cell)
        except NotApplicable as error:
            outcomes[cell.name] = not_applicable(cell, error)
        except Exception as error:  # a model that cannot be loaded, a task that cannot be built
            outcomes[cell.name] = failed(cell, error)
    units = []
    for group in groups(todo):
        if group[0].identity["task"]["name"] == "latency":
            units += make_units(group, model_key(group[0]), documents=0, tasks=1, workers=workers)
            continue
        count, tasks = reduce.documents(session, group[0])
        units += make_units(group, model_key(group[0]), documents=count, tasks=tasks, workers=workers)
    return units


def _reduced(cell: Cell, session: Session) -> Outcome:
    log = SampleLog.to_read(cell.folder, cell.about.mark)
    outcome = reduce.reduce_cell(session, cell, log)
    facts = {"reason": outcome.reason} if outcome.reason else {}
    count = outcome.row["n_samples"] if outcome.row is not None else None
    write_status(cell.folder, outcome.status, n_samples=count, **facts)
    return outcome


def _outcome(cell: Cell, session: Session, units: list[Unit], ended: _Ended) -> Outcome:
    """A cell's row; or why it has none."""
    if (failure := ended.failures.get(cell.name)) is not None:
        write_status(cell.folder, "failed", reason=failure.reason, traceback=failure.traceback)
        return Outcome("failed", reason=f"{failure.reason[:400]} ({cell.folder / 'status.json'})")
    lost = [(u, r) for u in units if (r := ended.results.get(u.name)) is not None and r.status != "done"]
    if lost:
        reason = "; ".join(
            dict.fromkeys(f"unit {unit.name} ({_range(unit)}) {r.status}: {r.reason}" for unit, r in lost)
        )
        write_status(cell.folder, "failed", reason=reason)
        return Outcome("failed", reason=reason)
    if any(unit.name not in ended.results for unit in units):
        write_status(cell.folder, "running")
        return Outcome("pending", reason="its units are still waiting or at work; the same command collects them")
    try:
        if cell.identity["task"]["name"] == "latency":
            return _latency_outcome(cell)
        return replace(_reduced(cell, session), loaded=False)  # its units computed what it lacked
    except Exception as error:  # one failed cell must not lose the others
        print(f"{cell.label}: {error}", file=sys.stderr)
        return failed(cell, error)


def _latency_outcome(cell: Cell) -> Outcome:
    """The row that a worker wrote."""
    from pqcache.harness.report.rows import read_row

    row = read_row(cell.folder / "row.json")
    if row is None:
        raise Missing(f"{cell.folder}: no row")
    write_status(cell.folder, "ok", n_samples=row["n_samples"])
    return Outcome("ok", row)


def _range(unit: Unit) -> str:
    stop = "the last" if unit.stop is None else unit.stop - 1
    return f"{unit.label}, documents {unit.first} to {stop}"
