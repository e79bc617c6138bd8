"""An engine without a cluster: a worker in this process, one unit after the other."""

from __future__ import annotations

from collections.abc import Sequence

from pqcache.harness.config.options import Refused
from pqcache.harness.run.units import Job, Report, Unit, UnitResult
from pqcache.harness.run.worker import Follower, Worker


class InProcess:
    def __init__(self, workers: int = 1) -> None:
        """workers: as if there were so many; decides the size of units."""
        self.workers = workers
        self._worker: tuple[Job, Worker] | None = None

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        follower = Follower(job, units, report)
        for unit in units:
            try:
                if self._worker is None or self._worker[0] is not job:
                    self._worker = job, Worker(job)
                report(self._worker[1].run(unit))
            except Refused as refused:
                report(UnitResult(unit.name, "refused", reason="; ".join(refused.lines)))
            follower.poll()

    def close(self) -> None:
        self._worker = None
