"""A worker: one process that runs units of a job and keeps the loaded model between them.

    worker = Worker(job)                     raises Refused where this machine differs from the driver's
    result = worker.run(unit, attempt=0)

An exception fails its cell with the traceback; the other cells of the unit go on. What kills the worker is the engine's matter.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.config import environment
from pqcache.harness.config.cells import Cell, make_plan, open_folder
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.run.job import digest_of, source_digest
from pqcache.harness.run.session import Session
from pqcache.harness.run.units import Failure, Job, Progress, Unit, UnitResult, progress_of
from pqcache.places import CONFIGS

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.harness.run.samples import Sample
    from pqcache.harness.run.sharing import Recorder
    from pqcache.selective import Prefill

Watch = Callable[[Progress], None]


class Worker:
    """Runs units in this process, one after the other."""

    def __init__(self, job: Job) -> None:
        """Go to the driver's folder and compose the cells. Raises Refused where code, versions or folders differ."""
        if problems := differences(job):
            raise Refused([f"{socket.gethostname()}: {line}" for line in problems])
        os.chdir(job.cwd)
        plan = make_plan(compose_all([*job.words, f"out={job.out}"], CONFIGS))
        self.cells = {cell.name: cell for cell in plan.cells}
        self.session = Session()
        run = plan.cells[0].run
        environment.keep_files_under(Path(run.out).expanduser(), Path(run.cache_dir).expanduser())
        environment.quiet()

    def run(self, unit: Unit, attempt: int = 0, on_sample: Watch | None = None) -> UnitResult:
        """Run one unit; every finished sample is on disk. Samples that are on disk already are not computed again."""
        start = time.monotonic()
        run = _Run(self.session, unit, attempt, on_sample)
        for name in unit.cells:
            if name not in self.cells:
                run.failures[name] = Failure("the worker composed other cells than its driver", "")
        run.serve([self.cells[name] for name in unit.cells if name in self.cells])
        return UnitResult(
            unit.name,
            "done",
            attempt,
            samples=run.samples,
            prefills=run.prefills,
            failures=run.failures,
            host=socket.gethostname(),
            seconds=time.monotonic() - start,
        )


def differences(job: Job) -> list[str]:
    """What keeps this process from working for a job, one line each."""
    problems = []
    path, text = job.token
    try:
        seen = Path(path).read_text(encoding="utf-8")
    except OSError:
        seen = None
    if seen != text:
        problems.append(f"out={job.out}: this machine does not see the driver's folder (no {path})")
    if not Path(job.cwd).is_dir():
        problems.append(f"{job.cwd}: the driver's working folder does not exist here")
    problems += [f"{p}: is missing here, or not what the driver has" for p, d in job.paths.items() if digest_of(p) != d]
    commit = environment.git_commit()
    if None not in (commit, job.commit) and commit != job.commit:
        problems.append(f"commit {commit}, but the driver has {job.commit}")
    elif source_digest() != job.source:
        problems.append("the source files of pqcache and baselines differ from the driver's")
    mine = environment.versions()
    for package in {**mine, **job.versions}:
        if mine.get(package) != job.versions.get(package):
            problems.append(f"{package} {mine.get(package)}, but the driver has {job.versions.get(package)}")
    return problems


