"""Run a plan's cells and print what was measured.

Every cell goes the same way: it is claimed, what its log lacks is computed in units, and its row is made from the samples on
disk. With launch=local this happens in this process, for one group of cells with the same prompts after the other; an engine
gets the units of all groups at once.

Exit codes: 0 all is well (cells whose method does not apply are skipped), 1 a cell failed, 2 refused, 130 Ctrl-C.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pqcache.harness.config.cells import Cell, RunPlan, open_folder, write_status
from pqcache.harness.config.options import Launch, LocalLaunch, RayLaunch
from pqcache.harness.report import papers, tables, trade_off
from pqcache.harness.report.rows import Row, match_full, pair_with_full, read_row, write_row
from pqcache.harness.report.table import MISSING, printable
from pqcache.harness.report.tables import row_text, summary, summary_line
from pqcache.harness.run import one_cell, precheck, tracking
from pqcache.harness.run.compute import Member, compute
from pqcache.harness.run.one_cell import Outcome
from pqcache.harness.run.prompts import TooLong
from pqcache.harness.run.row_builder import tpot_ms
from pqcache.harness.run.samples import Busy, Missing, Sample, SampleLog, claim
from pqcache.harness.run.session import Session, Watch, model_key
from pqcache.harness.run.units import (
    Engine,
    Failure,
    Job,
    Progress,
    Unit,
    UnitResult,
    groups,
    may_share,
    own_documents,
    ranges,
)

REPLACED = re.compile(r".+\.replaced-(\d+)")


def run_plan(plan: RunPlan, watch: Watch | None = None) -> int:
    """Run every cell of a checked plan and print the result. Returns the exit code. watch: is told what happens."""
    first = plan.cells[0]
    out, mode = Path(first.run.out).expanduser(), first.run.wandb
    if mode == "sync":
        return tracking.sync(plan)
    try:
        outcomes = run_cells(plan, Session(watch, weights=isinstance(first.launch, LocalLaunch)))
    except KeyboardInterrupt as interrupted:
        where = f" in {interrupted}" if interrupted.args else ""
        print(f"\ninterrupted{where}; the same command goes on where it stopped", file=sys.stderr)
        return 130
    if mode != "disabled":
        tracking.track_rows(plan, mode)
    print_result(plan, outcomes, out)
    if not plan.sweep and all(outcome.status == "not applicable" for outcome in outcomes.values()):
        return 2
    return 1 if any(outcome.status == "failed" for outcome in outcomes.values()) else 0


def run_cells(plan: RunPlan, session: Session) -> dict[str, Outcome]:
    """Run every cell of a checked plan: cell name -> how it ended. Several plans may share a session."""
    first = plan.cells[0]
    out = Path(first.run.out).expanduser()
    precheck.check(plan, session)
    if any(cell.run.fresh for cell in plan.cells):
        set_aside(plan)
    run = _Run(plan, session)
    engine = None if isinstance(first.launch, LocalLaunch) else engine_for(first.launch)
    session.watch.begin(plan, session)
    try:
        if engine is None:
            run.here()
        else:
            run.elsewhere(engine)
    finally:
        session.watch.end()
    refresh_pairs(out)
    return run.outcomes


def engine_for(launch: Launch) -> Engine:
    """The engine that `launch` names. Raises Refused if its package is not installed or its cluster cannot be reached."""
    if isinstance(launch, RayLaunch):
        from pqcache.harness.run.engines.ray_engine import RayEngine

        return RayEngine(launch)
    from pqcache.harness.run.engines.slurm_engine import SlurmEngine

    return SlurmEngine(launch)  # type: ignore[arg-type]


@dataclass
class _Run:
    """A command while it runs."""

    plan: RunPlan
    session: Session
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    results: dict[str, UnitResult] = field(default_factory=dict)  # of units
    begun: int = 0  # cells that were announced

    # -- on this machine -----------------------------------------------------------------------------------------------

    def here(self) -> None:
        """Run the cells in this process, those of one model and one set of prompts next to each other."""
        unable = [cell for cell in self.plan.cells if cell.skip is not None or cell.method is None]
        by_model: dict[str, list[list[Cell]]] = {}
        for group in [[cell] for cell in unable] + groups(self.plan.cells):
            by_model.setdefault(model_key(group[0]), []).append(group)
        for group in [group for of_model in by_model.values() for group in of_model]:
            with ExitStack() as stack:
                self._group(group, {cell.name: self._opened(cell, stack) for cell in group})
        if self.plan.sweep and (distinct := sum(self.session.prefills.values())):
            print(f"prefills: {distinct} distinct, {self.session.prefills['shared']} of them shared by several cells",
                  flush=True)  # fmt: skip

    def _group(self, group: list[Cell], opened: dict[str, Member | None]) -> None:
        """Compute what the cells share, then each cell."""
        able, tasks = [cell for cell in group if opened[cell.name] is not None], 1
        if able and may_share(able):
            with contextlib.suppress(Exception):  # its unit meets the same error and reports it
                tasks = len(self.session.task(able[0], self.session.model(able[0]))[1]["tasks"])
            names, label, own = tuple(cell.name for cell in able), f"{len(able)} cells", own_documents(able, tasks)
            shared = Unit(names, label, timed=True, shared="only", own=own)
            self._compute(shared, opened, f"the prompts of {label}")
        for cell in group:
            self.begun += 1
            if self.plan.sweep:
                print(f"[{self.begun}/{len(self.plan.cells)}] {cell.label}", flush=True)
            if (member := opened[cell.name]) is not None:
                write_status(cell.folder, "running")
                whole = cell.identity["task"]["name"] == "latency"
                self._compute(Unit((cell.name,), cell.label, timed=True, whole=whole), opened, cell.label)
                self._finish(member)
            if self.plan.sweep:
                print(f"      {outcome_line(self.outcomes[cell.name])}", flush=True)

    def _compute(self, unit: Unit, opened: dict[str, Member | None], what: str) -> None:
        members = [member for name in unit.cells if (member := opened[name]) is not None]
        with self._interruptible(members if unit.shared == "no" else [], what):
            self._report(compute(self.session, unit, members))

    # -- on workers ----------------------------------------------------------------------------------------------------

    def elsewhere(self, engine: Engine) -> None:
        """Run the cells on an engine: first units whose times do not count, then the others, alone on their hosts."""
        with ExitStack() as stack:
            stack.callback(engine.close)
            found = {cell.name: self._opened(cell, stack) for cell in self.plan.cells}
            members = [member for member in found.values() if member is not None]
            todo = [member.cell for member in members if self._lacks(member)]
            units = [unit for group in groups(todo) for unit in self._ranges(group, engine.workers)]
            job = Job.of(self.plan) if units else None
            what = f"{len(self.plan.cells)} cells on {self.plan.cells[0].launch.name}"
            with self._interruptible((member for member in members if member.cell.name not in self.outcomes), what):
                for timed in (False, True):
                    if job is not None and (phase := [unit for unit in units if unit.timed == timed]):
                        engine.run(job, phase, self._report, alone=timed)
            for member in members:
                if member.cell.name not in self.outcomes:
                    member.log.reload()
                    self._finish(member, [unit for unit in units if member.cell.name in unit.cells])
        if distinct := sum(self.session.prefills.values()):
            print(f"prefills: {distinct} distinct", flush=True)

    def _lacks(self, member: Member) -> bool:
        """Whether a cell lacks samples. One that cannot be run has its outcome then."""
        if member.cell.identity["task"]["name"] == "latency":
            return True
        try:
            lm = member.adapter(self.session)
            for request in self.session.requests(member.cell, lm.loaded):
                with contextlib.suppress(TooLong):
                    if lm.lacking(request):
                        write_status(member.cell.folder, "running")
                        return True
        except Exception as error:  # a model that cannot be loaded, a task that cannot be built
            self._failed(member.cell, Failure.of(error))
        return False

    def _ranges(self, group: list[Cell], workers: int) -> list[Unit]:
        cell = group[0]
        if cell.identity["task"]["name"] == "latency":  # a group of its own
            return [Unit((cell.name,), cell.label, timed=True, whole=True)]
        tasks = self.session.task(cell, self.session.model(cell))[1]["tasks"]
        documents = max(len(task.eval_docs) for task in tasks.values())
        documents = min(documents, cell.run.limit or documents)
        return ranges(group, documents=documents, tasks=len(tasks), workers=workers)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _opened(self, cell: Cell, stack: ExitStack) -> Member | None:
        """The cell, claimed. None if it is not to be run: its outcome says why."""
        try:
            folder = open_folder(cell)
            misfit = self.session.misfits.get(cell.name)
            if cell.skip is not None or misfit is not None:
                self._failed(cell, Failure(cell.skip or misfit or "", skipped=cell.skip is not None))
            else:
                log = SampleLog(folder / "samples.jsonl", cell.about.mark, partial(self._sample, cell.name))
                return Member(cell, stack.enter_context(log))
        except Busy as busy:
            self.outcomes[cell.name] = Outcome("failed", reason=str(busy))
        except OSError as error:  # the folder cannot be written; other cells may be on another disk
            self.outcomes[cell.name] = Outcome("failed", reason=f"{type(error).__name__}: {error}")
        self.session.watch.ended(cell.name)
        return None

    def _sample(self, cell: str, sample: Sample) -> None:
        """A sample was computed here."""
        tpot = tpot_ms([sample.get("step_s") or []], 0.5)
        one = Progress(cell, sample["task"], sample["doc_id"], sample["score"], sample.get("draw", 0), tpot)
        self.session.watch.sample(one)

    def _report(self, event: UnitResult | Progress) -> None:
        """A unit has ended, or a worker has finished a sample."""
        if isinstance(event, Progress):
            self.session.watch.sample(event)
            return
        self.results[event.unit] = event
        self.session.prefills["shared"] += event.shared
        self.session.prefills["own"] += event.own
        for cell in event.failures:
            self.session.watch.ended(cell)

    def _finish(self, member: Member, units: Iterable[Unit] = ()) -> None:
        """A cell's row; or why it has none. units: those of the cell, where an engine may have left some out."""
        cell = member.cell
        failures = [result.failures[cell.name] for result in self.results.values() if cell.name in result.failures]
        lost = [(u, r) for u in units if (r := self.results.get(u.name)) is not None and r.status != "done"]
        if failures:
            self._failed(cell, failures[0])
        elif lost:
            why = dict.fromkeys(f"unit {u.name} ({u.documents()}) {r.status}: {r.reason}" for u, r in lost)
            self._failed(cell, Failure("; ".join(why)))
        elif any(unit.name not in self.results for unit in units):
            write_status(cell.folder, "running")
            waiting = "its units are still waiting or at work; the same command collects them"
            self.outcomes[cell.name] = Outcome("pending", reason=waiting)
        else:
            try:
                with self._interruptible([member], cell.label):
                    self._row(member)
            except Exception as error:  # one failed cell must not lose the others
                self._failed(cell, Failure.of(error))
        self.session.watch.ended(cell.name)

    def _row(self, member: Member) -> None:
        """Write a cell's row from its samples."""
        cell = member.cell
        computed = any(cell.name in result.computed for result in self.results.values())
        if cell.identity["task"]["name"] == "latency":
            if (row := read_row(cell.folder / "row.json")) is None:
                raise Missing(f"{cell.folder}: no row")
            outcome = Outcome("ok", row, loaded=not computed)
        else:
            outcome = one_cell.write_cell(self.session, cell, member.adapter(self.session), computed=computed)
        row = read_row(cell.folder / "row.json")
        facts = {"reason": outcome.reason} if outcome.reason else {}
        write_status(cell.folder, outcome.status, n_samples=row["n_samples"] if row is not None else None, **facts)
        self.outcomes[cell.name] = outcome

    def _failed(self, cell: Cell, failure: Failure) -> None:
        """Record why a cell has no row. Its status.json gets the traceback."""
        if failure.skipped:
            write_status(cell.folder, "not applicable", reason=failure.reason)
            self.outcomes[cell.name] = Outcome("not applicable", reason=failure.reason)
            return
        facts = {"traceback": failure.traceback} if failure.traceback else {}
        write_status(cell.folder, "failed", reason=failure.reason, **facts)
        where = f" ({cell.folder / 'status.json'})" if failure.traceback else ""
        self.outcomes[cell.name] = Outcome("failed", reason=f"{failure.reason[:400]}{where}")

    @contextlib.contextmanager
    def _interruptible(self, members: Iterable[Member], what: str) -> Iterator[None]:
        """Inside it Ctrl-C becomes the status of these cells, and the exception says where it was."""
        try:
            yield
        except KeyboardInterrupt:
            for member in members:
                with contextlib.suppress(OSError):
                    write_status(member.cell.folder, "interrupted", n_samples=len(member.log))
            raise KeyboardInterrupt(what) from None


