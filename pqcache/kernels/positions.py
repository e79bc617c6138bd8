"""Lists of chosen positions: of whole clusters, in ascending order, how many a group's heads chose; the entry to drop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.registers import ints_at


@threads.kernel()
def _clusters(first, last, rank, starts, sizes, order, k, out):
    """Task = (row, head of the choice); rank (n, H, C), starts, sizes (n, h_kv, C), order (n, h_kv, tokens)."""
    heads, shared = rank.shape[1], rank.shape[1] // starts.shape[1]
    for task in range(first, last):
        row, head = task // heads, task % heads
        owner, mine = head // shared, out[row, head]
        filled, i = 0, 0
        while filled < k[row] and i < rank.shape[2]:
            cluster = rank[row, head, i]
            start = starts[row, owner, cluster]
            for j in range(start, start + min(sizes[row, owner, cluster], k[row] - filled)):
                mine[filled] = order[row, owner, j]
                filled += 1
            i += 1


def cluster_tokens(
    rank: torch.Tensor, starts: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor, k: Sequence[int]
) -> torch.Tensor:
    """The first k[r] tokens of row r's clusters in the order of rank, the last cluster cut: (n, H, max(k)) int64, -1 = padding.

    rank (n, H, C) int64: clusters in descending rank; starts, sizes (n, h_kv, C) int64: where each cluster begins in `order`
    (n, h_kv, tokens) int32, and how many tokens it has. H is h_kv or h.
    """
    n, heads, _ = rank.shape
    out = np.full((n, heads, max(k)), -1, np.int64)
    lists = (x.contiguous().numpy() for x in (rank, starts, sizes, order))
    threads.run(_clusters, n * heads, *lists, np.asarray(k, np.int64), out, cost=out.size)
    return torch.from_numpy(out)


@threads.kernel()
def _ascend(first, last, positions, length, out):
    """Task = (row, head); positions and out (n, H, m)."""
    heads, m = positions.shape[1], positions.shape[2]
    marks = np.zeros(length, np.uint8)
    for task in range(first, last):
        given, mine = positions[task // heads, task % heads], out[task // heads, task % heads]
        count = 0
        for i in range(m):
            if given[i] >= 0:
                marks[given[i]] = 1
                count += 1
        filled, i = 0, 0
        while filled < count:
            mine[filled] = i
            filled += marks[i]
            marks[i] = 0
            i += 1


def ascending(positions: torch.Tensor, length: int) -> torch.Tensor:
    """positions (n, H, m) int64 below `length` in ascending order, padding (-1) at the end; none comes twice in a head."""
    out = np.full(positions.shape, -1, np.int64)
    rows = positions.shape[0] * positions.shape[1]
    cost = rows * (length + positions.shape[2])
    threads.run(_ascend, rows, positions.contiguous().numpy(), length, out, cost=cost)
    return torch.from_numpy(out)


@threads.kernel()
def _count(first, last, indices, length, counts):
    """Task = (row, KV head); indices (n, h, k), counts (n, h_kv)."""
    heads = counts.shape[1]
    g = indices.shape[1] // heads
    for task in range(first, last):
        row, head = task // heads, task % heads
        marks = np.zeros(length + 1, np.uint8)  # padding, -1, marks entry 0
        for a in range(g):
            chosen = indices[row, head * g + a]
            for i in range(chosen.shape[0]):
                marks[chosen[i] + 1] = 1
        total = 0
        for i in range(1, length + 1):
            total += marks[i]
        counts[row, head] = total


def count_distinct(indices: torch.Tensor, h_kv: int, length: int) -> torch.Tensor:
    """How many positions below `length` the query heads of a group chose together: indices (n, h, k) int64 -> (n, h_kv) int64."""
    counts = np.zeros((indices.shape[0], h_kv), np.int64)
    threads.run(
        _count, counts.size, indices.contiguous().numpy(), length, counts, cost=indices.numel() + counts.size * length
    )
    return torch.from_numpy(counts)


@numba.njit(nogil=True)
def _least(position, weight, first, end):
    """The least weight of an entry with a position in first .. end-1."""
    least = np.int32(np.iinfo(np.int32).max)
    for i in range(position.shape[0]):
        inside = (position[i] >= first) & (position[i] < end)
        here = weight[i] if inside else np.int32(np.iinfo(np.int32).max)
        least = here if here < least else least
    return least


@numba.njit(nogil=True)
def _latest(position, weight, first, end, least):
    """The latest position in first .. end-1 whose entry has the least weight, -1 if none is there."""
    latest = np.int32(-1)
    for i in range(position.shape[0]):
        inside = (position[i] >= first) & (position[i] < end) & (weight[i] == least)
        here = position[i] if inside else np.int32(-1)
        latest = here if here > latest else latest
    return latest


@numba.njit(nogil=True, cache=True)
def _lightest(positions, weights, first, ends, lengths, out):
    """Candidates of row r are entries below lengths[r] with a position in first[r] .. ends[r]-1; all arrays int32.

    Two loops that become vectors, and a short search, instead of one loop that remembers where it found the least.
    """
    for row in range(out.shape[0]):
        begin, end, length = np.int32(first[row]), np.int32(ends[row]), lengths[row]
        for head in range(out.shape[1]):
            position, weight = positions[row, head, :length], weights[row, head, :length]
            latest = _latest(position, weight, begin, end, _least(position, weight, begin, end))
            if latest >= 0:
                i = 0
                while position[i] != latest:
                    i += 1
                out[row, head] = i


def lightest(
    positions: torch.Tensor, weights: torch.Tensor, first: Sequence[int], ends: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """The entry of least weight with a position in first[r] .. ends[r]-1, among equals the latest: (n, H) int64, 0 if none is.

    positions (n, H, >= m) int32 and weights (n, H, >= m) fp32, none below 0, of a store's entries, lengths[r] <= m of row r.
    Give whole buffers: rows in one piece let the loops become vectors.
    """
    out = np.zeros(positions.shape[:2], np.int64)
    begin, end, count = (np.asarray(x, np.int64) for x in (first, ends, lengths))
    # numbers from 0 on have the order of their bits; loops over ints become vectors
    _lightest(positions.numpy(), weights.numpy().view(np.int32), begin, end, count, out)
    return torch.from_numpy(out)


@numba.njit(nogil=True, cache=True)
def _replace(tensors, slots, last):
    """tensors (count, 5): address, bytes from row to row, head to head and entry to entry, words of 4 bytes in an entry."""
    for number in range(tensors.shape[0]):
        address, row_step, head_step, step, words = tensors[number]
        for row in range(slots.shape[0]):
            for head in range(slots.shape[1] if last[row] >= 0 else 0):
                base = address + row * row_step + head * head_step
                source, to = (
                    ints_at(base + last[row] * step, (words,)),
                    ints_at(base + slots[row, head] * step, (words,)),
                )
                for i in range(words):
                    to[i] = source[i]


def replace(tensors: Sequence[torch.Tensor], slots: torch.Tensor, last: Sequence[int]) -> None:
    """Entry slots[r, h] of each tensor (n, heads, capacity, *rest) becomes what its row's entry last[r] is, if that is >= 0.

    slots (n, heads) int64; an entry is in one piece, and whole words of 4 bytes. torch's indexing takes four times as long.
    """
    table = []
    for data in tensors:
        size = data.element_size()
        table.append((data.data_ptr(), *(size * s for s in data.stride()[:3]), math.prod(data.shape[3:]) * size // 4))
    _replace(np.array(table, np.int64), slots.numpy(), np.array(last, np.int64))
