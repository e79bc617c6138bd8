"""Run a compiled kernel over a range of tasks on as many threads as torch uses.

Torch's threads where they can be had (openmp.py), else own ones. Not numba's: its OpenMP layer aborts a process that forks later
(data loaders do), its other built-in layer one that calls kernels from two threads. The kernels release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import torch

from pqcache.kernels import openmp
from pqcache.kernels.team import FAILED, SHARED, launcher

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}  # (process, threads): a forked child starts its own
_lock = threading.Lock()
# pieces per thread where there are as many tasks: threads that begin late or work slowly leave some to the others
TASKS = 24
BYTES_PER_NS = 10  # that one thread reads of K and V, for `cost`
_ALONE = 200_000  # nanoseconds of work that other threads do not speed up: they take 50 to 100 us to begin


class Kernel(NamedTuple):
    """A kernel that `run` takes. launch: see team.py."""

    name: str
    launch: Any


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Make a function(first, last, *args), which does tasks first .. last-1, a kernel, compiled by numba on first use.

    options: of numba.njit.
    """

    def make(function: Callable[..., None]) -> Kernel:
        return Kernel(function.__name__, launcher(function, options))

    return make


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="pqcache-kernel")
        return _pools[key]


def run(kernel: Kernel, tasks: int, *args: Any, cost: float | None = None) -> None:
    """Call the kernel on disjoint ranges that cover 0 .. tasks-1. Tasks write to places of their own.

    cost: the nanoseconds that one thread takes, roughly; the calling thread does little work alone. None: unknown.

    The calling thread works too. Of own threads it waits for none that has not begun when nothing is left: short kernels often
    end before another thread has woken up. Raises RuntimeError where the kernel raised anything.
    """
    threads, shared = min(torch.get_num_threads(), tasks), np.zeros(SHARED, np.int64)
    if threads <= 1 or (cost is not None and cost < _ALONE):
        kernel.launch(0, 1, shared, 1, tasks, *args)
    else:
        pieces = min(tasks, threads * TASKS)
        if fork := openmp.fork():
            # always the whole team: libgomp ends the threads that a smaller one does not use
            kernel.launch(fork, torch.get_num_threads(), shared, pieces, tasks, *args)
        else:
            _on_own_threads(kernel, threads, shared, pieces, tasks, *args)
    if shared[FAILED]:
        raise RuntimeError(f"the kernel {kernel.name} failed")


def _on_own_threads(kernel: Kernel, threads: int, *args: Any) -> None:
    others = [_pool(threads - 1).submit(kernel.launch, 0, 1, *args) for _ in range(threads - 1)]
    try:
        kernel.launch(0, 1, *args)
    finally:
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()
