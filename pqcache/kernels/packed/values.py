"""Weights of a tile, and packed values added up under them, with their outliers and their low-rank part."""

from __future__ import annotations

import numba
import numpy as np

from pqcache.kernels.packed import registers
from pqcache.kernels.packed.memory import FAST, LINE, TILE, code_at, position_at, prepare_tile, read_factors
from pqcache.kernels.packed.registers import LANES
from pqcache.kernels.packed.tiles import HEADS, accumulate, accumulate_grouped


@numba.njit(nogil=True, fastmath=FAST)
def _shrink(v, d, a, factor, sums):
    """Scale what head a has added up."""
    wide = max(1, v.planes) * v.width
    codes, dense = registers.floats_at(sums.codes, (HEADS, wide)), registers.floats_at(sums.dense, (HEADS, d))
    sparse = registers.floats_at(sums.sparse, (d, HEADS))
    lows, mass = registers.floats_at(sums.lows, (HEADS,)), registers.floats_at(sums.mass, (HEADS,))
    low_rank = registers.floats_at(sums.low_rank, (max(1, v.rank), HEADS))
    lows[a] *= factor
    mass[a] *= factor
    for j in range(wide):
        codes[a, j] *= factor
    for j in range(d):
        dense[a, j] *= factor
        sparse[j, a] *= factor
    for r in range(v.rank):
        low_rank[r, a] *= factor


@numba.njit(nogil=True, fastmath=FAST)
def softmax(v, count, d, sums, scratch):
    """Logits become weights relative to the running maximum. If it grows, earlier sums are scaled down to it."""
    blocks = -(-count // LANES)
    logits = registers.floats_at(scratch.logits, (HEADS, LINE))
    high, mass = registers.floats_at(sums.high, (HEADS,)), registers.floats_at(sums.mass, (HEADS,))
    for a in range(HEADS):
        at = scratch.logits + 4 * a * LINE
        for i in range(count, blocks * LANES):
            logits[a, i] = -np.inf
        top = registers.peak(at, blocks)
        if top > high[a]:
            _shrink(v, d, a, np.exp(high[a] - top), sums)
            high[a] = top
        mass[a] += registers.weights(at, blocks, high[a])


@numba.njit(nogil=True, fastmath=FAST)
def add_codes(v, row, head, start, count, d, sums, scratch):
    """Add the tile's weighted values: codes, steps and lows, and outliers."""
    logits = registers.floats_at(scratch.logits, (HEADS, LINE))
    steps, lows = registers.floats_at(scratch.steps, (TILE,)), registers.floats_at(scratch.lows, (TILE,))
    weighted = registers.floats_at(sums.lows, (HEADS,))
    codes, stride = prepare_tile(v, row, head, start, count, d, scratch)
    if v.outliers:
        _add_outliers(v, row, head, start, count, d, sums, scratch)
    if v.groups == 1:  # the weights are not needed any more
        for a in range(HEADS):
            added = np.float32(0)
            for i in range(count):
                added += logits[a, i] * lows[i]
                logits[a, i] *= steps[i]
            weighted[a] += added
    planes, blocks = max(1, v.planes), v.width // LANES
    out_stride = 4 * planes * v.width
    if v.groups > 1:
        accumulate_grouped(
            v.bits_read, planes, codes, stride, count, scratch.logits, 4 * LINE, blocks, scratch.wide_steps,
            scratch.wide_lows, sums.codes, out_stride,
        )  # fmt: skip
    else:
        accumulate(
            v.bits_read, planes, codes, stride, count, scratch.logits, 4 * LINE, blocks, 0, 0, sums.codes, out_stride
        )


@numba.njit(nogil=True)
def _earlier(positions, size, line, most, bound):
    """How many of a token's outliers, from entry `line` on, are in channels below `bound`: counted, since a search guesses."""
    count = 0
    if size == 2:
        shorts = registers.shorts_at(positions + 2 * line, (most,))
        for e in range(most):
            count += shorts[e] < bound
    else:
        ints = registers.ints_at(positions + 4 * line, (most,))
        for e in range(most):
            count += ints[e] < bound
    return count


@numba.njit(nogil=True, fastmath=FAST)
def _add_outliers(v, row, head, start, count, d, sums, scratch):
    """Add by how much outliers of a tile's tokens differ from their codes."""
    logits, beside = (
        registers.floats_at(scratch.logits, (HEADS, LINE)),
        registers.floats_at(scratch.beside, (TILE, HEADS)),
    )
    sparse = registers.floats_at(sums.sparse, (d, HEADS))
    positions, size, values, most = v.positions, v.position_bytes, v.values, v.outliers
    codes = v.codes + row * v.codes_row + head * v.codes_head + start * v.codes_token
    bits, stride, groups = v.bits, v.codes_token, v.groups
    for i in range(count):
        for a in range(HEADS):
            beside[i, a] = logits[a, i]
    for i in range(count):
        line = row * v.entry_row + (start + i) * v.entry_next
        for entry in range(line + _earlier(positions, size, line, most, head * d), line + most):
            j = position_at(positions, size, entry) - head * d
            if j >= d:
                break
            pair = 4 * (i * groups + (j * groups // d if groups > 1 else 0))
            near = code_at(codes + i * stride, bits, j) * registers.read_float(scratch.steps + pair)
            change = registers.read_float(values + 4 * entry) - near - registers.read_float(scratch.lows + pair)
            for a in range(HEADS):
                sparse[j, a] += beside[i, a] * change


@numba.njit(nogil=True, fastmath=FAST)
def add_factors(v, row, head, start, count, sums, scratch):
    """Add p a to the sums of the current block, which the tile is in."""
    read_factors(v, row, head, start, count, scratch)
    factors = registers.floats_at(scratch.factors, (v.rank, TILE))
    logits, added = (
        registers.floats_at(scratch.logits, (HEADS, LINE)),
        registers.floats_at(sums.low_rank, (v.rank, HEADS)),
    )
    for r in range(v.rank):
        for a in range(HEADS):
            product = np.float32(0)
            for i in range(count):
                product += logits[a, i] * factors[r, i]
            added[r, a] += product


@numba.njit(nogil=True, fastmath=FAST)
def end_block(v, row, head, block, d, sums, scratch):
    """Add (p a) b of a block that is over, and begin with the next."""
    added, line = registers.floats_at(sums.low_rank, (v.rank, HEADS)), registers.floats_at(scratch.line, (d,))
    dense = registers.floats_at(sums.dense, (HEADS, d))
    at = v.b + row * v.b_row + head * v.b_head + block * v.b_block
    for r in range(v.rank):
        registers.widen(at + 2 * r * d, scratch.line, d)
        for a in range(HEADS):
            product = added[r, a]
            for j in range(d):
                dense[a, j] += product * line[j]
            added[r, a] = 0