# -- what is printed ---------------------------------------------------------------------------------------------------


def outcome_line(outcome: Outcome) -> str:
    """How a cell of a sweep ended, in half a line."""
    if outcome.row is not None:
        kept = "; row.json keeps its larger number of samples" if outcome.kept else ""
        loaded = "; loaded, nothing was computed" if outcome.loaded else ""
        return summary_line(outcome.row) + kept + loaded
    return f"{'skipped, ' if outcome.status == 'not applicable' else ''}{outcome.status}: {outcome.reason}"


def print_result(plan: RunPlan, outcomes: Mapping[str, Outcome], out: Path) -> None:
    """Print what was measured, then the failed cells."""
    rows: dict[str, Row] = {}  # with the refreshed comparison to Full; a kept cell shows the row of this run
    for cell in plan.cells:
        outcome = outcomes[cell.name]
        if outcome.row is not None:
            refreshed = None if outcome.kept else read_row(cell.folder / "row.json")
            rows[cell.name] = refreshed or outcome.row
        if plan.sweep:
            continue
        if outcome.status not in ("ok", "failed"):
            print(outcome_line(outcome))
        if cell.name in rows:
            print(row_text(rows[cell.name], cell.folder / "row.json"))
            if outcome.kept:
                print("  row.json keeps its larger number of samples; the figures above are of this limit")
            elif outcome.loaded:
                print("  loaded: all samples were on disk; fresh=true computes them again")
    if plan.sweep:
        print_sweep(plan, outcomes, rows, out)
    for cell in plan.cells:
        if outcomes[cell.name].status == "failed":
            print(printable(f"failed: {cell.label}: {outcomes[cell.name].reason}"), file=sys.stderr)


