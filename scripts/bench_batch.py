"""Samples per second of several prompts at once against one, in turns in one process, with the same scores.

    python scripts/bench_batch.py                                           pocket_qa, batch 8 against 1, 3 rounds
    python scripts/bench_batch.py --batch 4 --rounds 1 -- task=pocket       other values

Prints samples per second of every run, the medians and their ratio, how many answers differ, and both scores. Importing, loading
and the first run of each side, which warms up, are not counted; nor is lm-eval's making of the documents, measured by a run that
finds all samples done. Exit code 1 if a sample's score differs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import run  # noqa: E402

METHODS = ("full", "pqcache", "snapkv", "zipcache")
WORDS = ("task=pocket_qa", "task.length=2048", "limit=32", "budget=0.2", "wandb=disabled")


def words(more: list[str], method: str, batch: int, out: Path) -> list[str]:
    """The command of one side, with some values replaced."""
    replaced = {word.partition("=")[0] for word in more}
    kept = [word for word in WORDS if word.partition("=")[0] not in replaced]
    return [*kept, *more, f"method={method}", f"batch={batch}", f"out={out}"]


def seconds(command: list[str], clock: Callable[[], float]) -> float:
    """The time of one command in this process."""
    start = clock()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = run.main(command)
    if code != 0:
        raise SystemExit(f"exit code {code}\n{said.getvalue()[-2000:]}")
    return clock() - start


def measured(command: list[str], clock: Callable[[], float]) -> float:
    """Seconds of a command's samples: of the whole command, less those of the same one when all samples are there."""
    return seconds(command, clock) - seconds(command, clock)


def stored(out: Path) -> tuple[dict[str, Any], dict[tuple[str, int], str]]:
    """The row of a run, and its answers."""
    (path,) = out.glob("*/row.json")
    lines = [json.loads(line) for line in (path.parent / "samples.jsonl").read_text().splitlines()]
    return json.loads(path.read_text()), {(line["task"], line["doc_id"]): line["response"] for line in lines}


def compare(method: str, batch: int, rounds: int, more: list[str], clock: Callable[[], float]) -> bool:
    """Time one method on both sides and print it. Returns whether all scores are the same."""
    speeds: dict[int, list[float]] = {1: [], batch: []}
    found: dict[int, tuple[dict[str, Any], dict[tuple[str, int], str]]] = {}
    for index in range(rounds + 1):  # the first one warms up
        for size in (1, batch) if index % 2 else (batch, 1):
            with tempfile.TemporaryDirectory() as folder:
                took = measured(words(more, method, size, Path(folder)), clock)
                found[size] = stored(Path(folder))
            if index:
                speeds[size].append(found[size][0]["n_samples"] / took)
    one, many = statistics.median(speeds[1]), statistics.median(speeds[batch])
    (row, answers), (row_many, answers_many) = found[1], found[batch]
    same = row["sample_scores"] == row_many["sample_scores"]
    differ = sum(answers[key] != answers_many[key] for key in answers)
    shown = {size: "  ".join(f"{speed:.2f}" for speed in values) for size, values in speeds.items()}
    print(
        f"{method:<10} batch 1: {one:.2f} samples/s ({shown[1]}), batch {batch}: {many:.2f} ({shown[batch]}),"
        f" ratio {many / one:.2f}; score {row['score']:.2f} and {row_many['score']:.2f}, {row['n_samples']} samples,"
        f" {differ} answers differ, {'same scores' if same else 'SCORES DIFFER'}; {row['kv_dtype']}",
        flush=True,
    )
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, for a machine that others use, too")
    parser.add_argument("overrides", nargs="*", help="after --: words of run.py")
    arguments = parser.parse_args()
    import torch

    kind = "CPU time" if arguments.cpu_time else "time"
    shown = " ".join(words(arguments.overrides, "<m>", arguments.batch, Path("<o>")))
    print(f"{kind}, {torch.get_num_threads()} threads; {shown}", flush=True)
    methods = arguments.methods.split(",")
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    same = [compare(method, arguments.batch, arguments.rounds, arguments.overrides, clock) for method in methods]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
