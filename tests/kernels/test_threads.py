"""Ranges of work over torch's own threads, and over own ones where torch's cannot be had."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("numba")
from pqcache.kernels import openmp, threads

FORKS = """
import os, sys, torch
from pqcache.kernels import openmp, threads
torch.set_num_threads(2)
seen = []
work = lambda first, last: seen.extend(range(first, last))
threads.run(work, 20)
torch.ones(1 << 20).exp()
child = os.fork()
if not child:
    assert not openmp.usable()
    threads.run(work, 20)
    os._exit(0 if sorted(seen) == sorted(2 * list(range(20))) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch's", "own"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "own":
        monkeypatch.setattr(openmp, "usable", lambda: False)
    elif not openmp.usable():
        pytest.skip("torch brings no libgomp here")
    return request.param


@pytest.mark.usefixtures("three", "kind")
def test_every_piece_of_work_is_done_once_and_errors_are_raised() -> None:
    for tasks in (1, 2, 5, 100):
        seen: list[int] = []
        threads.run(lambda first, last, seen=seen: seen.extend(range(first, last)), tasks)
        assert sorted(seen) == list(range(tasks))

    def fail(first: int, last: int) -> None:
        raise ArithmeticError(f"{first}")

    with pytest.raises(ArithmeticError):
        threads.run(fail, 10)


@pytest.mark.usefixtures("three")
def test_several_threads_work(kind: str) -> None:
    """And with torch's there are no others."""
    names: set[int] = set()

    def work(first: int, last: int) -> None:
        names.add(threading.get_native_id())
        time.sleep(0.02)

    threads.run(work, 12)
    before = threading.active_count()
    again, names = names, set()
    threads.run(work, 12)
    assert 2 <= len(names) <= 3
    if kind == "torch's":
        assert names <= again and threading.active_count() == before


@pytest.mark.usefixtures("three")
def test_little_work_is_done_by_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_ALONE", 1000)
    ranges: list[tuple[int, int]] = []
    threads.run(lambda first, last: ranges.append((first, last)), 12, cost=999)
    assert ranges == [(0, 12)]
    threads.run(lambda first, last: ranges.append((first, last)), 12, cost=1000)
    assert sorted(ranges[1:]) == [(i, i + 1) for i in range(12)]


@pytest.mark.rest
def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)
