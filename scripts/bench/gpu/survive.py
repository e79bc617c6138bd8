"""A benchmark that gives what it could measure, whatever fails: rows on disk at once, a worker process, a clock.

    rows = Rows(folder)                                  # one JSON object per line, in <folder>/rows.jsonl
    run_all(measurements, rows, until)                   # in the worker: any exception becomes a row
    supervise(command, names, rows, until, limit)        # in the parent: starts the worker, again where it died

A kernel that reads outside its memory ends CUDA for its whole process, and one that never ends blocks it. So the measurements run
in a worker. When it dies, or takes too long for one measurement, the parent writes that down and starts another worker, which
goes on with the next measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

LOST = 3  # exit code of a worker whose device answers no more
_TAIL = 4000  # characters of a dead worker's output that its row keeps
_POLL_S = 0.2


@dataclass(frozen=True)
class Measurement:
    """What is measured, by a name that no other has. `run` yields its rows one by one, each as soon as it is known."""

    name: str
    run: Callable[[], Iterable[Row]]


class Rows:
    """Rows on disk, each written before the next measurement begins. Every row has `measurement` and `at`, seconds since 1970."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "rows.jsonl"
        self.running = folder / "running.json"  # what the worker is measuring, and since when
        self.log = folder / "worker.log"  # its warnings and errors

    def begin(self) -> None:
        """A new run. The rows of the run before are kept beside."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self.file.replace(self.folder / "rows.before.jsonl")
        self.running.unlink(missing_ok=True)
        self.log.write_text("")

    def write(self, measurement: str, row: Row) -> None:
        line = json.dumps({"measurement": measurement, "at": round(time.time(), 3), **row}) + "\n"
        with self.file.open("a+b") as file:
            if file.tell() and self.file.read_bytes()[-1:] != b"\n":  # a process died while it wrote
                line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Row]:
        """All rows so far; a line that was cut off when its process died is left out."""
        rows = []
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return rows

    def done(self) -> set[str]:
        """Measurements that have a row."""
        return {row["measurement"] for row in self.read()}

    def mark(self, measurement: str | None) -> None:
        """Note what is being measured from now on; None: nothing."""
        if measurement is None:
            self.running.unlink(missing_ok=True)
        else:
            self.running.write_text(json.dumps({"measurement": measurement, "since": time.time()}))

    def marked(self) -> tuple[str, float] | None:
        """What is being measured, and since when."""
        try:
            mark = json.loads(self.running.read_text())
        except (OSError, ValueError):  # there is none, or it is being written
            return None
        return mark["measurement"], mark["since"]


def failed(error: BaseException) -> Row:
    """The row of an exception."""
    first = str(error).strip().splitlines()
    return {
        "failed": f"{type(error).__name__}: {first[0] if first else ''}",
        "traceback": "".join(traceback.format_exception(error)),
    }


def run_all(
    measurements: Iterable[Measurement],
    rows: Rows,
    until: float,
    *,
    lost: Callable[[], bool] = lambda: False,
    after: Callable[[], None] = lambda: None,
) -> int:
    """Measure what has no row yet, until the clock `until`; an exit code.

    lost: whether the device answers no more; asked after an exception. after: called after each measurement, to free memory.
    """
    done = rows.done()
    for measurement in measurements:
        if measurement.name in done:
            continue
        if time.time() > until:
            break
        rows.mark(measurement.name)
        try:
            gave = False
            for row in measurement.run():
                rows.write(measurement.name, row)
                gave = True
            if not gave:
                raise RuntimeError("it gave no row")
        except Exception as error:  # whatever it is: the others can still be measured
            rows.write(measurement.name, failed(error))
            print(f"{measurement.name}: failed, {type(error).__name__}", flush=True)
            if lost():
                return LOST
        finally:
            rows.mark(None)
        after()
    return 0


def supervise(command: Sequence[str], names: Sequence[str], rows: Rows, until: float, limit: float) -> None:
    """Run the worker `command` until each of `names` has a row. No measurement takes more than `limit` seconds.

    At the clock `until` the worker is ended; what was not measured then gets a row that says so.
    """
    while left := [name for name in names if name not in rows.done()]:
        if time.time() >= until:
            break
        code, why = _one_worker(command, rows, until, limit)
        if code == 0 and why is None and time.time() < until and not set(left) & rows.done():
            why = "it measured nothing"
        began = rows.marked()
        rows.mark(None)
        if why is None and code in (0, LOST):
            continue
        if began is None and time.time() >= until:  # it was ended between two measurements
            break
        name = left[0] if began is None else began[0]
        tail = rows.log.read_text(errors="replace")[-_TAIL:]
        rows.write(name, {"failed": why or f"its process ended with code {code}", "traceback": tail})
    for name in names:
        if name not in rows.done():
            rows.write(name, {"left_out": "the time was over"})


def _one_worker(command: Sequence[str], rows: Rows, until: float, limit: float) -> tuple[int, str | None]:
    """Run one worker: its exit code, and why it was ended, if it was."""
    sys.stdout.flush()
    with rows.log.open("a") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            while process.poll() is None:
                began = rows.marked()
                if time.time() >= until:
                    return _kill(process), "the time was over"
                if began is not None and time.time() - began[1] > limit:
                    return _kill(process), f"it took longer than {limit:g} s"
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                _kill(process)
    return process.returncode, None


def _kill(process: subprocess.Popen) -> int:
    process.kill()
    return process.wait()
