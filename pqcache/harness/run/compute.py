"""The one loop that computes samples, on this machine and in workers: every request of a unit, by every cell that lacks it.

    result = compute(session, unit, members)

Cells of a unit answer a prompt in turn, from one prefill where they can share it. An exception fails its cell with the
traceback; the other cells go on. A prompt that cannot be shared is named once, and the others are shared.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from tqdm import tqdm

from pqcache.harness.config import environment
from pqcache.harness.config.cells import Cell, make_plan, open_folder
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.report.sample_lines import read_lines
from pqcache.harness.run import batches, latency_rounds
from pqcache.harness.run.adapter import HarnessLM
from pqcache.harness.run.one_cell import make_adapter
from pqcache.harness.run.prompts import TooLong
from pqcache.harness.run.samples import SampleLog
from pqcache.harness.run.session import Session
from pqcache.harness.run.sharing import Sharing
from pqcache.harness.run.units import Failure, Job, Progress, Report, Unit, UnitResult
from pqcache.places import CONFIGS
from pqcache.selective import attach

BAR_AFTER_S = 0.5  # a cell whose samples are all on disk has no bar


@dataclass
class Member:
    """A cell of a unit."""

    cell: Cell
    log: SampleLog
    lm: HarnessLM = None  # type: ignore[assignment]  # until it is needed

    def adapter(self, session: Session) -> HarnessLM:
        """The cell's method behind lm-eval's interface. Raises what keeps the cell from running."""
        if self.lm is None:
            self.lm = make_adapter(session, self.cell, self.log)
        return self.lm


def compute(session: Session, unit: Unit, members: Sequence[Member]) -> UnitResult:
    """Compute what the members' logs lack of a unit; every finished sample is on disk."""
    run, before = _Run(session, unit, list(members)), [member.log.appended for member in members]
    try:
        run.run()
    finally:  # also after an interruption
        new = [member.log.appended - old for member, old in zip(members, before, strict=True)]
        run.result.computed = [member.cell.name for member, count in zip(members, new, strict=True) if count]
        shared, served = (run.sharing.prompts, run.sharing.served) if run.sharing is not None else (0, 0)
        run.result.shared, run.result.own = shared, sum(new) - served
    return run.result


class _Run:
    """One unit while it runs."""

    def __init__(self, session: Session, unit: Unit, members: list[Member]) -> None:
        self.session, self.unit, self.members = session, unit, members
        self.result = UnitResult(unit.name)
        self.batch = members[0].cell.run.batch
        self.sharing: Sharing | None = None
        if unit.shared != "no":
            self.sharing = Sharing(members[0].cell.run.shared_prefill)

    def run(self) -> None:
        if self.unit.whole:
            for member in self.members:
                self._guard(member, partial(latency_rounds.write_row, self.session, member.cell, member.log))
            return
        for member in self.members:
            self._guard(member, partial(self._begin, member))
        if not (able := self._able()):
            return
        first = able[0]
        loaded = first.lm.loaded
        begin, stop = self.unit.first, math.inf if self.unit.stop is None else self.unit.stop
        requests = [r for r in self.session.requests(first.cell, loaded) if begin <= int(r.doc_id or 0) < stop]
        for member in able:
            self._guard(member, partial(self._prepare, member, requests))
        able = self._able()
        with (
            attach(loaded.model),
            tqdm(total=len(requests), desc=self.unit.label, unit="prompt", disable=None, delay=BAR_AFTER_S, leave=False)
            as bar,
        ):  # fmt: skip
            for member in able:
                member.lm.within.bar = bar
            if self.batch > 1:  # all of them are generated: check_task
                self._batches(requests, bar)
                return
            for request in requests:
                self._request(request)
                bar.update()

    def _begin(self, member: Member) -> None:
        lm = member.adapter(self.session)
        lm.timed = self.unit.timed
        lm.warm = lm.warm or not self.unit.timed  # times that are not kept need no warm kernels

    def _prepare(self, member: Member, requests: Sequence[Instance]) -> None:
        """Have the method calibrate, which may take minutes, if any of the requests lacks an answer of it."""
        for request in requests:
            with contextlib.suppress(TooLong):
                if member.lm.computes and member.lm.lacking(request):
                    loaded, folder = member.lm.loaded, Path(member.cell.run.cache_dir).expanduser()
                    member.cell.method.prepare(loaded.model, loaded.calibration_text(), folder)
                    return

    def _able(self) -> list[Member]:
        return [member for member in self.members if member.cell.name not in self.result.failures]

    def _request(self, request: Instance) -> None:
        """Answer one request by every cell that lacks it."""
        try:
            todo = self._lacking([request])
        except TooLong:
            return
        text = request.request_type == "generate_until"
        if text and self.sharing is not None and len(todo) > 1:
            self.sharing.answer([request], [(lm, draw) for _, lm, draw in todo])
        works = []
        for member, lm, draw in todo:
            work = partial(lm.answer, request, draw=draw) if text else partial(lm.score_all, request)
            works.append(partial(self._guard, member, work))
        if self.unit.shared != "only":
            for one in works:
                one()
        elif not text and works and self.sharing is not None:
            self.sharing.score(works, todo[0][1], request)

    def _batches(self, requests: Sequence[Instance], bar: Any) -> None:
        """Answer all requests by every cell, several at a time."""
        first = self._able()[0].lm
        if self.sharing is not None:
            asks = [(request, 0) for request in requests]
            for group in batches.in_batches(first, asks, lambda ask: bool(self._lacking([ask[0]]))):
                together = [request for request, _ in group]
                if len(todo := self._lacking(together)) > 1:
                    self.sharing.answer(together, [(lm, draw) for _, lm, draw in todo])
        if self.unit.shared != "only":
            for member in self._able():
                self._guard(member, partial(batches.fill, member.lm, requests, bar.update))

    def _lacking(self, requests: Sequence[Instance]) -> list[tuple[Member, HarnessLM, int]]:
        """The answers, by cell and number, that all of these requests lack. Raises TooLong."""
        first = int(self.batch == 1 and any(int(request.doc_id or 0) < self.unit.own for request in requests))
        todo = []
        for member in self._able():
            lacking = [set(member.lm.lacking(request)) for request in requests]
            todo += [(member, member.lm, draw) for draw in sorted(set.intersection(*lacking)) if draw >= first]
        return todo

    def _guard(self, member: Member, work: Callable[..., object], *given: Any) -> None:
        """Do a cell's work with what it is given; an exception fails the cell."""
        if member.cell.name in self.result.failures:
            return
        try:
            work(*given)
        except Exception as error:  # one cell's error, CUDA out of memory included, must not lose the others
            self.result.failures[member.cell.name] = Failure.of(error)


