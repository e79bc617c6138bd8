"""Attention of one query token over chosen tokens, read where they are stored: nothing is gathered first."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels import threads

_TILE = 256  # tokens between two updates of the running maximum
_AHEAD = 8  # rows fetched before they are read: no processor predicts the address of the next chosen token
_LINE = 64  # bytes of a cache line


def _generate_fetch(typingctx: Any, address: Any, size: Any) -> Any:
    """Prefetch `size` bytes at the address into the caches, without waiting."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        last = builder.add(args[1], ir.Constant(ir.IntType(64), _LINE - 1))
        lines = builder.udiv(last, ir.Constant(ir.IntType(64), _LINE))
        with cgutils.for_range(builder, lines) as loop:
            at = builder.add(args[0], builder.mul(loop.index, ir.Constant(ir.IntType(64), _LINE)))
            read, near, data = (ir.Constant(word, value) for value in (0, 2, 1))  # into the second-level cache
            builder.call(prefetch, [builder.inttoptr(at, byte), read, near, data])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


_fetch: Any = intrinsic(_generate_fetch)


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


@numba.njit(nogil=True, inline="always", fastmath=_FAST)
def _softmax_tile(logits, count, high, mass, result):
    """Logits (g, TILE) become weights relative to the running maximum. If it grows, earlier sums are scaled down to it."""
    g, d = result.shape
    for a in range(g):
        top = high[a]
        for i in range(count):
            top = max(top, logits[a, i])
        if top > high[a]:
            shrink = np.exp(high[a] - top)
            mass[a] *= shrink
            for j in range(d):
                result[a, j] *= shrink
            high[a] = top
        added = np.float32(0)
        for i in range(count):
            logits[a, i] = np.exp(logits[a, i] - top)
            added += logits[a, i]
        mass[a] += added


@numba.njit(nogil=True, inline="always", fastmath=_FAST)
def _add_values(weights, positions, count, values, values_at, value_step, row_bytes, result):
    """result (g, d) += weights (g, TILE) times the rows of V at the tile's positions."""
    g, d = result.shape
    i = 0
    while i + 4 <= count:  # four rows of V per visit to the output
        w0, w1, w2, w3 = positions[i], positions[i + 1], positions[i + 2], positions[i + 3]
        for ahead in range(i + _AHEAD, min(i + _AHEAD + 4, count)):
            _fetch(values_at + positions[ahead] * value_step, row_bytes)
        for a in range(g):
            p0, p1, p2, p3 = weights[a, i], weights[a, i + 1], weights[a, i + 2], weights[a, i + 3]
            for j in range(d):
                result[a, j] += p0 * values[w0, j] + p1 * values[w1, j] + p2 * values[w2, j] + p3 * values[w3, j]
        i += 4
    while i < count:
        for a in range(g):
            for j in range(d):
                result[a, j] += weights[a, i] * values[positions[i], j]
        i += 1


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _attend(first, last, q, k, v, indices, sinks, local, length, scaling, parts, out, lse):
    """Task = (row, KV head, part); q (n, h_kv, g, d); k, v (n, h_kv, capacity, d); indices (n, H, chosen), -1 = nothing.

    Writes, per part, the unnormalised output and (maximum, sum): out (n, h_kv, parts, g, d), lse (n, h_kv, parts, 2, g).
    """
    heads, g, d = q.shape[1], q.shape[2], q.shape[3]
    total = sinks + indices.shape[2] + local
    key_step, value_step, row_bytes = k.strides[2], v.strides[2], d * 4
    for task in range(first, last):
        part = task % parts
        head = task // parts % heads
        row = task // parts // heads
        mine = indices[row, head if indices.shape[1] > 1 else 0]
        query, keys, values = q[row, head], k[row, head], v[row, head]
        keys_at, values_at = keys.ctypes.data, values.ctypes.data
        positions = np.empty(_TILE, np.int64)
        logits = np.empty((g, _TILE), np.float32)
        result = out[row, head, part]
        high, mass = lse[row, head, part, 0], lse[row, head, part, 1]
        high[:] = -np.inf
        start, end = total * part // parts, total * (part + 1) // parts
        while start < end:
            count, start = _fill_tile(positions, start, end, mine, sinks, local, length)
            for i in range(min(_AHEAD, count)):
                _fetch(keys_at + positions[i] * key_step, row_bytes)
            for i in range(count):
                position = positions[i]
                if i + _AHEAD < count:
                    _fetch(keys_at + positions[i + _AHEAD] * key_step, row_bytes)
                for a in range(g):
                    value = np.float32(0)
                    for j in range(d):
                        value += query[a, j] * keys[position, j]
                    logits[a, i] = value * scaling
            for i in range(min(_AHEAD, count)):  # these rows arrive while the exponentials are computed
                _fetch(values_at + positions[i] * value_step, row_bytes)
            _softmax_tile(logits, count, high, mass, result)
            _add_values(logits, positions, count, values, values_at, value_step, row_bytes, result)


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

    q (n, h, 1, d); k, v (n, h_kv, capacity, d) fp32; indices (n, 1 or h_kv, chosen) int64, -1 = nothing.
    """
    n, h, _, d = q.shape
    h_kv = k.shape[1]
    workers = torch.get_num_threads()
    parts = max(1, min(-(-2 * workers // (n * h_kv)), 8)) if workers > 1 else 1
    out = np.zeros((n, h_kv, parts, h // h_kv, d), np.float32)
    lse = np.zeros((n, h_kv, parts, 2, h // h_kv), np.float32)
    threads.run(
        _attend,
        n * h_kv * parts,
        q.reshape(n, h_kv, h // h_kv, d).numpy(),
        k.numpy(),
        v.numpy(),
        indices.numpy(),
        sinks,
        local,
        length,
        np.float32(scaling),
        parts,
        out,
        lse,
    )
    high, mass = torch.from_numpy(lse).unbind(3)  # (n, h_kv, parts, g)
    share = torch.exp(high - high.amax(2, keepdim=True))
    joined = (torch.from_numpy(out) * share[..., None]).sum(2) / (mass * share).sum(2)[..., None]
    return joined.reshape(n, 1, h, d)