# -- the comparison to Full --------------------------------------------------------------------------------------------


def refresh_pairs(out: Path) -> None:
    """Bring the comparison to Full up to date in every row under `out`: Full may have run after the others."""
    rows = {path: row for path in sorted(out.glob("*/row.json")) if (row := read_row(path)) is not None}
    for path, row in rows.items():
        full, reason = match_full(row, rows.values())
        if pair_with_full(row, full, reason) == row:
            continue
        # a process that runs this cell writes its row itself
        with contextlib.suppress(Busy, OSError), claim(path.parent):
            if (latest := read_row(path)) is not None:
                write_row(path, pair_with_full(latest, full, reason))


# -- fresh=true --------------------------------------------------------------------------------------------------------


def set_aside(plan: RunPlan) -> None:
    """With fresh=true, keep aside the samples and the row of each cell. Prints one line for each."""
    for cell in plan.cells:
        paths = [cell.folder / name for name in ("row.json", "status.json", "diagnostics")]
        paths = [path for path in [*cell.folder.glob("samples*.jsonl"), *paths] if path.exists()]
        if not cell.run.fresh or cell.skip is not None or all(path.name == "status.json" for path in paths):
            continue
        try:
            with claim(cell.folder):
                numbers = [int(found[1]) for path in cell.folder.iterdir() if (found := REPLACED.fullmatch(path.name))]
                number = max(numbers, default=0) + 1
                for path in paths:
                    path.replace(path.with_name(f"{path.name}.replaced-{number}"))
        except (Busy, OSError):  # the cell's own run says so
            continue
        print(f"{cell.label}: fresh=true; done again, the old files are kept as *.replaced-{number}", flush=True)


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
    if plan.summary is None:
        return
    if sentences := summary(rows.values(), plan.summary):  # what one method saves and costs against Full
        print("\n" + "\n".join(sentences))
    try:
        every, made = list(rows.values()), trade_off.points(list(rows.values()))
        caption = trade_off.caption(every, made) if every else ""
        path = trade_off.draw(made, out / f"{plan.experiment}.png", caption)
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
