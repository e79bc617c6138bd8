"""Run a compiled kernel over a range of tasks on as many threads as torch uses.

Torch's threads where they can be had (openmp.py), else own ones. Not numba's: its OpenMP layer aborts a process that forks later
(data loaders do), its other built-in layer one that calls kernels from two threads. The kernels release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from pqcache.kernels import openmp

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}  # (process, threads): a forked child starts its own
_lock = threading.Lock()
TASKS = (
    8  # per thread, at least, where a kernel can divide its work: a thread that begins late leaves some to the others
)
BYTES_PER_NS = 10  # that one thread reads of K and V, for `cost`
_ALONE = 200_000  # nanoseconds of work that other threads do not speed up: they take 50 to 100 us to begin


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="pqcache-kernel")
        return _pools[key]


def run(kernel: Callable[..., None], tasks: int, *args: Any, cost: float | None = None) -> None:
    """Call kernel(first, last, *args) on disjoint ranges that cover 0 .. tasks-1. Tasks write to places of their own.

    cost: the nanoseconds that one thread takes, roughly; the calling thread does little work alone. None: unknown.

    The calling thread works too. Of own threads it waits for none that has not begun when nothing is left: short kernels often
    end before another thread has woken up.
    """
    threads = min(torch.get_num_threads(), tasks)
    if threads <= 1 or (cost is not None and cost < _ALONE):
        kernel(0, tasks, *args)
        return
    pieces = min(tasks, threads * TASKS)
    edges = [tasks * i // pieces for i in range(pieces + 1)]
    left = iter(zip(edges, edges[1:], strict=False))  # shared: each piece goes to one thread

    def work() -> None:
        for first, last in left:
            kernel(first, last, *args)

    if openmp.usable():
        openmp.each_thread(work)
        return
    others = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()
