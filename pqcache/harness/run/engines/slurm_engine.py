"""launch=slurm: the units of a run as array tasks of SLURM, submitted through submitit.

One array task is one worker over a list of units. A worker writes each unit's result to `<out>/.launch/slurm/results/`, and
the driver reads it there. A task that has left the queue without a result for one of its units was lost (killed, preempted,
out of time, node gone): the unit that it was at is tried again, its later units are submitted again. The queue is asked by
squeue, which every cluster answers; accounting (sacct) is not needed.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pqcache import places
from pqcache.atomic import write_text
from pqcache.harness.config.options import Refused, SlurmLaunch, without_secrets
from pqcache.harness.run.compute import Follower, Worker
from pqcache.harness.run.units import FOLDER as LAUNCH
from pqcache.harness.run.units import Failure, Job, Report, Unit, UnitResult
from pqcache.outside import read_json

POLL = 5.0  # seconds between two looks at the queue and the results
GRACE = 15.0  # seconds for which a task may be out of the queue before its result is visible on the driver's disk
FOLDER = Path(LAUNCH) / "slurm"


def work(job: Job, units: list[Unit], attempts: list[int], results: str) -> None:
    """An array task: one worker over its units. Each result is a file before the next unit starts."""
    worker = Worker(job)
    for unit, attempt in zip(units, attempts, strict=True):
        store(results, attempt, worker.run(unit))


def store(results: str, attempt: int, result: UnitResult) -> None:
    """Write the result of a unit."""
    write_text(Path(results) / f"{result.unit}-{attempt}.json", json.dumps(without_secrets(asdict(result))))


class SlurmEngine:
    """Runs units on SLURM. Raises Refused where this machine cannot submit jobs."""

    def __init__(self, launch: SlurmLaunch) -> None:
        try:
            import submitit  # noqa: F401
        except ImportError:
            line = "launch=slurm: the package submitit is not installed; pip install 'pqcache-lab[slurm]'"
            raise Refused([line]) from None
        missing = [program for program in ("sbatch", "squeue", "srun") if shutil.which(program) is None]
        if missing:
            raise Refused(
                [f"launch=slurm: {', '.join(missing)} not found; run this on a machine that submits SLURM jobs"]
            )
        self.launch, self.workers = launch, launch.workers

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        """Run every unit and report it once; with launch.wait=false submit what is not queued yet, and report what is done."""
        _Round(self.launch, job, units, report, alone).run()

    def close(self) -> None:
        """Jobs stay in the queue: the same command finds them there."""


class _Round:
    """One call of SlurmEngine.run. What was submitted is kept on disk for the driver that comes back."""

    def __init__(self, launch: SlurmLaunch, job: Job, units: Sequence[Unit], report: Report, alone: bool) -> None:
        self._launch, self._job, self._report, self._alone = launch, job, report, alone
        self._open = {unit.name: unit for unit in units}
        self._folder = Path(job.out) / FOLDER
        self._results = self._folder / "results"
        self._results.mkdir(parents=True, exist_ok=True)
        self._ledger = self._folder / ("alone.json" if alone else "tasks.json")
        self._tasks: dict[str, list[str]] = {}  # id in the queue -> units in order. An array of one has no _<index>
        self._attempts: dict[str, int] = {}  # unit -> attempts that were lost
        self._gone: dict[str, float] = {}  # task -> since when it is out of the queue
        try:
            stored = read_json(self._ledger)
            tasks = {str(task["id"]): [str(name) for name in task["units"]] for task in stored["tasks"]}
            self._tasks = {task: names for task, names in tasks.items() if self._open.keys() & set(names)}
            self._attempts = {name: int(n) for name, n in stored["attempts"].items() if name in self._open}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no earlier driver
            pass
        self._follower = Follower(job, units, report)

    def run(self) -> None:
        while True:
            self._collect()
            queued = {name for names in self._tasks.values() for name in names}
            self._submit([unit for name, unit in self._open.items() if name not in queued])
            self._follower.poll()
            if not self._open or not self._launch.wait:
                return
            time.sleep(POLL)

    def _collect(self) -> None:
        """Report what is done, and take lost tasks apart: the unit that one was at is tried again, or named as failed."""
        in_queue = self._queue() if self._tasks else set()
        for task, names in list(self._tasks.items()):
            for name in [name for name in names if name in self._open]:
                self._report_result(name)
            left = [name for name in names if name in self._open]
            if left and task in in_queue:
                self._gone.pop(task, None)
                continue
            now = time.monotonic()
            if left and now - self._gone.setdefault(task, now) < GRACE * self._launch.wait:
                continue  # its last result may still be on its way to this host
            del self._tasks[task]
            if left:
                name = left[0]
                self._attempts[name] = self._attempts.get(name, 0) + 1
                if self._attempts[name] > self._launch.retries:
                    log = f"{self._folder / 'logs'}/{task}_0_log.err"
                    reason = f"SLURM task {task} left the queue without a result ({log})"
                    self._end(UnitResult(name, "lost", reason=reason))

    def _report_result(self, name: str) -> None:
        path = self._results / f"{name}-{self._attempts.get(name, 0)}.json"
        try:
            stored = read_json(path)
            failures = {cell: Failure(**failure) for cell, failure in stored.pop("failures").items()}
            result = UnitResult(**stored, failures=failures)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return
        self._follower.poll()
        self._end(result)
        path.unlink(missing_ok=True)

    def _end(self, result: UnitResult) -> None:
        self._report(result)
        del self._open[result.unit]
        self._attempts.pop(result.unit, None)

    def _queue(self) -> set[str]:
        """The ids of this user's array tasks that are pending, running or ending."""
        command = ["squeue", "--noheader", "--array", "--format=%i", "--me"]
        for _ in range(5):  # a controller that restarts does not answer for a while
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return set(done.stdout.split())
            time.sleep(POLL)
        raise OSError(f"squeue: {' '.join(done.stderr.split())[:200]}")

    def _submit(self, units: list[Unit]) -> None:
        """Submit units as one array; a task takes neighbours, which share a model."""
        if units:
            lists = shares(units, self._launch.workers)
            number = len(lists)
            attempts = [[self._attempts.get(unit.name, 0) for unit in part] for part in lists]
            how = [self._job] * number, lists, attempts, [str(self._results)] * number
            # sbatch hands its environment on
            os.environ["PYTHONPATH"] = os.pathsep.join(
                dict.fromkeys([str(places.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            )
            for submitted, part in zip(self._executor(number).map_array(work, *how), lists, strict=True):
                self._tasks[submitted.job_id] = [unit.name for unit in part]
        tasks = [{"id": task, "units": names} for task, names in self._tasks.items()]
        write_text(self._ledger, json.dumps({"attempts": self._attempts, "tasks": tasks}))

    def _executor(self, number: int) -> Any:
        import submitit

        executor = submitit.SlurmExecutor(folder=self._folder / "logs")
        executor.update_parameters(**self.launch_options(), array_parallelism=max(1, number))
        return executor

    def launch_options(self) -> dict[str, Any]:
        """What sbatch is told. A worker that is alone on its host asks for the whole of it."""
        launch = self._launch
        threads = launch.cpus_per_worker
        options: dict[str, Any] = {
            "job_name": "pqcache",
            "time": launch.time,
            "nodes": 1,
            "ntasks_per_node": 1,
            "cpus_per_task": threads,
            "mem": launch.mem,
            "partition": launch.partition,
            "account": launch.account,
            "qos": launch.qos,
            "gpus_per_node": launch.gpus_per_worker or None,
            "exclusive": True if self._alone else None,
            "setup": [f"export OMP_NUM_THREADS={threads}", *launch.setup],
        }
        return {name: value for name, value in options.items() if value is not None}


def shares(units: Sequence[Unit], workers: int) -> list[list[Unit]]:
    """Units cut into at most `workers` lists of neighbours with about as many samples each. No list is empty."""
    samples = [len(unit.cells) * max(1, (unit.stop or 0) - unit.first) for unit in units]
    total, before = sum(samples), 0
    lists: dict[int, list[Unit]] = {}
    for unit, size in zip(units, samples, strict=True):
        lists.setdefault(int((before + size / 2) * workers / total), []).append(unit)  # by the unit's middle
        before += size
    return list(lists.values())