# -- a worker: one process that runs units of a job and keeps the loaded model between them ----------------------------


class Worker:
    """Runs units in this process, one after the other."""

    def __init__(self, job: Job) -> None:
        """Go to the driver's folder and compose the cells. Where code, versions or folders differ, every unit is refused."""
        self.refusal = "; ".join(job.differences())
        if self.refusal:
            return
        os.chdir(job.cwd)
        try:
            plan = make_plan(compose_all([*job.words, f"out={job.out}"], CONFIGS))
        except Refused as refused:
            self.refusal = "; ".join(refused.lines)
            return
        self.cells = {cell.name: cell for cell in plan.cells}
        self.session = Session()
        run = plan.cells[0].run
        environment.keep_files_under(Path(run.out).expanduser(), Path(run.cache_dir).expanduser())
        environment.quiet()

    def run(self, unit: Unit) -> UnitResult:
        """Run one unit. Samples that are on disk already are not computed again."""
        if self.refusal:
            return UnitResult(unit.name, "refused", reason=self.refusal)
        cells = [self.cells[name] for name in unit.cells if name in self.cells]
        with ExitStack() as stack:
            paths = [open_folder(cell) / f"samples-{unit.name}-0.jsonl" for cell in cells]
            logs = [SampleLog(path, cell.about.mark, owned=False) for path, cell in zip(paths, cells, strict=True)]
            members = [Member(cell, stack.enter_context(log)) for cell, log in zip(cells, logs, strict=True)]
            result = compute(self.session, unit, members) if members else UnitResult(unit.name)
        for name in set(unit.cells) - self.cells.keys():
            result.failures[name] = Failure("the worker composed other cells than its driver")
        return result


class Follower:
    """Reports every sample that workers append to the cells' `samples-<unit>-<number>.jsonl`, once each."""

    def __init__(self, job: Job, units: Iterable[Unit], report: Report) -> None:
        self._folders = [(cell, Path(job.folders[cell]), unit.name) for unit in units for cell in unit.cells]
        self._report = report
        self._read: dict[Path, int] = {}  # bytes that were reported
        for _, path in self._files():  # an earlier driver's files: their samples were counted when this one began
            with contextlib.suppress(OSError):
                self._read[path] = path.stat().st_size

    def poll(self) -> None:
        """Report the samples written since the last call."""
        for cell, path in self._files():
            for _, end, one in read_lines(path, self._read.get(path, 0)):
                self._read[path] = end
                if one is not None:
                    self._report(Progress(cell, one["task"], one["doc_id"], one["score"], one.get("draw", 0)))

    def _files(self) -> list[tuple[str, Path]]:
        return [(cell, path) for cell, folder, unit in self._folders for path in folder.glob(f"samples-{unit}-*.jsonl")]
