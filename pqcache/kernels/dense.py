"""Attention of one query token per head over all tokens: K and V are read once for all query heads of a KV head.

A task is a part of the tokens of one KV head. It goes over them in tiles: logits, running maximum and exponentials, weighted
values. Rows of 16 bits are widened in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.parts import count_parts, is_last, join, read_query, scratch
from pqcache.kernels.registers import LANES, exp_below, largest
from pqcache.kernels.vectors import (
    KINDS,
    ROWS,
    add,
    dot,
    fetch,
    head_block,
)

_TILE = 256  # tokens between two updates of the running maximum; a multiple of LANES and ROWS
_AHEAD = 8192  # bytes that are fetched before they are read
_PART = 1024  # tokens of a part at least
_WIDEST = 16  # LANES at most, and entries of a head at least


@numba.njit(nogil=True, inline="always")
def _row_addresses(rows, at, step, count):
    """Addresses of `count` rows, `step` bytes apart, from `at` on. The last one is repeated up to a whole number of vectors."""
    for i in range((count + LANES - 1) // LANES * LANES):
        rows[i] = at + min(i, count - 1) * step


@numba.njit(nogil=True, inline="always")
def _tile_logits(kind, query, rows, count, block, size, logits):
    """logits (g', TILE) of queries (g', d), g' a multiple of `block`, with rows of `size` bytes."""
    heads, d = query.shape
    query_at, out_at, rows_at, tokens = query.ctypes.data, logits.ctypes.data, rows.ctypes.data, LANES // block
    for i in range(0, count, tokens):
        fetch(rows[i] + _AHEAD, tokens * size)  # rows are side by side
        for a in range(0, heads, block):
            mine, to = query_at + 4 * a * d, out_at + 4 * (a * _TILE + i)
            dot(block, kind, rows_at + 8 * i, mine, 4 * d, d, to, 4 * _TILE)


@numba.njit(nogil=True, inline="always")
def _tile_values(kind, weights, rows, count, block, size, result):
    """result (g', d) += weights (g', TILE) times rows of `size` bytes; a weight past the last row is 0."""
    heads, d = result.shape
    weights_at, out_at, rows_at = weights.ctypes.data, result.ctypes.data, rows.ctypes.data
    for i in range(0, count, ROWS):
        fetch(rows[i] + _AHEAD, ROWS * size)
        for a in range(0, heads, block):
            mine, to = weights_at + 4 * (a * _TILE + i), out_at + 4 * a * d
            add(block, kind, rows_at + 8 * i, mine, 4 * _TILE, d, to, 4 * d)


@numba.njit(nogil=True, inline="always")
def _raise_maximum(logits, a, count, high, mass, result):
    """Before a tile's logits of head a become weights: if the running maximum grows, earlier sums are scaled down to it.

    Logits after `count` become -inf, up to a whole number of vectors. Returns the first one's address, that number, the maximum.
    """
    whole = (count + LANES - 1) // LANES * LANES
    logits[a, count:whole] = -np.inf
    row = logits.ctypes.data + 4 * a * _TILE
    top = max(high[a], largest(row, whole))
    if top > high[a]:
        shrink = np.exp(high[a] - top)
        mass[a] *= shrink
        for j in range(result.shape[1]):
            result[a, j] *= shrink
        high[a] = top
    return row, whole, top


@numba.njit(nogil=True, inline="always")
def _tile_softmax(logits, count, g, high, mass, result):
    """Logits (g', TILE) become weights relative to the running maximum."""
    for a in range(g):
        row, whole, top = _raise_maximum(logits, a, count, high, mass, result)
        mass[a] += exp_below(row, whole, top)


@threads.kernel()
def _attend(first, last, kind, q, scaling, k, v, k_steps, v_steps, lengths, block, size, outs, lse, done, result):
    """Task = (row, KV head, part). k, v: addresses; steps: bytes between (rows, KV heads, tokens); size: bytes of a row.

    q (n, h_kv, g, d) fp32; outs, lse, done: see parts.scratch. Writes result (n, h_kv, g, d).
    """
    _, heads, parts, padded, d = outs.shape
    query, logits, rows = (
        np.zeros((padded, d), np.float32),
        np.zeros((padded, _TILE), np.float32),
        np.empty(_TILE, np.int64),
    )
    for task in range(first, last):
        part, head, row = task % parts, task // parts % heads, task // parts // heads
        start, end = lengths[row] * part // parts, lengths[row] * (part + 1) // parts
        keys = k + row * k_steps[0] + head * k_steps[1]
        values = v + row * v_steps[0] + head * v_steps[1]
        out, high, mass = outs[row, head, part], lse[row, head, part, 0], lse[row, head, part, 1]
        high[:] = -np.inf
        read_query(q[row, head], scaling, query)
        while start < end:
            count = min(_TILE, end - start)
            _row_addresses(rows, keys + start * k_steps[2], k_steps[2], count)
            _tile_logits(kind, query, rows, count, block, size, logits)
            _row_addresses(rows, values + start * v_steps[2], v_steps[2], count)
            _tile_softmax(logits, count, q.shape[2], high, mass, out)
            _tile_values(kind, logits, rows, count, block, size, out)
            start += count
        if is_last(done, row, head, parts):
            join(outs[row, head], lse[row, head], result[row, head])


def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `attend_all` takes these: one dtype of KINDS, heads of at least 16 entries, rows in one piece."""
    d, same = q.shape[3], q.dtype == k.dtype == v.dtype and q.dtype in KINDS
    return same and d == v.shape[3] and d >= _WIDEST and k.stride(3) == v.stride(3) == 1


def attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scaling: float
) -> torch.Tensor:
    """Attention of row r's query over the first lengths[r] >= 1 tokens: (n, 1, h, d), of q's dtype.

    q (n, h, 1, d); k, v (n, h_kv, >= max(lengths), d), all three fp32, bfloat16 or fp16; see `serves`. Sums are in fp32.
    """
    n, h, _, d = q.shape
    h_kv, size = k.shape[1], k.element_size()
    g = h // h_kv
    parts = count_parts(n * h_kv, max(lengths) // _PART)
    result = np.empty((n, h_kv, g, d), np.float32)
    threads.run(
        _attend, n * h_kv * parts, KINDS[k.dtype], q.reshape(result.shape).float().numpy(), np.float32(scaling),
        k.data_ptr(), v.data_ptr(),
        tuple(size * step for step in k.stride()[:3]), tuple(size * step for step in v.stride()[:3]),
        np.array(lengths, np.int64), head_block(g)[0], size * d, *scratch(n, h_kv, parts, g, d), result,
        cost=sum(lengths) * h_kv * 2 * size * d / threads.BYTES_PER_NS,
    )  # fmt: skip
    return torch.from_numpy(result).view(n, 1, h, d).to(q.dtype)
