"""Ranges of work over torch's own threads."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pqcache.kernels import launch
from pqcache.kernels.numeric import increment
from tests.threads import threads

FORKS = """
import os, sys, numpy, torch
from pqcache.kernels import launch

@launch.kernel
def count(first, last, seen):
    for task in range(first, last):
        seen[task] += 1

torch.set_num_threads(2)
seen = numpy.zeros(20, numpy.int64)
launch.run(count, 20, seen)
torch.ones(1 << 20).exp()
child = os.fork()
if not child:
    assert launch.team() == 1
    launch.run(count, 20, seen)
    os._exit(0 if (seen == 2).all() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
PATIENCE = 1_000_000_000  # looks at a counter: many seconds


@launch.kernel
def _count(first, last, seen, pieces):
    """Each task leaves the number of tasks in its piece, and the piece is counted."""
    increment(pieces.ctypes.data)
    for task in range(first, last):
        seen[task] += last - first


@launch.kernel
def _fail(first, last, bad):
    if first <= bad < last:
        raise ArithmeticError("a task fails")


@launch.kernel
def _meet(first, last, arrived, looks, expected, met):
    """A task waits for others to begin, so that it ends only where as many run at the same time."""
    for task in range(first, last):
        increment(arrived.ctypes.data)
        while increment(looks.ctypes.data) < PATIENCE:  # and so the next line really reads
            if arrived[0] >= expected:
                met[task] = 1
                break


@pytest.fixture(params=[3, 1])
def workers(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield launch.team()


@pytest.mark.parametrize("tasks", [0, 1, 2, 5, 100, 1000])
def test_every_task_is_done_once(tasks: int, workers: int) -> None:
    seen, pieces = np.zeros(tasks, np.int64), np.zeros(1, np.int64)
    launch.run(_count, tasks, seen, pieces)
    expected = 1 if workers == 1 else min(tasks, workers * launch.PIECES) or 1
    assert pieces[0] == expected and (1 / np.maximum(seen, 1)).sum() == pytest.approx(expected if tasks else 0)
    if tasks:
        assert set(seen.tolist()) <= {tasks // expected, -(-tasks // expected)}


@pytest.mark.parametrize("tasks", [1, 10])
def test_a_task_that_fails_is_an_error(tasks: int, workers: int) -> None:
    launch.run(_fail, tasks, tasks)
    with pytest.raises(RuntimeError, match="_fail failed"):
        launch.run(_fail, tasks, 0)


def test_torchs_threads_work_and_there_are_no_others(workers: int) -> None:
    torch.ones(1 << 20).exp()
    before = threading.active_count()
    for _ in range(3):
        arrived, looks, met = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(12, np.int64)
        launch.run(_meet, 12, arrived, looks, workers, met)
        assert met.all()
    assert threading.active_count() == before


def test_little_work_is_done_by_the_calling_thread(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_ALONE", 1000)
    for cost, count in ((999, 1), (1000, 12 if workers > 1 else 1)):
        pieces = np.zeros(1, np.int64)
        launch.run(_count, 12, np.zeros(12, np.int64), pieces, cost=cost)
        assert pieces[0] == count


@pytest.mark.rest
def test_a_forked_child_does_not_wait_for_its_parents_threads(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"  # numba keeps what it compiles beside a file
    script.write_text(FORKS)
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
