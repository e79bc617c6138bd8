"""Softmax of rows in place, times a power of two that keeps small probabilities normal numbers."""

from __future__ import annotations

import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.registers import LANES, SCALE, exp_scaled, floats_at, largest

FACTOR = 2.0**-SCALE  # times a result: probabilities
_NUMBERS_PER_NS = 2  # of one thread


@threads.kernel()
def _softmax(first, last, address, m):
    """Rows first .. last-1 of m floats each, from an address on. The end of a row is no whole vector: it is copied."""
    whole = m // LANES * LANES
    end = np.empty(LANES, np.float32)
    for i in range(first, last):
        at = address + 4 * m * i
        row = floats_at(at, (m,))
        end[:] = -np.inf
        for j in range(whole, m):
            end[j - whole] = row[j]
        top = largest(end.ctypes.data, LANES)
        if whole:
            top = max(top, largest(at, whole))
        total = exp_scaled(end.ctypes.data, LANES, top)
        if whole:
            total += exp_scaled(at, whole, top)
        for j in range(whole, m):
            row[j] = end[j - whole]
        share = np.float32(1 / FACTOR) / total
        for j in range(m):
            row[j] *= share


def scaled_softmax_(logits: torch.Tensor) -> None:
    """logits (..., m) fp32, in one piece, become their softmax over m divided by FACTOR. NaN spreads over its row."""
    m = logits.shape[-1]
    rows = logits.numel() // m
    threads.run(_softmax, rows, logits.data_ptr(), m, cost=logits.numel() / _NUMBERS_PER_NS)
