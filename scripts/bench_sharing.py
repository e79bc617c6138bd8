"""Time of a sweep with shared prefills against without, in processes of their own, interleaved.

    python scripts/bench_sharing.py                                       the sweep below, 3 rounds
    python scripts/bench_sharing.py --rounds 1 -- task.length=1024 limit=8   with other values

Prints seconds of each run, the medians and their ratio, and the distinct prefills of each side. Start-up is included.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ("task=pocket_qa", "task.length=4096", "limit=30", "method=full,oracle,pqcache,streaming", "budget=0.2,0.1")


def command(more: list[str], shared: str, out: Path) -> list[str]:
    """The sweep with some values replaced."""
    replaced = {word.partition("=")[0] for word in more}
    words = [word for word in SWEEP if word.partition("=")[0] not in replaced]
    fixed = [f"shared_prefill={shared}", f"out={out}", "wandb=disabled"]
    return [sys.executable, str(ROOT / "run.py"), "-m", *words, *more, *fixed]


def timed(more: list[str], shared: str) -> tuple[float, int]:
    """(seconds, distinct prefills) of one run into a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        done = subprocess.run(command(more, shared, Path(folder)), capture_output=True, text=True, cwd=ROOT)
        seconds = time.monotonic() - start
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode}\n{done.stderr[-2000:]}")
    counted = re.search(r"^prefills: (\d+) distinct", done.stdout, re.MULTILINE)
    if counted is None:
        raise SystemExit("the run did not print its prefills")
    return seconds, int(counted[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="after --: words of run.py")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"auto": [], "false": []}
    prefills: dict[str, int] = {}
    for index in range(arguments.rounds):
        for shared in ("auto", "false") if index % 2 == 0 else ("false", "auto"):
            took, prefills[shared] = timed(arguments.overrides, shared)
            seconds[shared].append(took)
            print(f"round {index + 1}, shared_prefill={shared}: {took:.1f} s, {prefills[shared]} prefills", flush=True)
    medians = {shared: statistics.median(values) for shared, values in seconds.items()}
    ratio = medians["auto"] / medians["false"]
    print(
        f"median: {medians['auto']:.1f} s shared ({prefills['auto']} distinct prefills),"
        f" {medians['false']:.1f} s each its own ({prefills['false']}), ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
