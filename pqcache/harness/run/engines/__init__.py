"""Engines: where the units of a run are computed. Each one knows a cluster; none knows what a unit is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pqcache.harness.run.units import Job, Report, Unit


class Engine(Protocol):
    """Runs units on workers."""

    workers: int  # units that run at once

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        """Run every unit and report each exactly once as a UnitResult. An engine that does not wait may leave units out.

        A unit whose worker was lost runs again, `retries` times. alone: one worker per host at a time, with nothing else of
        the run on it.
        """

    def close(self) -> None:
        """Let the workers go."""
