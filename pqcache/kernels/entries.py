"""Entries of several tensors at once: the one to drop is found, and overwritten with the last."""

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch

from pqcache.kernels.numeric import at

_MOST = np.int32(np.iinfo(np.int32).max)


@numba.njit(nogil=True)
def _lightest(position, weight, first, end):
    """The entry of least weight with a position in first .. end-1, among equals the latest; 0 if none is.

    Two loops that become vectors, and a short search, instead of one loop that remembers where it found the least.
    """
    least, latest, i = _MOST, np.int32(-1), 0
    for j in range(position.shape[0]):
        inside = (position[j] >= first) & (position[j] < end)
        least = min(least, weight[j] if inside else _MOST)
    for j in range(position.shape[0]):
        inside = (position[j] >= first) & (position[j] < end) & (weight[j] == least)
        latest = max(latest, position[j] if inside else np.int32(-1))
    while latest >= 0 and position[i] != latest:
        i += 1
    return i


@numba.njit(nogil=True)
def _copy(places, row, head, source, to):
    """Entry `to` of a row and head becomes what entry `source` is, in every tensor of `places`; see `_places`."""
    for number in range(places.shape[0]):
        address, row_step, head_step, step, words = places[number]
        base = address + row * row_step + head * head_step
        old, new = at(base + source * step, words, np.int32(0)), at(base + to * step, words, np.int32(0))
        for i in range(words):
            new[i] = old[i]


@numba.njit(nogil=True, cache=True)
def _replace(places, slots, last):
    for row in range(slots.shape[0]):
        if last[row] >= 0:
            for head in range(slots.shape[1]):
                _copy(places, row, head, last[row], slots[row, head])


@numba.njit(nogil=True, cache=True)
def _drop_lightest(places, positions, weights, first, ends, last):
    """positions and weights are int32."""
    for row in range(positions.shape[0]):
        if last[row] >= 0:
            for head in range(positions.shape[1]):
                position, weight = positions[row, head, : last[row] + 1], weights[row, head, : last[row] + 1]
                slot = _lightest(position, weight, np.int32(first[row]), np.int32(ends[row]))
                _copy(places, row, head, last[row], slot)


def _places(tensors: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    """Of each: address, bytes from row to row, head to head and entry to entry, words of 4 bytes in an entry, int64."""
    table = []
    for data in tensors:
        size, (row, head, entry, *_) = data.element_size(), data.stride()
        table.append((data.data_ptr(), size * row, size * head, size * entry, math.prod(data.shape[3:]) * size // 4))
    return np.array(table, np.int64)


def replace(tensors: Sequence[torch.Tensor], slots: torch.Tensor, last: Sequence[int]) -> None:
    """Entry slots[r, h] of each tensor (n, heads, capacity, *rest) becomes what its row's entry last[r] is, if that is >= 0.

    slots (n, heads) int64; an entry is in one piece, and whole words of 4 bytes. torch's indexing takes four times as long.
    """
    _replace(_places(tensors), slots.numpy(), np.array(last, np.int64))


def drop_lightest(
    tensors: Sequence[torch.Tensor],
    positions: torch.Tensor,
    weights: torch.Tensor,
    first: Sequence[int],
    ends: Sequence[int],
    last: Sequence[int],
) -> None:
    """As `replace`, of the entry of least weight with a position in first[r] .. ends[r]-1; among equals of the latest.

    positions (n, heads, capacity) int32 and weights (n, heads, capacity) fp32, none below 0, of entries 0 .. last[r]; entry 0
    is dropped where no position is in the range.
    """
    begin, end, newest = np.array((first, ends, last), np.int64)
    # numbers from 0 on have the order of their bits; loops over ints become vectors
    _drop_lightest(_places(tensors), positions.numpy(), weights.numpy().view(np.int32), begin, end, newest)
