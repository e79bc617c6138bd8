"""What the C library does with memory that a benchmark has freed."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Let freed memory stay in this process; whether the C library (glibc) can.

    Else every large tensor is mapped anew at its first write, in a virtual machine at 50 to 100 ms per 32 MiB. That is noise
    which would be put down to methods that store more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(*pair) for pair in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1)))
