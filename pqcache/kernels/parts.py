"""The tokens of one KV head in parts, so that several threads work on it. The thread that ends a head's last part joins all."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.registers import increment
from pqcache.kernels.vectors import head_block


def count_parts(heads: int, most: int) -> int:
    """Into how many parts, at most `most`, each of this number of KV heads is divided: pieces enough for torch's threads."""
    workers = torch.get_num_threads()
    return max(1, min(-(-threads.TASKS * workers // heads), most)) if workers > 1 else 1


def scratch(n: int, h_kv: int, parts: int, g: int, d: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Zeros: unnormalised outputs (n, h_kv, parts, g', d), (maximum, sum) (n, h_kv, parts, 2, g'), parts done (n, h_kv)."""
    padded = head_block(g)[1]
    outs, lse = (n, h_kv, parts, padded, d), (n, h_kv, parts, 2, padded)
    return np.zeros(outs, np.float32), np.zeros(lse, np.float32), np.zeros((n, h_kv), np.int64)


@numba.njit(nogil=True, inline="always")
def read_query(q, scaling, query):
    """query (g', d) = scaling * q (g, d). Further heads stay as they are."""
    for a in range(q.shape[0]):
        mine, to = q[a], query[a]
        for j in range(mine.shape[0]):
            to[j] = mine[j] * scaling


@numba.njit(nogil=True, inline="always")
def is_last(done, row, head, parts):
    """Note that a part has ended. Whether it was the head's last; what others wrote can then be read."""
    return increment(done.ctypes.data + 8 * (row * done.shape[1] + head)) + 1 == parts


@numba.njit(nogil=True, inline="always")
def join(outs, lse, result):
    """The softmax over all parts of a head: outs (parts, g', d), lse (parts, 2, g') -> result (g, d).

    NaN where no part has tokens. lse of the first part becomes the (maximum, sum) over all.
    """
    for a in range(result.shape[0]):
        line = result[a]
        line[:] = 0
        high, mass = lse[0, 0, a], np.float32(0)
        for p in range(1, outs.shape[0]):
            high = max(high, lse[p, 0, a])
        for p in range(outs.shape[0]):
            share, mine = np.exp(lse[p, 0, a] - high), outs[p, a]
            mass += share * lse[p, 1, a]
            for j in range(line.shape[0]):
                line[j] += share * mine[j]
        lse[0, 0, a], lse[0, 1, a] = high, mass
        share = np.float32(1) / mass if mass > 0 else np.float32(np.nan)
        for j in range(line.shape[0]):
            line[j] *= share
