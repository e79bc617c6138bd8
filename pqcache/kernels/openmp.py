"""Torch's own OpenMP threads, to run Python functions on that release the GIL.

After each of its parallel loops torch's threads wait for the next one for some milliseconds without giving up their cores. A pool
of other threads that starts in that time has to share these cores: on as many cores as threads, a kernel behind a projection
takes nearly twice as long. Torch's own threads are awake instead, and get the work at once.

Used where torch brings libgomp, as its wheels for Linux do.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_state = {"forked": False}  # a forked child has none of its parent's threads, and libgomp does not know


def _leave() -> None:
    _state["forked"] = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)


@cache
def _parallel() -> Any | None:
    """libgomp's function that calls another one on each thread of a team; None if torch uses another library."""
    if not hasattr(os, "RTLD_NOLOAD") or "backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    folder = Path(torch.__file__).parent
    for path in sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]):
        try:
            call = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD).GOMP_parallel  # no second copy, which had other threads
        except (OSError, AttributeError):
            continue
        call.argtypes, call.restype = [_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return call
    return None


def usable() -> bool:
    """Whether `each_thread` works here: torch brings libgomp, and this process was not forked from one that may have used it."""
    return not _state["forked"] and _parallel() is not None


def each_thread(work: Callable[[], None]) -> None:
    """Call `work` on every thread of torch's team, the calling thread among them, and wait for all. Raises the first error."""
    errors: list[BaseException] = []

    def guarded(_: Any) -> None:
        try:
            work()
        except BaseException as error:  # ctypes would print it and go on
            errors.append(error)

    call = _parallel()
    assert call is not None
    # always the whole team: libgomp ends the threads that a smaller one does not use
    call(_FUNCTION(guarded), None, torch.get_num_threads(), 0)
    if errors:
        raise errors[0]
