"""launch=ray: the units of a run on a Ray cluster, or on one that is started on this machine.

One actor is one worker: a process with its own GPU or CPUs, which keeps its model between units. Ray places actors, notices
when one is lost, and waits for room; this file hands out units. A unit whose worker was lost goes to a new one.
"""

import os
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from pqcache import places
from pqcache.harness.config.options import RayLaunch, Refused
from pqcache.harness.run.compute import Follower, Worker
from pqcache.harness.run.units import Job, Report, Unit, UnitResult
from pqcache.outside import reason

POLL = 1.0  # seconds between two looks at what workers have written


class RayWorker(Worker):
    """The actor: a Worker in a process of its own. Everything it is given and returns is plain data."""

    def node(self) -> str:
        """Ray's name of the node that this worker runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


class RayEngine:
    """Runs units on Ray. Connects when it is made, and raises Refused where that fails."""

    def __init__(self, launch: RayLaunch) -> None:
        try:
            import ray
        except ImportError:
            raise Refused(["launch=ray: the package ray is not installed; pip install 'pqcache-lab[ray]'"]) from None
        self.launch, self._ray = launch, ray
        self._actors: list[Any] = []
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a worker without GPUs keeps what it sees
        # Ray starts workers at low priority (nice 15): beside any other program they starve, and their times include its work
        os.environ.setdefault("RAY_worker_niceness", "0")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
        options |= {"include_dashboard": False} if launch.address == "local" else {}
        try:
            ray.init(launch.address, **options)
        except (ConnectionError, RuntimeError, OSError, ValueError) as error:
            raise Refused([f"launch.address={launch.address}: no Ray cluster answers ({reason(error)})"]) from None
        self._gpus = launch.gpus_per_worker
        if self._gpus is None:
            self._gpus = 1.0 if any(node.get("GPU", 0) >= 1 for node in self._nodes().values()) else 0.0
        room = sum(self._fit(has) for has in self._nodes().values())
        if not room:
            self.close()
            wanted = f"launch.gpus_per_worker={self._gpus:g} launch.cpus_per_worker={launch.cpus_per_worker}"
            raise Refused([f"{wanted}: no node of the Ray cluster has so many"])
        self.workers = launch.workers or (room if self._gpus else 1)

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
        number = min(len(hosts) if alone else self.workers, len(units))
        if alone:
            kept = self._one_a_host()
            hosts.sort(key=lambda host: host not in kept)
            self._actors = [kept.get(host) or self._actor(job, host) for host in hosts[:number]]
        self._actors += [self._actor(job) for _ in range(number - len(self._actors))]
        follower, waiting, tries = Follower(job, units, report), deque(units), Counter[str]()
        idle, reason = list(self._actors), ""
        busy: dict[Any, tuple[Unit, Any]] = {}  # what Ray will return -> the unit, and who computes it
        while waiting or busy:
            while waiting and idle:
                unit, actor = waiting.popleft(), idle.pop()
                busy[actor.run.remote(unit)] = unit, actor
            if not busy:  # no worker is left
                report(UnitResult(waiting.popleft().name, "refused", reason=reason))
                continue
            done, _ = self._ray.wait(list(busy), num_returns=1, timeout=POLL)
            follower.poll()
            for reference in done:
                unit, actor = busy.pop(reference)
                try:
                    result = self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    self._drop(actor)
                    tries[unit.name] += 1
                    if tries[unit.name] <= self.launch.retries:
                        waiting.appendleft(unit)
                    else:
                        lost = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
                        report(UnitResult(unit.name, "lost", reason=f"{type(error).__name__}: {lost}"))
                    if waiting:
                        self._actors.append(self._actor(job))
                        idle.append(self._actors[-1])
                    continue
                if result.status == "refused":  # another host may take it
                    waiting.append(unit)
                    reason = result.reason
                    self._drop(actor)
                    continue
                report(result)
                idle.append(actor)
        follower.poll()

    def _drop(self, actor: Any) -> None:
        self._ray.kill(actor)
        self._actors.remove(actor)

    def _one_a_host(self) -> dict[str, Any]:
        """Host -> one of its workers, with its loaded model. The others are let go."""
        kept: dict[str, Any] = {}
        for actor in self._actors:
            try:
                node = self._ray.get(actor.node.remote())
            except self._ray.exceptions.RayError:  # lost since its last unit
                continue
            if kept.setdefault(node, actor) is not actor:
                self._ray.kill(actor)
        return kept

    def _actor(self, job: Job, host: str | None = None) -> Any:
        """A new worker, on one host or wherever there is room. It may wait for room."""
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
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        self._ray.shutdown()
