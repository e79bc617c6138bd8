"""Disturb a sweep on Ray at random moments: kill a worker, remove a node, kill the driver. The rows must not care.

    python -m scripts.cluster.disturb_ray --rounds 10 --out results/disturbed

Two nodes with two pretended GPUs each run on this machine, with four workers. Each round starts the sweep in an empty folder,
disturbs it, starts it again if its driver was killed, and compares rows and samples with those of an undisturbed run in
one process.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.cluster.same_rows import differences, rows, samples

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ["-m", "method=full,pqcache,streaming,snapkv,sparq", "budget=0.2,0.1", "task=pocket_qa", "wandb=disabled"]
WORKERS = ("launch=ray", "launch.workers=4", "launch.gpus_per_worker=1", "launch.cpus_per_worker=1")
STARTS = 5  # tries to start a node: on a busy machine its start may time out
DEEDS = ("kill a worker", "remove a node", "kill the driver")


def command(out: Path, length: int, limit: int, *more: str) -> list[str]:
    return [sys.executable, "run.py", *SWEEP, f"task.length={length}", f"limit={limit}", f"out={out}", *more]


class Cluster:
    """Two nodes on this machine, each with two pretended GPUs."""

    def __init__(self) -> None:
        # Ray lowers its workers' priority, and the raylets that start them here inherit this environment. On a busy
        # machine such workers would hardly run.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
        from ray.cluster_utils import Cluster as RayCluster

        node: dict[str, Any] = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 << 20}
        self._node = node
        self._cluster = RayCluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        self._second = self._start()
        self.address = self._cluster.address

    def lose_a_node(self) -> None:
        self._cluster.remove_node(self._second)

    def restore(self) -> None:
        if self._second not in self._cluster.worker_nodes:
            self._second = self._start()

    def _start(self) -> Any:
        """A second node. What a failed start has left is taken away before the next one."""
        before = set(self._cluster.worker_nodes)
        for attempt in range(1, STARTS + 1):
            try:
                return self._cluster.add_node(**self._node)
            except Exception as error:  # Ray raises bare Exceptions and TimeoutErrors here
                for half in set(self._cluster.worker_nodes) - before:
                    self._cluster.remove_node(half)
                if attempt == STARTS:
                    raise
                reason = next(iter(str(error).splitlines()), "")[:120]
                print(f"a node did not start ({type(error).__name__}: {reason}), try {attempt + 1}", flush=True)
                time.sleep(2.0 * attempt)
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._cluster.shutdown()


def started(out: Path) -> int:
    """Finished samples on disk."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/samples*.jsonl"))


def workers() -> list[int]:
    """Process ids of Ray's workers on this machine."""
    done = subprocess.run(["pgrep", "-f", "ray::RayWorker"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def round_of(
    deed: str, cluster: Cluster, out: Path, length: int, limit: int, total: int, rng: random.Random
) -> list[str]:
    """One disturbed sweep. Returns what differs from `out`/../undisturbed."""
    line = command(out, length, limit, *WORKERS, f"launch.address={cluster.address}")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with open(out.with_suffix(".log"), "w") as log:
        driver = subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=log, env=environment)
        at = rng.randrange(1, max(2, total * 3 // 4))
        while started(out) < at and driver.poll() is None:
            time.sleep(0.1)
        if deed == "kill a worker" and (busy := workers()):
            os.kill(rng.choice(busy), signal.SIGKILL)
        elif deed == "remove a node":
            cluster.lose_a_node()
        elif deed == "kill the driver":
            driver.kill()
        code = driver.wait()
        if deed == "kill the driver":
            code = subprocess.run(line, cwd=ROOT, stdout=log, stderr=log, env=environment, check=False).returncode
    cluster.restore()
    left = [] if code == 0 else [f"exit code {code}, see {out.with_suffix('.log')}"]
    print(f"{deed} after {at} of {total} samples: exit code {code}, ", end="")
    return left + differences(out.parent / "undisturbed", out)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/disturbed"))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    plain = out / "undisturbed"
    subprocess.run(command(plain, arguments.length, arguments.limit), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    total, rng = sum(samples(plain).values()), random.Random(arguments.seed)
    print(f"undisturbed: {len(rows(plain))} rows, {total} samples", flush=True)
    cluster, failed = Cluster(), 0
    try:
        for number in range(arguments.rounds):
            folder = out / f"round{number}"
            folder.mkdir()
            deed = DEEDS[number % len(DEEDS)]
            different = round_of(deed, cluster, folder, arguments.length, arguments.limit, total, rng)
            doubled = sum(count - 1 for count in samples(folder).values())
            print(f"{len(rows(folder))} rows, {doubled} samples twice, {len(different)} differences", flush=True)
            print("\n".join(different[:10]), end="\n" if different else "", flush=True)
            failed += bool(different)
    finally:
        cluster.close()
    print(f"{arguments.rounds - failed} of {arguments.rounds} rounds: equal but for times")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
