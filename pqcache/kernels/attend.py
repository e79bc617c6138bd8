"""Attention of one query token over chosen tokens, read where they are stored: nothing is gathered first.

Where every query head chooses its own tokens, the rows that any head of a group chose are read once, in the order of their
positions, with a bit per head that says which heads attend them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.parts import count_parts, is_last, join, read_query, scratch
from pqcache.kernels.registers import LANES, exp_below, largest
from pqcache.kernels.vectors import (
    FP32,
    ROWS,
    add,
    dot,
    fetch,
    head_block,
)

_TILE = 1024  # tokens between two updates of the running maximum: the first rows of a tile are not there yet
_AHEAD = 16  # rows fetched before they are read: no processor predicts the address of the next chosen token
_MOST_PARTS = 8  # of a KV head
_MOST_HEADS = 64  # query heads of a group that have a bit each

_FAST = {"reassoc", "contract", "arcp", "nsz"}  # additions in any order; NaN and infinity stay what they are


@numba.njit(nogil=True, inline="always")
def _fill_tile(positions, start, end, mine, sinks, local, length):
    """Write to `positions` those of the next entries of [sinks | chosen | local], from `start` on, that fit into a tile.

    Returns how many were written, and the entry to go on with.
    """
    chosen = mine.shape[0]
    count = 0
    while count < _TILE and start < end:
        if start < sinks:
            position = start
        elif start < sinks + chosen:
            position = mine[start - sinks]
        else:
            position = length - local + (start - sinks - chosen)
        if position >= 0:
            positions[count] = position
            count += 1
        start += 1
    return count, start


@numba.njit(nogil=True, inline="always")
def _fill_marked(positions, start, end, marks):
    """The same of the positions start .. end-1 that any head has marked."""
    count = 0
    while count < _TILE and start < end:
        positions[count] = start
        count += marks[start] != 0
        start += 1
    return count, start


@numba.njit(nogil=True, inline="always")
def _row_addresses(positions, count, base, step, rows):
    """Addresses of the tile's rows. The last one is repeated up to a whole number of vectors."""
    for i in range(count):
        rows[i] = base + positions[i] * step
    for i in range(count, (count + LANES - 1) // LANES * LANES):
        rows[i] = rows[count - 1]


@numba.njit(nogil=True, inline="always")
def _logits_tile(query, rows, count, block, logits, row_bytes):
    """logits (g', TILE) of queries (g', d), g' a multiple of `block`, with the rows."""
    heads, d = query.shape
    query_at, query_step = query.ctypes.data, query.strides[0]
    out_at, out_step = logits.ctypes.data, logits.strides[0]
    rows_at, tokens = rows.ctypes.data, LANES // block
    for i in range(min(_AHEAD, count)):
        fetch(rows[i], row_bytes)
    for i in range(0, count, tokens):
        for ahead in range(i + _AHEAD, min(i + _AHEAD + tokens, count)):
            fetch(rows[ahead], row_bytes)
        for a in range(0, heads, block):
            mine, to = query_at + a * query_step, out_at + a * out_step + 4 * i
            dot(block, FP32, rows_at + 8 * i, mine, query_step, d, to, out_step)


@numba.njit(nogil=True, inline="always")
def _values_tile(logits, rows, count, block, result, row_bytes):
    """result (g', d) += weights (g', TILE) times the rows; a weight past the last row is 0."""
    heads, d = result.shape
    weights_at, weight_step = logits.ctypes.data, logits.strides[0]
    out_at, out_step, rows_at = result.ctypes.data, result.strides[0], rows.ctypes.data
    for i in range(0, count, ROWS):
        for ahead in range(i + _AHEAD, min(i + _AHEAD + ROWS, count)):
            fetch(rows[ahead], row_bytes)
        for a in range(0, heads, block):
            mine, to = weights_at + a * weight_step + 4 * i, out_at + a * out_step
            add(block, FP32, rows_at + 8 * i, mine, weight_step, d, to, out_step)


@numba.njit(nogil=True, inline="always", fastmath=_FAST)
def _softmax_tile(logits, count, g, high, mass, result):
    """Logits (g', TILE) become weights relative to the running maximum. If it grows, earlier sums are scaled down to it."""
    d = result.shape[1]
    whole = (count + LANES - 1) // LANES * LANES
    for a in range(g):
        line = logits[a]
        line[count:whole] = -np.inf
        top = max(high[a], largest(line.ctypes.data, whole))
        if top == -np.inf:  # no token of this tile is this head's
            line[:whole] = 0
            continue
        if top > high[a]:
            shrink = np.exp(high[a] - top)
            mass[a] *= shrink
            for j in range(d):
                result[a, j] *= shrink
            high[a] = top
        mass[a] += exp_below(line.ctypes.data, whole, top)


@numba.njit(nogil=True, inline="always", fastmath=_FAST)
def _add_tile(positions, count, marks, shared, query, keys, values, g, block, scratch, high, mass, result):
    """Attend to the rows at the tile's positions. shared: every head attends all of them, else those with its bit in `marks`."""
    rows, logits = scratch
    d = query.shape[1]
    row_bytes, vectors = 4 * d, d >= LANES
    _row_addresses(positions, count, keys.ctypes.data, keys.strides[0], rows)
    if vectors:
        _logits_tile(query, rows, count, block, logits, row_bytes)
    else:
        for a in range(g):
            for i in range(count):
                logits[a, i] = 0
                for j in range(d):
                    logits[a, i] += query[a, j] * keys[positions[i], j]
    if not shared:
        for a in range(g):
            bit = np.uint64(1) << np.uint64(a)
            for i in range(count):
                if np.uint64(marks[positions[i]]) & bit == 0:
                    logits[a, i] = -np.inf
    _row_addresses(positions, count, values.ctypes.data, values.strides[0], rows)
    for i in range(min(_AHEAD, count)):  # these rows arrive while the exponentials are computed
        fetch(rows[i], row_bytes)
    _softmax_tile(logits, count, g, high, mass, result)
    if vectors:
        _values_tile(logits, rows, count, block, result, row_bytes)
    else:
        for a in range(g):
            for i in range(count):
                for j in range(d):
                    result[a, j] += logits[a, i] * values[positions[i], j]


@threads.kernel(fastmath=_FAST)
def _attend(first, last, q, scaling, k, v, indices, marks, span, block, outs, lse, done, result):
    """Task = (row, KV head, part); q (n, h_kv, g, d); k, v (n, h_kv, capacity, d). span: sinks, local, length.

    indices (n, H, chosen), -1 = nothing: what every head attends beside sinks and window. If it has no rows, marks (n, h_kv,
    length) have a bit per query head. outs, lse, done: see parts.scratch. Writes result (n, h_kv, g, d).
    """
    _, heads, parts, padded, d = outs.shape
    g = q.shape[2]
    sinks, local, length = span
    shared = indices.shape[0] > 0
    total = sinks + indices.shape[2] + local if shared else length
    positions, query = np.empty(_TILE, np.int64), np.zeros((padded, d), np.float32)
    tile = np.empty(_TILE, np.int64), np.zeros((padded, _TILE), np.float32)
    for task in range(first, last):
        part, head, row = task % parts, task // parts % heads, task // parts // heads
        out, high, mass = outs[row, head, part], lse[row, head, part, 0], lse[row, head, part, 1]
        high[:] = -np.inf
        read_query(q[row, head], scaling, query)
        start, end = total * part // parts, total * (part + 1) // parts
        while start < end:
            if shared:
                mine = indices[row, head if indices.shape[1] > 1 else 0]
                count, start = _fill_tile(positions, start, end, mine, sinks, local, length)
                marked = marks[0, 0]
            else:
                marked = marks[row, head]
                count, start = _fill_marked(positions, start, end, marked)
            if count:
                _add_tile(
                    positions, count, marked, shared, query, k[row, head], v[row, head], g, block, tile, high, mass, out
                )
        if is_last(done, row, head, parts):
            join(outs[row, head], lse[row, head], result[row, head])


@threads.kernel()
def _mark(first, last, indices, sinks, local, length, marks):
    """Task = (row, KV head). marks (n, h_kv, length): bit a where query head a of the group attends; indices (n, h, chosen)."""
    heads = marks.shape[1]
    g = indices.shape[1] // heads
    for task in range(first, last):
        row, head = task // heads, task % heads
        mine = marks[row, head]
        for a in range(g):
            bit = marks.dtype.type(np.uint64(1) << np.uint64(a))
            chosen = indices[row, head * g + a]
            for i in range(chosen.shape[0]):
                if chosen[i] >= 0:
                    mine[chosen[i]] |= bit
            for i in range(sinks):
                mine[i] |= bit
            for i in range(length - local, length):
                mine[i] |= bit


def _marks(indices: torch.Tensor, h_kv: int, sinks: int, local: int, length: int) -> np.ndarray[Any, Any]:
    """Which query heads of a group attend each position: (n, h_kv, length), bit a for head a."""
    n, h, _ = indices.shape
    kind = np.uint8 if h // h_kv <= 8 else np.uint64
    marks = np.zeros((n, h_kv, length), kind)
    threads.run(_mark, n * h_kv, indices.contiguous().numpy(), sinks, local, length, marks, cost=indices.numel())
    return marks


def serves(h: int, h_kv: int, heads: int) -> bool:
    """Whether `attend_chosen` serves h query heads over h_kv KV heads with `heads` choices."""
    return heads in (1, h_kv) or (heads == h and h // h_kv <= _MOST_HEADS)


def attend_chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sinks: int,
    local: int,
    length: int,
    scaling: float,
) -> torch.Tensor:
    """Attention over [first `sinks` | `indices` | last `local` of `length`] tokens: (n, 1, h, d).

    q (n, h, 1, d); k, v (n, h_kv, capacity, d) fp32; indices (n, 1, h_kv or h, chosen) int64, -1 = nothing.
    """
    n, h, _, d = q.shape
    h_kv = k.shape[1]
    g = h // h_kv
    chosen = indices.contiguous().numpy()
    if indices.shape[1] in (1, h_kv):
        marks = np.zeros((1, 1, 1), np.uint8)
    else:
        marks, chosen = _marks(indices, h_kv, sinks, local, length), chosen[:0]
    rows = sinks + local + indices.shape[2] * max(1, indices.shape[1] // h_kv)  # scattered ones: half the rate
    parts = count_parts(n * h_kv, _MOST_PARTS)
    result = np.empty((n, h_kv, g, d), np.float32)
    threads.run(
        _attend, n * h_kv * parts, q.reshape(result.shape).numpy(), np.float32(scaling), k.numpy(), v.numpy(), chosen, marks,
        (sinks, local, length), head_block(g)[0], *scratch(n, h_kv, parts, g, d), result,
        cost=n * h_kv * rows * 16 * d / threads.BYTES_PER_NS,
    )  # fmt: skip
    return torch.from_numpy(result).view(n, 1, h, d)
