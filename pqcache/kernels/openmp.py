"""Torch's own OpenMP threads, to run compiled functions on.

After each of its parallel loops torch's threads wait for the next one for some milliseconds without giving up their cores. A pool
of other threads that starts in that time has to share these cores: on as many cores as threads, a kernel behind a projection
takes nearly twice as long. Torch's own threads are awake instead, and get the work at once.

Used where torch brings libgomp, as its wheels for Linux do.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

_state = {"forked": False}  # a forked child has none of its parent's threads, and libgomp does not know


def _leave() -> None:
    _state["forked"] = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)


@cache
def _parallel() -> int:
    """Address of libgomp's GOMP_parallel(function, data, threads, flags), which calls function(data) on each thread of a team.

    0 if torch uses another library.
    """
    if not hasattr(os, "RTLD_NOLOAD") or "backend: OpenMP" not in torch.__config__.parallel_info():
        return 0
    folder = Path(torch.__file__).parent
    for path in sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]):
        try:
            call = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD).GOMP_parallel  # no second copy, which had other threads
        except (OSError, AttributeError):
            continue
        return ctypes.cast(call, ctypes.c_void_p).value or 0
    return 0


def fork() -> int:
    """The address of GOMP_parallel; 0 if torch brings no libgomp, or this process was forked from one that may have used it."""
    return 0 if _state["forked"] else _parallel()
