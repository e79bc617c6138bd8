"""Predicted against measured time: is the plan's estimate within 30 % of what a command takes, start-up included?

    python scripts/check_plan.py                          make a profile, then experiment=demo and a sweep at 3072 tokens, 3 times
    python scripts/check_plan.py --rounds 1 --keep        with the stored profile

Run it where nothing else runs. 3072 tokens is not a length of the profile. Exit code 1 if a median is off by more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 0.3
COMMANDS = (
    ("experiment=demo",),
    ("-m", "method=full,oracle,pqcache,streaming", "budget=0.2", "task=pocket_qa", "task.length=3072", "limit=16"),
)


def predicted(words: list[str]) -> tuple[float, float]:
    """Seconds that the plan gives: (with answers as long as the references, with the longest answers)."""
    from pqcache.harness.config.cells import make_plan
    from pqcache.harness.config.compose import compose_all
    from pqcache.harness.config.files import CONFIGS
    from pqcache.harness.launch.survey import survey
    from pqcache.harness.run.session import Session

    found = survey(make_plan(compose_all(words, CONFIGS)), Session())
    seconds, most = found.seconds(), found.seconds(most=True)
    if seconds is None or most is None:
        raise SystemExit("no profile of this machine: run without --keep")
    return seconds, most


def measured(words: list[str]) -> float:
    """Seconds of the command, from its start to its end."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / "run.py"), *words], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="use the stored profile")
    parser.add_argument("--cache-dir", default=str(Path("~/.cache/pqcache").expanduser()))
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    cache = f"cache_dir={arguments.cache_dir}"
    if not arguments.keep:
        subprocess.run([sys.executable, "-m", "pqcache.harness.launch.profile", cache], check=True, cwd=ROOT)
    worst = 0.0
    for command in COMMANDS:
        walls = []
        with tempfile.TemporaryDirectory() as folder:
            words = [*command, cache, "wandb=disabled"]
            seconds, most = predicted([*words, f"out={folder}/plan"])
            for number in range(arguments.rounds):
                walls.append(measured([*words, f"out={folder}/{number}"]))
        error = seconds / median(walls) - 1
        worst = max(worst, abs(error))
        runs = ", ".join(f"{wall:.0f}" for wall in walls)
        print(
            f"{' '.join(command)}\n  predicted {seconds:.0f} s (at most {most:.0f}), measured {median(walls):.0f} s"
            f" ({runs}): {error:+.0%}",
            flush=True,
        )
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
