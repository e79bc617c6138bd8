"""Engines without a cluster, for tests: this process, or processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from pqcache.harness.config.options import Refused
from pqcache.harness.run.units import Job, Report, Unit, UnitResult
from pqcache.harness.run.worker import Worker


class InProcess:
    """This process, one unit after the other."""

    def __init__(self, workers: int = 1) -> None:
        """workers: as if there were so many; decides the size of units."""
        self.workers = workers
        self._worker: tuple[Job, Worker] | None = None

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        """See Engine."""
        for unit in units:
            try:
                if self._worker is None or self._worker[0] is not job:
                    self._worker = job, Worker(job)
                report(self._worker[1].run(unit, 0, report))
            except Refused as refused:
                report(UnitResult.refused(unit, "; ".join(refused.lines)))

    def close(self) -> None:
        """See Engine."""
        self._worker = None


@dataclass
class _Process:
    process: Any
    pipe: Connection
    unit: Unit | None = None


class Processes:
    """New processes of this machine (spawned, so that nothing is inherited)."""

    def __init__(self, workers: int, retries: int = 2) -> None:
        self.workers, self.retries = workers, retries

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        """See Engine."""
        todo = deque((unit, 0) for unit in units)
        attempts = dict.fromkeys((unit.name for unit in units), 0)
        pool: list[_Process] = []
        try:
            while todo or any(one.unit for one in pool):
                while len(pool) < min(1 if alone else self.workers, len(todo) + sum(1 for p in pool if p.unit)):
                    pool.append(self._start(job))
                for one in pool:
                    if one.unit is None and todo:
                        one.unit, attempts[todo[0][0].name] = todo[0]
                        one.pipe.send(todo.popleft())
                self._receive(pool, todo, attempts, report)
        finally:
            for one in pool:
                one.process.terminate()
                one.process.join()

    def _start(self, job: Job) -> _Process:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Process(process, ours)

    def _receive(
        self, pool: list[_Process], todo: deque[tuple[Unit, int]], attempts: dict[str, int], report: Report
    ) -> None:
        """Wait for messages, and for processes that end."""
        ready = wait([one.pipe for one in pool])
        for one in [one for one in pool if one.pipe in ready]:
            try:
                message = one.pipe.recv()
            except (EOFError, OSError):
                pool.remove(one)
                one.process.join()
                if one.unit is not None:
                    self._lost(one.unit, attempts[one.unit.name], one.process.exitcode, todo, report)
                continue
            if isinstance(message, str):  # refused: each unit is refused in turn
                assert one.unit is not None
                report(UnitResult.refused(one.unit, message))
                one.unit = None
                continue
            if isinstance(message, UnitResult):
                one.unit = None
            report(message)

    def _lost(self, unit: Unit, attempt: int, code: int | None, todo: deque[tuple[Unit, int]], report: Report) -> None:
        if attempt < self.retries:
            todo.appendleft((unit, attempt + 1))
        else:
            report(UnitResult.lost(unit, attempt, f"its worker ended {attempt + 1} times, last with exit code {code}"))

    def close(self) -> None:
        """See Engine."""


def _work(job: Job, pipe: Connection) -> None:
    """A worker process: units in, results out, until the pipe is closed."""
    worker: Worker | None = None
    while True:
        try:
            unit, attempt = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            worker = worker or Worker(job)
        except Refused as refused:
            pipe.send("; ".join(refused.lines))
            continue
        pipe.send(worker.run(unit, attempt, pipe.send))
