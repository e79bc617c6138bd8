"""Time of a sweep by two one-thread Ray workers against one, in processes of their own, interleaved.

    python -m scripts.bench_workers                                          the sweep below, 3 rounds
    python -m scripts.bench_workers --rounds 1 -- task.length=1024 limit=8   with other values

Prints seconds of each run, the medians and their ratio; launch=local with two threads stands beside, run once. Start-up is
included. So is the phase that measures times, one worker at a time: its length does not depend on the limit, so that a short
sweep gains less. Run it where nothing else runs; the default takes an hour and a half on two cores. Exit code 1 if the rows of
two runs differ in more than times.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.cluster.same_rows import differences, rows, samples

ROOT = Path(__file__).resolve().parents[1]
SWEEP = (
    "task=pocket_qa",
    "task.length=4096",
    "limit=200",
    "method=full,oracle,pqcache,streaming,snapkv,h2o,sparq,kvcrush",
    "budget=0.2",
)
RUNS = {
    "one worker": (1, ("launch=ray", "launch.workers=1", "launch.cpus_per_worker=1")),
    "two workers": (1, ("launch=ray", "launch.workers=2", "launch.cpus_per_worker=1")),
    "local, two threads": (2, ("launch=local",)),
}
COMPARED = ("one worker", "two workers")
BESIDE = "local, two threads"  # run once, after the last round


def folder_name(name: str) -> str:
    """A run's name without what a command line reads otherwise, such as commas."""
    return re.sub(r"\W+", "-", name)


def timed(more: list[str], threads: int, launch: tuple[str, ...], out: Path) -> float:
    """Seconds of one run into a new folder."""
    replaced = {word.partition("=")[0] for word in more}
    words = [word for word in SWEEP if word.partition("=")[0] not in replaced]
    line = [sys.executable, str(ROOT / "run.py"), "-m", *words, *more, *launch, f"out={out}", "wandb=disabled"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    start = time.monotonic()
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    seconds = time.monotonic() - start
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode}\n{done.stderr[-2000:]}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="after --: words of run.py")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    different: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(arguments.rounds):
            last = index == arguments.rounds - 1
            for name in (*COMPARED, BESIDE) if last else COMPARED:
                threads, launch = RUNS[name]
                out = Path(folder) / f"{index}-{folder_name(name)}"
                seconds[name].append(timed(arguments.overrides, threads, launch, out))
                print(f"round {index + 1}, {name}: {seconds[name][-1]:.0f} s", flush=True)
            first = Path(folder) / f"0-{folder_name('one worker')}"
            different += differences(
                first, Path(folder) / f"{index}-{folder_name('two workers')}"
            )  # two threads round otherwise
        print(f"{len(rows(first))} cells, {sum(samples(first).values())} samples; {len(different)} differences in rows")
        print("\n".join(different[:10]), end="\n" if different else "")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name in ("two workers", BESIDE):
        ratio = median[name] / median["one worker"]
        print(f"{name}: {median[name]:.0f} s, one worker: {median['one worker']:.0f} s, ratio {ratio:.2f}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
