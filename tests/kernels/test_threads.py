"""Ranges of work over torch's own threads, and over own ones where torch's cannot be had."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from pqcache.kernels import openmp, threads
from pqcache.kernels.registers import increment

FORKS = """
import os, sys, numpy, torch
from pqcache.kernels import openmp, threads

@threads.kernel()
def count(first, last, seen):
    for task in range(first, last):
        seen[task] += 1

torch.set_num_threads(2)
seen = numpy.zeros(20, numpy.int64)
threads.run(count, 20, seen)
torch.ones(1 << 20).exp()
child = os.fork()
if not child:
    assert not openmp.fork()
    threads.run(count, 20, seen)
    os._exit(0 if (seen == 2).all() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
PATIENCE = 1_000_000_000  # looks at a counter: many seconds


@threads.kernel()
def _count(first, last, seen, pieces):
    """Each task leaves the number of tasks in its piece, and the piece is counted."""
    increment(pieces.ctypes.data)
    for task in range(first, last):
        seen[task] += last - first


@threads.kernel()
def _fail(first, last, bad):
    if first <= bad < last:
        raise ArithmeticError("a task fails")


@threads.kernel()
def _meet(first, last, arrived, looks, expected, met):
    """A task waits for others to begin, so that it ends only where as many run at the same time."""
    for task in range(first, last):
        increment(arrived.ctypes.data)
        while increment(looks.ctypes.data) < PATIENCE:  # and so the next line really reads
            if arrived[0] >= expected:
                met[task] = 1
                break


@pytest.fixture
def three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch's", "own"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "own":
        monkeypatch.setattr(openmp, "fork", lambda: 0)
    elif not openmp.fork():
        pytest.skip("torch brings no libgomp here")
    return request.param


@pytest.mark.usefixtures("three", "kind")
@pytest.mark.parametrize("tasks", [0, 1, 2, 5, 100, 1000])
def test_every_task_is_done_once(tasks: int) -> None:
    seen, pieces = np.zeros(tasks, np.int64), np.zeros(1, np.int64)
    threads.run(_count, tasks, seen, pieces)
    expected = min(tasks, 3 * threads.TASKS) or 1
    assert pieces[0] == expected and (1 / np.maximum(seen, 1)).sum() == pytest.approx(expected if tasks else 0)
    if tasks:
        assert set(seen.tolist()) <= {tasks // expected, -(-tasks // expected)}


@pytest.mark.usefixtures("three", "kind")
@pytest.mark.parametrize("tasks", [1, 10])
def test_a_task_that_fails_is_an_error(tasks: int) -> None:
    threads.run(_fail, tasks, tasks)
    with pytest.raises(RuntimeError, match="_fail failed"):
        threads.run(_fail, tasks, 0)


@pytest.mark.usefixtures("three")
def test_several_threads_work(kind: str) -> None:
    """And with torch's there are no others."""
    torch.ones(1 << 20).exp()
    before = threading.active_count()
    for _ in range(3):
        arrived, looks, met = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(12, np.int64)
        threads.run(_meet, 12, arrived, looks, 3, met)
        assert met.all()
    if kind == "torch's":
        assert threading.active_count() == before


@pytest.mark.usefixtures("three")
def test_little_work_is_done_by_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_ALONE", 1000)
    for cost, count in ((999, 1), (1000, 12)):
        pieces = np.zeros(1, np.int64)
        threads.run(_count, 12, np.zeros(12, np.int64), pieces, cost=cost)
        assert pieces[0] == count


@pytest.mark.rest
def test_a_forked_child_does_not_wait_for_its_parents_threads(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"  # numba keeps what it compiles beside a file
    script.write_text(FORKS)
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
