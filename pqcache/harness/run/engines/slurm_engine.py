"""launch=slurm: the units of a run as array tasks of SLURM, submitted through submitit.

One array task is one worker over a list of units. A worker writes each unit's result to `<out>/.launch/slurm/results/`, and
the driver reads it there. A task that has left the queue without a result for one of its units was lost (killed, preempted,
out of time, node gone): the unit that it was at is tried again, its later units are submitted again. The queue is asked by
squeue, which every cluster answers; accounting (sacct) is not needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pqcache import places
from pqcache.atomic import write_text
from pqcache.harness.config.options import Refused, SlurmLaunch, without_secrets
from pqcache.harness.run.units import FOLDER as LAUNCH
from pqcache.harness.run.units import Job, Report, Unit, UnitResult, result_from
from pqcache.harness.run.worker import Follower, Worker

POLL = 5.0  # seconds between two looks at the queue and the results
GRACE = 15.0  # seconds for which a task may be out of the queue before its result is visible on the driver's disk
FOLDER = Path(LAUNCH) / "slurm"


def work(job: Job, units: list[Unit], attempts: list[int], results: str) -> None:
    """An array task: one worker over its units. Each result is a file before the next unit starts."""
    worker, refusal = None, ""
    try:
        worker = Worker(job)
    except Refused as refused:
        refusal = "; ".join(refused.lines)
    for unit, attempt in zip(units, attempts, strict=True):
        store(results, attempt, worker.run(unit) if worker else UnitResult(unit.name, "refused", reason=refusal))


def store(results: str, attempt: int, result: UnitResult) -> None:
    """Write the result of a unit."""
    path = Path(results) / f"{result.unit}-{attempt}.json"
    write_text(path, json.dumps(without_secrets(asdict(result))))


@dataclass
class _Task:
    """An array task that was submitted: its id in the queue, and the units it works on in order."""

    id: str  # <job>_<index>; <job> alone for an array of one, which submitit submits as a plain job
    units: list[str]
    gone_since: float | None = field(default=None, compare=False)


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
        self.launch = launch
        self.workers = launch.workers

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        """Run every unit and report it once; with launch.wait=false submit what is not queued yet, and report what is done."""
        _Round(self.launch, job, units, report, alone).run()

    def close(self) -> None:
        """Jobs stay in the queue: the same command finds them there."""


class _Round:
    """One call of SlurmEngine.run."""

    def __init__(self, launch: SlurmLaunch, job: Job, units: Sequence[Unit], report: Report, alone: bool) -> None:
        self._launch, self._job, self._report, self._alone = launch, job, report, alone
        self._units = {unit.name: unit for unit in units}
        self._folder = Path(job.out) / FOLDER
        self._results = self._folder / "results"
        self._results.mkdir(parents=True, exist_ok=True)
        self._ledger = self._folder / ("alone.json" if alone else "tasks.json")
        self._attempts, self._tasks = self._read_ledger()
        self._follower = Follower(job, units, report)

    # -- the ledger: what was submitted, kept on disk for the driver that comes back --------------------------------

    def _read_ledger(self) -> tuple[dict[str, int], list[_Task]]:
        """(unit -> attempt, tasks) of an earlier driver, for units of this run."""
        try:
            stored = json.loads(self._ledger.read_text(encoding="utf-8"))
            tasks = [_Task(str(task["id"]), [str(name) for name in task["units"]]) for task in stored["tasks"]]
            attempts = {str(name): int(attempt) for name, attempt in stored["attempts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, []
        tasks = [task for task in tasks if any(name in self._units for name in task.units)]
        return {name: attempt for name, attempt in attempts.items() if name in self._units}, tasks

    def _write_ledger(self) -> None:
        tasks = [{"id": task.id, "units": task.units} for task in self._tasks]
        write_text(self._ledger, json.dumps({"attempts": self._attempts, "tasks": tasks}))

    # -- the round --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        open_units = dict(self._units)
        while True:
            self._collect(open_units)
            queued = {name for task in self._tasks for name in task.units}
            self._submit([unit for name, unit in open_units.items() if name not in queued])
            self._write_ledger()
            self._follower.poll()
            if not open_units or not self._launch.wait:
                return
            time.sleep(POLL)

    def _collect(self, open_units: dict[str, Unit]) -> None:
        """Report what is done, and take lost tasks apart."""
        in_queue = self._queue() if self._tasks else set()
        for task in list(self._tasks):
            self._report_results(task, open_units)
            left = [name for name in task.units if name in open_units]
            if not left:
                self._tasks.remove(task)
                continue
            if task.id in in_queue:
                task.gone_since = None
                continue
            task.gone_since = task.gone_since or time.monotonic()
            if time.monotonic() - task.gone_since < (GRACE if self._launch.wait else 0):
                continue  # its last result may still be on its way to this host
            self._tasks.remove(task)
            self._lost(open_units[left[0]], task, open_units)

    def _report_results(self, task: _Task, open_units: dict[str, Unit]) -> None:
        for name in task.units:
            if name not in open_units:
                continue
            path = self._results / f"{name}-{self._attempts.get(name, 0)}.json"
            try:
                result = result_from(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                continue
            self._follower.poll()
            self._report(result)
            path.unlink(missing_ok=True)
            del open_units[name]
            self._attempts.pop(name, None)

    def _lost(self, unit: Unit, task: _Task, open_units: dict[str, Unit]) -> None:
        """The unit that a lost task was at is tried again, or named as failed. Its later units lose no attempt."""
        attempt = self._attempts.get(unit.name, 0)
        if attempt < self._launch.retries:
            self._attempts[unit.name] = attempt + 1
            return
        log = f"{self._folder / 'logs'}/{task.id}_0_log.err"
        reason = f"SLURM task {task.id} left the queue without a result ({log})"
        self._report(UnitResult(unit.name, "lost", reason=reason))
        del open_units[unit.name]
        self._attempts.pop(unit.name, None)

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
        if not units:
            return
        lists = shares(units, self._launch.workers)
        number = len(lists)
        executor = self._executor(number)
        with _environment(PYTHONPATH=os.pathsep.join(filter(None, [str(places.ROOT), os.environ.get("PYTHONPATH")]))):
            jobs = executor.map_array(
                work,
                [self._job] * number,
                lists,
                [[self._attempts.get(unit.name, 0) for unit in part] for part in lists],
                [str(self._results)] * number,
            )
        for submitted, part in zip(jobs, lists, strict=True):
            self._tasks.append(_Task(submitted.job_id, [unit.name for unit in part]))
        self._write_ledger()

    def _executor(self, number: int) -> Any:
        import submitit

        launch = self.launch_options()
        executor = submitit.SlurmExecutor(folder=self._folder / "logs")
        executor.update_parameters(**launch, array_parallelism=max(1, number))
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


class _environment:
    """Variables for the commands started in the block: sbatch hands its environment on."""

    def __init__(self, **variables: str) -> None:
        self._new, self._old = variables, {name: os.environ.get(name) for name in variables}

    def __enter__(self) -> None:
        os.environ.update(self._new)

    def __exit__(self, *_: object) -> None:
        for name, value in self._old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
