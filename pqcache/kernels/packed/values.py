"""Weights of a tile, and packed values added up under them, with their outliers and their low-rank part."""

from __future__ import annotations

import numba
import numpy as np

from pqcache.kernels import registers
from pqcache.kernels.packed.memory import (
    FAST,
    LINE,
    TILE,
    code_at,
    memory_of,
    position_at,
    prepare_tile,
    read_factors,
    undo,
)
from pqcache.kernels.packed.tiles import accumulate
from pqcache.kernels.registers import LANES


@numba.njit(nogil=True, fastmath=FAST)
def _shrink(v, a, factor, heads, sums):
    """Scale what head a has added up."""
    codes, dense = (
        registers.floats_at(sums.codes, (len(heads), v.width)),
        registers.floats_at(sums.dense, (len(heads), v.d)),
    )
    sparse = registers.floats_at(sums.sparse, (v.d, len(heads)))
    lows, mass = registers.floats_at(sums.lows, (len(heads),)), registers.floats_at(sums.mass, (len(heads),))
    low_rank = registers.floats_at(sums.low_rank, (max(1, v.rank), len(heads)))
    lows[a] *= factor
    mass[a] *= factor
    for j in range(v.width):
        codes[a, j] *= factor
    if v.rank:
        for j in range(v.d):
            dense[a, j] *= factor
    if v.outliers:
        for j in range(v.d):
            sparse[j, a] *= factor
    for r in range(v.rank):
        low_rank[r, a] *= factor


