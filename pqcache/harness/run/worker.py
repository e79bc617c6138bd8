"""A worker: one process that runs units of a job and keeps the loaded model between them.

    worker = Worker(job)                     raises Refused where this machine differs from the driver's
    result = worker.run(unit)

What kills the worker is the engine's matter. `Follower` reads what workers write, on any host.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from pqcache.harness.config import environment
from pqcache.harness.config.cells import make_plan, open_folder
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.run.compute import Member, compute
from pqcache.harness.run.samples import SampleLog
from pqcache.harness.run.session import Session
from pqcache.harness.run.units import Failure, Job, Progress, Report, Unit, UnitResult
from pqcache.places import CONFIGS


class Worker:
    """Runs units in this process, one after the other."""

    def __init__(self, job: Job) -> None:
        """Go to the driver's folder and compose the cells. Raises Refused where code, versions or folders differ."""
        if problems := job.differences():
            raise Refused(problems)
        os.chdir(job.cwd)
        plan = make_plan(compose_all([*job.words, f"out={job.out}"], CONFIGS))
        self.cells = {cell.name: cell for cell in plan.cells}
        self.session = Session()
        run = plan.cells[0].run
        environment.keep_files_under(Path(run.out).expanduser(), Path(run.cache_dir).expanduser())
        environment.quiet()

    def run(self, unit: Unit) -> UnitResult:
        """Run one unit. Samples that are on disk already are not computed again."""
        cells = [self.cells[name] for name in unit.cells if name in self.cells]
        with ExitStack() as stack:
            logs = [SampleLog.of_worker(open_folder(cell), unit.name, cell.about.mark) for cell in cells]
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
            try:
                with open(path, "rb") as file:
                    file.seek(self._read.get(path, 0))
                    new = file.read()
            except OSError:
                continue
            whole = new.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in new[:whole].splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    one = json.loads(line)
                    self._report(Progress(cell, one["task"], one["doc_id"], one["score"], one.get("draw", 0)))

    def _files(self) -> list[tuple[str, Path]]:
        return [(cell, path) for cell, folder, unit in self._folders for path in folder.glob(f"samples-{unit}-*.jsonl")]