class _Run:
    """One unit while it runs."""

    def __init__(self, session: Session, unit: Unit, attempt: int, on_sample: Watch | None) -> None:
        self.session, self.unit, self.attempt, self.on_sample = session, unit, attempt, on_sample
        self.failures: dict[str, Failure] = {}
        self.samples = self.prefills = 0

    def serve(self, cells: list[Cell]) -> None:
        if self.unit.whole:
            for cell in cells:
                self._guard(cell, partial(self._whole, cell))
            return
        from pqcache.harness.run.one_cell import make_adapter, recorder_of, requests_of
        from pqcache.harness.run.samples import SampleLog
        from pqcache.harness.run.sharing import Recorder
        from pqcache.selective import attach

        with ExitStack() as stack:
            members: dict[str, tuple[Cell, HarnessLM]] = {}
            tasks: Any = None
            for cell in cells:

                def member(cell: Cell = cell) -> None:
                    nonlocal tasks
                    log = SampleLog.of_worker(open_folder(cell), self.unit.name, self.attempt, cell.about.mark)
                    stack.enter_context(log)
                    log.on_sample = partial(self._report, cell)
                    lm, _, tasks = make_adapter(self.session, cell, log, recorder_of(cell))
                    lm.timed = self.unit.timed
                    lm.warm = lm.warm or not self.unit.timed  # times that are not kept need no warm kernels
                    members[cell.name] = cell, lm

                self._guard(cell, member)
            if tasks is None:
                return
            requests = requests_of(tasks, cells[0].run.limit, cells[0].identity["seed"])
            stop = float("inf") if self.unit.stop is None else self.unit.stop
            requests = [r for r in requests if self.unit.first <= int(r.doc_id or 0) < stop]
            share = cells[0].run.shared_prefill
            several = sum(len(lm.draws) for _, lm in members.values()) > 1
            recorder = Recorder(share if several and not self.unit.timed else False)
            if cells[0].run.batch > 1:  # all of them are generated: check_task
                self._batches(list(members.values()), requests, recorder)
                return
            with attach(next(iter(members.values()))[1].loaded.model):
                for request in requests:
                    self._request(members, request, recorder)
            self.prefills += recorder.prompts

    def _batches(self, members: list[tuple[Cell, HarnessLM]], requests: list[Instance], recorder: Recorder) -> None:
        """Answer all requests by every cell, several at a time, from one prefill where they can share it."""
        from pqcache.harness.run import batches

        def count() -> int:
            return sum(len(lm.log) for _, lm in members)

        def alone(lm: HarnessLM) -> None:
            batches.fill(lm, requests)
            batches.check(lm, requests)

        before = count()
        batches.share([lm for _, lm in members], requests, recorder)
        shared = count()
        for cell, lm in members:
            self._guard(cell, partial(alone, lm))
        self.samples += count() - before
        self.prefills += recorder.prompts + count() - shared

    def _request(self, members: dict[str, tuple[Cell, HarnessLM]], request: Instance, recorder: Recorder) -> None:
        """Answer one request by every cell that has not failed, from one prefill where they can share it."""
        from pqcache.harness.run.too_long import TooLong

        prefill: Prefill | None = None
        text = request.request_type == "generate_until"
        try:
            todo = [
                (cell, lm, draw)
                for name, (cell, lm) in members.items()
                if name not in self.failures
                for draw in (lm.lacking(request) if text else (0,))
            ]
        except TooLong:
            return
        shared = text and len(todo) > 1
        if shared:
            try:
                prefill = recorder.record(todo[0][1], request)
            except Exception:  # out of memory, perhaps: each cell meets it by itself, and says so
                prefill = None
        for cell, lm, draw in todo:
            if cell.name in self.failures:
                continue
            before = len(lm.log)
            self._guard(cell, partial(self._answer, lm, request, prefill, draw))
            if len(lm.log) > before:
                self.samples += 1
            if cell.name in self.failures:
                prefill = None  # it may have been left half used

    def _answer(self, lm: HarnessLM, request: Instance, prefill: Prefill | None, draw: int) -> None:
        from pqcache.harness.run.too_long import TooLong
        from pqcache.selective import OwnPrefill

        if request.request_type == "loglikelihood":
            try:
                lm.check_request(request)
            except TooLong:
                return
            lm.loglikelihood([request], disable_tqdm=True)
            self.prefills += 1
            return
        if request.request_type == "loglikelihood_rolling":
            lm.loglikelihood_rolling([request], disable_tqdm=True)
            self.prefills += 1
            return
        if prefill is not None:
            try:
                lm.answer(request, prefill, draw)
                return
            except OwnPrefill:
                pass
        lm.answer(request, draw=draw)
        self.prefills += 1

    def _report(self, cell: Cell, sample: Sample) -> None:
        """A sample is on disk."""
        if self.on_sample is not None:
            self.on_sample(progress_of(self.unit.name, cell.name, sample))

    def _whole(self, cell: Cell) -> None:
        """A cell that writes its row itself."""
        from pqcache.harness.run.one_cell import run_latency
        from pqcache.harness.run.samples import SampleLog

        with SampleLog.of_worker(open_folder(cell), self.unit.name, self.attempt, cell.about.mark) as log:
            before = len(log)
            log.on_sample = partial(self._report, cell)
            run_latency(self.session, cell, log)
            self.samples += len(log) - before

    def _guard(self, cell: Cell, work: Callable[[], None]) -> None:
        """Do a cell's work; an exception fails the cell."""
        try:
            work()
        except Exception as error:  # one cell's error, CUDA out of memory included, must not lose the others
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.failures[cell.name] = Failure(reason, traceback.format_exc())