@numba.njit(nogil=True, fastmath=FAST)
def softmax(v, count, heads, sums, scratch):
    """Logits become weights relative to the running maximum. If it grows, earlier sums are scaled down to it."""
    blocks = -(-count // LANES)
    logits = registers.floats_at(scratch.logits, (len(heads), LINE))
    high, mass = registers.floats_at(sums.high, (len(heads),)), registers.floats_at(sums.mass, (len(heads),))
    for a in range(len(heads)):
        at = scratch.logits + 4 * a * LINE
        for i in range(count, blocks * LANES):
            logits[a, i] = -np.inf
        top = registers.largest(at, blocks * LANES)
        if top > high[a]:
            _shrink(v, a, np.exp(high[a] - top), heads, sums)
            high[a] = top
        mass[a] += registers.exp_below(at, blocks * LANES, high[a])


@numba.njit(nogil=True, fastmath=FAST)
def add_codes(v, row, head, start, count, heads, sums, scratch):
    """Add the tile's weighted values: codes, steps and lows."""
    logits = registers.floats_at(scratch.logits, (len(heads), LINE))
    steps, lows = registers.floats_at(scratch.steps, (TILE,)), registers.floats_at(scratch.lows, (TILE,))
    weighted = registers.floats_at(sums.lows, (len(heads),))
    codes, stride = prepare_tile(v, row, head, start, count, scratch)
    if v.outliers:  # they are added for all KV heads at once
        beside = registers.floats_at(scratch.beside, (TILE, len(heads)))
        for i in range(count):
            for a in range(len(heads)):
                beside[i, a] = logits[a, i]
    step, low = 0, 0
    if v.groups == 1:  # the weights are not needed any more
        for a in range(len(heads)):
            added = np.float32(0)
            for i in range(count):
                added += logits[a, i] * lows[i]
                logits[a, i] *= steps[i]
            weighted[a] += added
    elif v.tile_groups > 1:
        step, low = scratch.steps, scratch.lows
    accumulate(
        v.read, codes, stride, count, scratch.logits, 4 * LINE, v.tile_groups, v.width // LANES // v.tile_groups,
        step, low, sums.codes, 4 * v.width, heads,
    )  # fmt: skip


@numba.njit(nogil=True, fastmath=FAST)
def _near(v, row, start, i, head, j, memory):
    """What the code of channel j of the tile's token i stands for, in a KV head. The tile begins with token `start`."""
    base, unit = np.float32(0), np.float32(1)
    if v.read < 8:  # what steps and lows are for
        base, unit = np.float32(1), np.float32(1 / (1 << v.bits))
    at = v.codes + row * v.codes_row + head * v.codes_head + (start + i) * v.codes_token
    pair = head * (memory[-1] - memory[0]) + 4 * (i * v.groups + (j * v.groups // v.d if v.groups > 1 else 0))
    scratch, _ = memory_of(memory, 0)
    code = base + unit * code_at(at, v.bits, j)
    return code * registers.read_float(scratch.steps + pair) + registers.read_float(scratch.lows + pair)


@numba.njit(nogil=True, fastmath=FAST)
def add_outliers(v, row, start, count, heads, memory):
    """Add by how much outliers of a tile's tokens differ from their codes, for all KV heads. memory: see memory_of."""
    positions, size, values, most, d = v.positions, v.position_bytes, v.values, v.outliers, v.d
    apart, size_of_row = memory[-1] - memory[0], 4 * len(heads)
    scratch, sums = memory_of(memory, 0)
    by_d = (np.int64(1) << 40) // d + 1  # a division would cost more than all else
    for i in range(count):
        line, near = row * v.entry_row + (start + i) * v.entry_next, np.float32(0)
        for entry in range(line, line + most):
            channel = position_at(positions, size, entry)
            head = channel * by_d >> 40
            j, by = channel - head * d, head * apart
            if not v.alike or entry == line:
                near = _near(v, row, start, i, head, j, memory)
            change = registers.read_float(values + 4 * entry) - near
            registers.add_row(sums.sparse + by + size_of_row * j, scratch.beside + by + size_of_row * i, change, heads)


@numba.njit(nogil=True, fastmath=FAST)
def add_factors(v, row, head, start, count, heads, sums, scratch):
    """Add p a to the sums of the current block, which the tile is in."""
    read_factors(v, row, head, start, count, scratch)
    factors = registers.floats_at(scratch.factors, (v.rank, TILE))
    logits, added = (
        registers.floats_at(scratch.logits, (len(heads), LINE)),
        registers.floats_at(sums.low_rank, (v.rank, len(heads))),
    )
    for r in range(v.rank):
        for a in range(len(heads)):
            product = np.float32(0)
            for i in range(count):
                product += logits[a, i] * factors[r, i]
            added[r, a] += product


@numba.njit(nogil=True, fastmath=FAST)
def end_block(v, row, head, block, heads, sums, scratch):
    """Add (p a) b of a block that is over, and begin with the next."""
    d = v.d
    added, line = registers.floats_at(sums.low_rank, (v.rank, len(heads))), registers.floats_at(scratch.line, (d,))
    dense = registers.floats_at(sums.dense, (len(heads), d))
    at = v.b + row * v.b_row + head * v.b_head + block * v.b_block
    for r in range(v.rank):
        registers.widen(at + 2 * r * d, scratch.line, d)
        for a in range(len(heads)):
            product = added[r, a]
            for j in range(d):
                dense[a, j] += product * line[j]
            added[r, a] = 0


@numba.njit(nogil=True, fastmath=FAST)
def result(v, row, head, heads, sums, scratch, out):
    """All that was added up, for channels in order, times their step: out (heads, d), to be divided by the sums' mass."""
    codes, dense = (
        registers.floats_at(sums.codes, (len(heads), v.width)),
        registers.floats_at(sums.dense, (len(heads), v.d)),
    )
    sparse, lows = registers.floats_at(sums.sparse, (v.d, len(heads))), registers.floats_at(sums.lows, (len(heads),))
    mass, lines = registers.floats_at(sums.mass, (len(heads),)), registers.floats_at(scratch.channels, (2, v.width))
    offset = row * v.channel_row + head * v.channel_head
    lines[0], lines[1] = 1, 0
    if v.channel_step:
        registers.widen(v.channel_step + offset, scratch.channels, v.d)
    if v.channel_low:
        registers.widen(v.channel_low + offset, scratch.channels + 4 * v.width, v.d)
    if not v.groups:
        undo(v.read, lines[0], lines[1])
    for a in range(len(heads)):
        for j in range(v.d):
            value = codes[a, j] + lows[a]
            if v.rank:
                value += dense[a, j]
            if v.outliers:
                value += sparse[j, a]
            out[a, j] = value * lines[0, j] + mass[a] * lines[1, j]
