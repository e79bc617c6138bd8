"""launch=ray and launch=slurm: units are handed out, lost workers are replaced, nothing is lost or done twice."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

import run
from pqcache.harness.config.options import RayLaunch, Refused, SlurmLaunch
from pqcache.harness.run.engines import ray_engine, slurm_engine
from pqcache.harness.run.units import Failure, Job, Unit, UnitResult
from tests.harness.cells import ONE_THREAD, REPO, Patch
from tests.harness.same_rows import results

UNITS = [Unit(("cell",), "task", first, first + 1) for first in range(4)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folders = {"cell": str(tmp_path / "smoke" / "an older name")}
    return Job((), str(tmp_path), str(tmp_path / "out"), ("token", ""), None, {}, folders)


def ended(events: list[Any]) -> dict[str, UnitResult]:
    results = [event for event in events if isinstance(event, UnitResult)]
    assert len({result.unit for result in results}) == len(results), "a unit was reported twice"
    return {result.unit: result for result in results}


# -- SLURM: a queue and a scheduler that are pretended -----------------------------------------------------------------


class Queue:
    """Stands for sbatch and squeue. `deeds`: array task -> how many of its units it finishes before it is lost."""

    def __init__(self) -> None:
        self.deeds: list[int | None] = []
        self.submitted: list[list[str]] = []
        self.queued: set[str] = set()
        self.done_at_once = True

    def map_array(
        self, work: Any, jobs: Any, lists: list[list[Unit]], attempts: list[list[int]], where: Any
    ) -> list[Any]:
        number = len(self.submitted)
        made = []
        for index, (units, tries) in enumerate(zip(lists, attempts, strict=True)):
            self.submitted.append([unit.name for unit in units])
            finishes = self.deeds.pop(0) if self.deeds else None
            task = type("Task", (), {"job_id": f"{number}_{index}"})
            made.append(task)
            if self.done_at_once:
                for unit, attempt in list(zip(units, tries, strict=True))[:finishes]:
                    failures = {"cell": Failure("E: no", "trace")} if unit is UNITS[3] else {}
                    slurm_engine.store(where[index], attempt, UnitResult(unit.name, failures=failures))
            else:
                self.queued.add(task.job_id)
        return made


@pytest.fixture
def queue(monkeypatch: Patch) -> Queue:
    queue = Queue()
    monkeypatch.setattr(slurm_engine, "POLL", 0.01)
    monkeypatch.setattr(slurm_engine, "GRACE", 0.02)
    monkeypatch.setattr(slurm_engine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(slurm_engine._Round, "_executor", lambda self, number: queue)
    monkeypatch.setattr(slurm_engine._Round, "_queue", lambda self: queue.queued)
    return queue


def test_a_lost_slurm_task_is_submitted_again_and_named_at_last(queue: Queue, job: Job) -> None:
    queue.deeds = [1, 0, 0]  # the first task loses its second unit, which is lost again and again
    events: list[Any] = []
    slurm_engine.SlurmEngine(SlurmLaunch(workers=1, retries=2)).run(job, UNITS, events.append, alone=False)
    results = ended(events)
    assert [results[unit.name].status for unit in UNITS] == ["done", "lost", "done", "done"]
    assert results[UNITS[3].name].failures == {"cell": Failure("E: no", "trace")}
    assert "left the queue without a result" in results[UNITS[1].name].reason
    names = [unit.name for unit in UNITS]
    assert queue.submitted == [names, names[1:], names[1:], names[2:]]


def test_slurm_without_waiting_submits_once_and_collects_later(queue: Queue, job: Job) -> None:
    queue.done_at_once = False
    launch = SlurmLaunch(workers=1, wait=False)
    for _ in range(2):  # the second driver finds the task in the queue
        events: list[Any] = []
        slurm_engine.SlurmEngine(launch).run(job, UNITS, events.append, alone=False)
        assert events == []
    assert len(queue.submitted) == 1
    folder = Path(job.out) / slurm_engine.FOLDER / "results"
    for unit in UNITS[:2]:
        slurm_engine.store(str(folder), 0, UnitResult(unit.name))
    events = []
    slurm_engine.SlurmEngine(launch).run(job, UNITS[:3], events.append, alone=False)
    assert ended(events).keys() == {unit.name for unit in UNITS[:2]}
    queue.queued.clear()  # cancelled: what is left is submitted again
    slurm_engine.SlurmEngine(launch).run(job, UNITS[2:3], events.append, alone=False)
    assert queue.submitted[1:] == [[UNITS[2].name]]


def test_a_slurm_worker_that_is_alone_asks_for_the_whole_host(tmp_path: Path, job: Job) -> None:
    launch = SlurmLaunch(
        partition="gpu", gpus_per_worker=1, cpus_per_worker=8, mem="64G", time=30, setup=["module load x"]
    )
    shared, alone = (
        slurm_engine._Round(launch, job, [], lambda _: None, one).launch_options() for one in (False, True)
    )
    assert "exclusive" not in shared
    assert alone["exclusive"] is True
    expected = {"partition": "gpu", "gpus_per_node": 1, "cpus_per_task": 8, "mem": "64G", "time": 30}
    assert expected.items() <= shared.items()
    assert shared["setup"] == ["export OMP_NUM_THREADS=8", "module load x"]


def test_a_machine_without_slurm_or_ray_is_one_line(monkeypatch: Patch) -> None:
    monkeypatch.setattr(slurm_engine.shutil, "which", lambda name: None)
    with pytest.raises(Refused, match="launch=slurm: sbatch, squeue, srun not found"):
        slurm_engine.SlurmEngine(SlurmLaunch())
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refused, match="the package ray is not installed"):
        ray_engine.RayEngine(RayLaunch())


class Lost(Exception):
    """What Ray raises for a worker that is gone."""


@pytest.fixture
def pool(monkeypatch: Patch) -> Any:
    """An engine of two pretended workers on node "here", whose answers are there at once.

    Its own are `started`: the workers, which note their `units`, and `answers`: unit -> what its attempts return before one that
    is done.
    """
    engine: Any = ray_engine.RayEngine.__new__(ray_engine.RayEngine)
    engine._ray, engine._actors, engine._gpus = Mock(), [], 0.0
    engine._ray.exceptions.RayError = Lost
    engine._ray.wait = lambda references, **_: (references[:1], references[1:])
    engine._ray.get = lambda answer: answer()
    engine.workers, engine.launch, engine.started, engine.answers = 2, RayLaunch(workers=2, retries=2), [], {}
    monkeypatch.setattr(engine, "_nodes", lambda: {"here": {"CPU": 4}})

    def actor(job: Job, host: str | None = None) -> Any:
        def run(unit: Unit) -> Mock:
            worker.units.append(unit.name)
            return Mock(side_effect=[(engine.answers.get(unit.name) or [UnitResult(unit.name)]).pop(0)])

        worker = Mock(units=[])
        worker.run.remote, worker.node.remote.return_value = run, lambda: "here"
        engine.started.append(worker)
        return worker

    monkeypatch.setattr(engine, "_actor", actor)
    return engine


def test_one_ray_worker_of_a_host_stays_for_the_times(pool: Any, job: Job) -> None:
    events: list[Any] = []
    pool.run(job, UNITS, events.append, alone=False)
    timed = Unit(("cell",), "task", timed=True)
    pool.run(job, [timed], events.append, alone=True)
    assert [event.status for event in events if isinstance(event, UnitResult)] == ["done"] * 5
    assert len(pool.started) == 2
    assert sum(timed.name in worker.units for worker in pool.started) == 1
    pool._ray.kill.assert_called_once()  # nothing else of the run is on the host meanwhile
    assert timed.name not in pool._ray.kill.call_args.args[0].units


def test_a_lost_ray_worker_is_replaced_and_a_refusing_one_is_not(pool: Any, job: Job) -> None:
    events: list[Any] = []
    pool.answers |= {UNITS[0].name: [Lost("node died"), Lost("node died")], UNITS[1].name: [Lost("gone")] * 3}
    pool.run(job, UNITS, events.append, alone=False)
    results = ended(events)
    assert [results[unit.name].status for unit in UNITS] == ["done", "lost", "done", "done"]
    assert "Lost: gone" in results[UNITS[1].name].reason
    pool.answers.clear()
    pool.answers |= {unit.name: [UnitResult(unit.name, "refused", reason="other versions")] * 9 for unit in UNITS}
    events = []
    pool.run(job, UNITS, events.append, alone=False)
    assert {(result.status, result.reason) for result in ended(events).values()} == {("refused", "other versions")}


# -- Ray: two real workers on this machine ----------------------------------------------------------------------------------


def _samples(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/samples-*.jsonl"))


def _wait_for_a_sample(out: Path, more_than: int) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and _samples(out) <= more_than:
        time.sleep(0.05)


def _kill_a_worker_once(out: Path, before: int) -> None:
    """Kill a busy worker as soon as there is a new sample."""
    _wait_for_a_sample(out, before)
    found = subprocess.run(["pgrep", "-f", "ray::RayWorker"], capture_output=True, text=True, check=False)
    mine = {child.pid for child in psutil.Process().children(recursive=True)} & {*map(int, found.stdout.split())}
    if mine:
        os.kill(min(mine), signal.SIGKILL)


@pytest.mark.rest
@pytest.mark.timeout(600)
def test_two_ray_workers_whose_driver_is_killed_and_then_one_of_them(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = "-m method=full,pqcache budget=0.25 task=pocket_qa task.length=512 limit=8 wandb=disabled".split()
    assert run.main([*words, f"out={tmp_path / 'plain'}"]) == 0
    ray = ["launch=ray", "launch.workers=2", "launch.gpus_per_worker=0"]
    typed = [sys.executable, "run.py", *words, f"out={tmp_path / 'ray'}", *ray]
    driver = subprocess.Popen(typed, cwd=REPO, env=ONE_THREAD, stdout=-3, stderr=-3)
    _wait_for_a_sample(tmp_path / "ray", 0)
    driver.kill()
    driver.wait()
    found = _samples(tmp_path / "ray")
    assert 0 < found < 16
    killer = threading.Thread(target=_kill_a_worker_once, args=[tmp_path / "ray", found], daemon=True)
    killer.start()
    assert run.main([*words, f"out={tmp_path / 'ray'}", *ray]) == 0
    assert results(tmp_path / "plain") == results(tmp_path / "ray")
    rows = [json.loads(path.read_text()) for path in (tmp_path / "ray").glob("*/row.json")]
    assert len(rows) == 2
    for folder in {path.parent for path in (tmp_path / "ray").glob("*/row.json")}:
        documents = [json.loads(line)["doc_id"] for path in folder.glob("samples*.jsonl") for line in path.open()]
        assert sorted(documents) == list(range(8))  # none is lost, none is there twice
    assert all(row["timed_alone"] and row["tt2t_s"] and row["timed_samples"] == 5 for row in rows)
