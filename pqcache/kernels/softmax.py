"""Softmax of rows in place, times a power of two that keeps small probabilities normal numbers."""

import numpy as np
import torch

from pqcache.kernels.launch import kernel, run
from pqcache.kernels.numeric import LEAST, SCALE, exponentials, floats, largest

FACTOR = 2.0**-SCALE  # times a result: probabilities
_NUMBERS_PER_NS = 2  # of one thread


@kernel
def _softmax(first, last, address, m):
    """Rows first .. last-1 of m floats each, from an address on."""
    for i in range(first, last):
        row = floats(address + 4 * m * i, m)
        share = np.float32(1 / FACTOR) / exponentials(row, largest(row), LEAST, SCALE)
        for j in range(m):
            row[j] *= share


def scaled_softmax_(logits: torch.Tensor) -> None:
    """logits (..., m) fp32, in one piece, become their softmax over m divided by FACTOR. NaN spreads over its row."""
    m = logits.shape[-1]
    run(_softmax, logits.numel() // m, logits.data_ptr(), m, cost=logits.numel() / _NUMBERS_PER_NS)
