"""An engine without a cluster: a worker in this process, one unit after the other."""

from collections.abc import Sequence
from typing import Any

from pqcache.harness.run.compute import Follower, Worker
from pqcache.harness.run.units import Job, Report, Unit, UnitResult


class InProcess:
    """Keeps its units and results."""

    def __init__(self, workers: int = 1, most: int | None = None) -> None:
        """workers: as if there were so many; decides the size of units. most: units that it runs at all."""
        self.workers, self.most = workers, most
        self.units: list[Unit] = []
        self.results: list[UnitResult] = []
        self._worker: tuple[Job, Worker] | None = None

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        def keep(event: Any) -> None:
            self.results += [event] if isinstance(event, UnitResult) else []
            report(event)

        assert all(unit.timed == alone for unit in units)
        left = len(units) if self.most is None else max(0, self.most - len(self.units))
        self.units += units[:left]
        follower = Follower(job, units[:left], keep)
        for unit in units[:left]:
            if self._worker is None or self._worker[0] is not job:
                self._worker = job, Worker(job)
            keep(self._worker[1].run(unit))
            follower.poll()

    def close(self) -> None:
        self._worker = None
