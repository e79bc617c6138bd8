"""launch=ray: the units of a run on a Ray cluster, or on one that is started on this machine.

One actor is one worker: a process with its own GPU or CPUs, which keeps its model between units. Ray places actors, notices
when one is lost, and waits for room; this file hands out units. A unit whose worker was lost goes to another one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pqcache import places
from pqcache.harness.config.launch import RayLaunch
from pqcache.harness.config.options import Refused
from pqcache.harness.run.engines.follow import Follower
from pqcache.harness.run.units import Job, Report, Unit, UnitResult

POLL = 1.0  # seconds between two looks at what workers have written


class RayWorker:
    """The actor: a Worker in a process of its own. Everything it is given and returns is plain data."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._worker: Any = None

    def start(self) -> str | None:
        """Compose the run's cells. Returns one line if this host refuses them, else None."""
        from pqcache.harness.run.worker import Worker

        try:
            self._worker = Worker(self._job)
        except Refused as refused:
            return "; ".join(refused.lines)
        return None

    def run(self, unit: Unit, attempt: int) -> UnitResult:
        """Run one unit; its samples are on disk when this returns."""
        result: UnitResult = self._worker.run(unit, attempt)
        return result

    def node(self) -> str:
        """Ray's name of the node that this worker runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


@dataclass
class _Slot:
    """A worker and what it is doing; no unit while it starts."""

    actor: Any
    unit: Unit | None = None


class RayEngine:
    """Runs units on Ray. Connects when it is made, and raises Refused where that fails."""

    def __init__(self, launch: RayLaunch) -> None:
        try:
            import ray
        except ImportError:
            raise Refused(["launch=ray: the package ray is not installed; pip install 'pqcache-lab[ray]'"]) from None
        self.launch, self._ray = launch, ray
        self._idle: dict[str, Any] = {}  # node -> a worker that has started and may run more units of the same job
        self._connect()
        self._gpus = launch.gpus_per_worker
        if self._gpus is None:
            self._gpus = 1.0 if any(node.get("GPU", 0) >= 1 for node in self._nodes().values()) else 0.0
        room = {node: self._fit(has) for node, has in self._nodes().items()}
        if not any(room.values()):
            self.close()
            wanted = f"launch.gpus_per_worker={self._gpus:g} launch.cpus_per_worker={launch.cpus_per_worker}"
            raise Refused([f"{wanted}: no node of the Ray cluster has so many"])
        self.workers = launch.workers or (sum(room.values()) if self._gpus else 1)

    def _connect(self) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
        if self.launch.address == "local":
            options |= {"address": "local", "include_dashboard": False}
        else:
            options["address"] = self.launch.address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a worker without GPUs keeps what it sees
        # Ray starts workers at low priority (nice 15): beside any other program they starve, and their times include its work
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            self._ray.init(**options)
        except (ConnectionError, RuntimeError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise Refused([f"launch.address={self.launch.address}: no Ray cluster answers ({reason})"]) from None

    def _nodes(self) -> dict[str, dict[str, float]]:
        """Node -> its resources, of those that are alive."""
        return {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}

    def _fit(self, resources: dict[str, float]) -> int:
        """How many workers a node has room for."""
        assert self._gpus is not None
        by_cpu = int(resources.get("CPU", 0) // self.launch.cpus_per_worker)
        return by_cpu if not self._gpus else min(by_cpu, int(resources.get("GPU", 0) / self._gpus + 1e-9))

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        """Run every unit and report it once. alone: one worker on each host."""
        hosts = [node for node, has in self._nodes().items() if self._fit(has)] if alone else []
        number = len(hosts) if alone else self.workers
        _Round(self, job, units, report, hosts, min(number, len(units))).run()

    def retire(self, actor: Any) -> None:
        """A worker has nothing left to do. One of each host stays for the next call of `run`, with its loaded model."""
        try:
            node = self._ray.get(actor.node.remote())
        except self._ray.exceptions.RayError:  # lost since its last unit
            return
        if node in self._idle:
            self._ray.kill(actor)
        else:
            self._idle[node] = actor

    def idle(self, host: str) -> Any | None:
        """The worker that stayed on a host, if one did. It is the caller's now."""
        return self._idle.pop(host, None)

    def actor(self, job: Job, host: str | None) -> Any:
        """A new worker, on one host or wherever there is room. It may wait for room."""
        assert self._gpus is not None
        threads = str(self.launch.cpus_per_worker)
        path = os.pathsep.join([str(places.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        options: dict[str, Any] = {
            "num_cpus": self.launch.cpus_per_worker,
            "num_gpus": self._gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": threads}},
        }
        if host is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(host, soft=False)
        return self._ray.remote(RayWorker).options(**options).remote(job)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        for actor in self._idle.values():
            self._ray.kill(actor)
        self._ray.shutdown()


class _Round:
    """One call of RayEngine.run: units that wait, workers that are busy, and what was lost."""

    def __init__(
        self, engine: RayEngine, job: Job, units: Sequence[Unit], report: Report, hosts: list[str], number: int
    ) -> None:
        self._engine, self._job, self._report, self._ray = engine, job, report, engine._ray
        self._waiting = deque(units)
        self._attempts = {unit.name: 0 for unit in units}
        self._slots: dict[Any, _Slot] = {}  # what Ray will return -> who computes it
        self._refusals: list[str] = []
        self._hosts = hosts
        self._number = number
        self._follower = Follower(job.folders, units, report)

    def run(self) -> None:
        try:
            for index in range(self._number):
                host = self._hosts[index] if self._hosts else None
                started = self._engine.idle(host) if host else None
                if started is None:
                    self._add(host)
                else:
                    self._give(started)
            while self._waiting or any(slot.unit for slot in self._slots.values()):
                if not self._slots:
                    return self._give_up()
                done, _ = self._ray.wait(list(self._slots), num_returns=1, timeout=POLL)
                self._follower.poll()
                for reference in done:
                    self._finished(reference, self._slots.pop(reference))
            self._follower.poll()
        finally:
            for slot in self._slots.values():
                self._ray.kill(slot.actor)
        return None

    def _add(self, host: str | None = None) -> None:
        actor = self._engine.actor(self._job, host)
        self._slots[actor.start.remote()] = _Slot(actor)

    def _finished(self, reference: Any, slot: _Slot) -> None:
        """A worker has started, has run its unit, or is lost."""
        unit = slot.unit
        try:
            value = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._lost(unit, f"{type(error).__name__}: {_first_line(error)}")
            return
        if unit is None and value is not None:
            self._refusals.append(value)
            self._ray.kill(slot.actor)
            return
        if unit is not None:
            self._report(value)
        if not self._waiting:
            self._engine.retire(slot.actor)
            return
        self._give(slot.actor)

    def _give(self, actor: Any) -> None:
        unit = self._waiting.popleft()
        attempt = self._attempts[unit.name]
        self._slots[actor.run.remote(unit, attempt)] = _Slot(actor, unit)

    def _lost(self, unit: Unit | None, reason: str) -> None:
        """Take back the unit of a lost worker and start another worker, on any host."""
        if unit is not None:
            attempt = self._attempts[unit.name]
            if attempt >= self._engine.launch.retries:
                self._report(UnitResult.lost(unit, attempt, reason))
            else:
                self._attempts[unit.name] = attempt + 1
                self._waiting.appendleft(unit)
        elif len(self._refusals) < 2 * self._number:  # a worker that does not even start is no unit's fault
            self._refusals.append(reason)
        else:
            return
        if self._waiting and len(self._slots) < self._number:
            self._add()

    def _give_up(self) -> None:
        """No worker is left and none can be started."""
        reason = "; ".join(dict.fromkeys(self._refusals)) or "no worker could be started"
        while self._waiting:
            self._report(UnitResult.refused(self._waiting.popleft(), reason))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
