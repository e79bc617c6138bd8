"""Weights of a tile, and packed values added up under them, with their outliers and their low-rank part."""

import numpy as np

from pqcache.kernels.loops import call
from pqcache.kernels.numeric import FAST, NEGLIGIBLE, exponentials, floats, largest, part, widen
from pqcache.kernels.packed.memory import (
    ADDED,
    BESIDE,
    CHANNELS,
    DENSE,
    FACTORS,
    HIGH,
    LOGITS,
    LOW_RANK,
    LOWS,
    MASS,
    NUMBERS,
    ONE,
    SPARSE,
    STEPS,
    WEIGHTED,
    code_at,
    position_at,
    read_channels,
    read_factors,
    read_tile,
)
from pqcache.kernels.packed.tiles import LINE, MOST_HEADS, TILE


@part(fastmath=FAST)
def _shrink(v, a, factor, heads, mem):
    """Scale what head a has added up."""
    codes, dense = floats(mem[ADDED] + 4 * a * v.d, v.d), floats(mem[DENSE] + 4 * a * v.d, v.d)
    weighted, mass = floats(mem[WEIGHTED], heads), floats(mem[MASS], heads)
    sparse, low_rank = floats(mem[SPARSE], (v.d, MOST_HEADS)), floats(mem[LOW_RANK], (max(1, v.rank), heads))
    mass[a] *= factor
    weighted[a] *= factor
    for j in range(v.d):
        codes[j] *= factor
    if v.rank:
        for j in range(v.d):
            dense[j] *= factor
    if v.outliers:
        for j in range(v.d):
            sparse[j, a] *= factor
    for r in range(v.rank):
        low_rank[r, a] *= factor


@part(fastmath=FAST)
def softmax(v, count, heads, mem):
    """Logits become weights relative to the running maximum. If it grows, earlier sums are scaled down to it."""
    high, mass = floats(mem[HIGH], heads), floats(mem[MASS], heads)
    for a in range(heads):
        line = floats(mem[LOGITS] + 4 * a * LINE, count)
        top = largest(line)
        if top > high[a]:
            _shrink(v, a, np.exp(high[a] - top), heads, mem)
            high[a] = top
        mass[a] += exponentials(line, high[a], NEGLIGIBLE, 0)


@part(fastmath=FAST)
def add_codes(v, row, head, start, count, heads, mem):
    """Add the tile's weighted values: codes, steps and lows."""
    codes, stride = read_tile(v, row, head, start, count, mem)
    steps, lows, weighted = floats(mem[STEPS], TILE), floats(mem[LOWS], TILE), floats(mem[WEIGHTED], heads)
    beside = floats(mem[BESIDE], (TILE, MOST_HEADS))
    for a in range(heads):
        weights = floats(mem[LOGITS] + 4 * a * LINE, LINE)
        if v.outliers:  # they are added for all KV heads at once
            for i in range(count):
                beside[i, a] = weights[i]
        if v.groups == 1 and v.read == v.bits:  # else decoding has applied them. The weights are not needed any more
            added = np.float32(0)
            for i in range(count):
                added += weights[i] * lows[i]
                weights[i] *= steps[i]
            weighted[a] += added
        weights[count : count + 4] = 0
    call(v.tile, (codes, stride, count, mem[STEPS], mem[LOWS], mem[NUMBERS], mem[LOGITS], mem[ADDED], v.table))


@part(fastmath=FAST)
def _near(v, row, start, i, head, j, mem):
    """What the code of channel j of the tile's token i stands for, in a KV head. The tile begins with token `start`."""
    address = v.codes + row * v.codes_row + head * v.codes_head + (start + i) * v.codes_token
    pair = 4 * (i * v.groups + (j * v.groups // v.d if v.groups > 1 else 0))
    return code_at(address, v.bits, j) * floats(mem[STEPS] + pair, 1)[0] + floats(mem[LOWS] + pair, 1)[0]


@part(fastmath=FAST)
def add_outliers(v, row, start, count, memory):
    """Add by how much outliers of a tile's tokens differ from their codes, for all KV heads."""
    positions, size, most, d = v.positions, v.position_bytes, v.outliers, v.d
    by_d = (np.int64(1) << 40) // d + 1  # a division would cost more than all else
    for i in range(count):
        line, near = row * v.entry_row + (start + i) * v.entry_next, np.float32(0)
        for entry in range(line, line + most):
            channel = position_at(positions, size, entry)
            head = channel * by_d >> 40
            j = channel - head * d
            if not v.alike or entry == line:
                near = _near(v, row, start, i, head, j, memory[head])
            change = floats(v.values + 4 * entry, 1)[0] - near
            to = floats(memory[head, SPARSE] + 4 * MOST_HEADS * j, MOST_HEADS)
            weights = floats(memory[head, BESIDE] + 4 * MOST_HEADS * i, MOST_HEADS)
            for a in range(MOST_HEADS):
                to[a] += change * weights[a]


@part(fastmath=FAST)
def add_factors(v, row, head, start, count, heads, mem):
    """Add p a to the sums of the current block, which the tile is in."""
    read_factors(v, row, head, start, count, mem)
    added = floats(mem[LOW_RANK], (v.rank, heads))
    for r in range(v.rank):
        factors = floats(mem[FACTORS] + 4 * r * TILE, TILE)
        for a in range(heads):
            product, weights = np.float32(0), floats(mem[LOGITS] + 4 * a * LINE, LINE)
            for i in range(count):
                product += weights[i] * factors[i]
            added[r, a] += product


@part(fastmath=FAST)
def end_block(v, row, head, block, heads, mem):
    """Add (p a) b of a block that is over, and begin with the next."""
    added, line = floats(mem[LOW_RANK], (v.rank, heads)), floats(mem[ONE], v.d)
    address = v.b + row * v.b_row + head * v.b_head + block * v.b_block
    for r in range(v.rank):
        widen(address + 2 * r * v.d, line)
        for a in range(heads):
            product, dense = added[r, a], floats(mem[DENSE] + 4 * a * v.d, v.d)
            for j in range(v.d):
                dense[j] += product * line[j]
            added[r, a] = 0


@part(fastmath=FAST)
def result(v, row, head, heads, mem, out):
    """All that was added up, times the channels' steps: out (heads, d), to be divided by the sums' mass."""
    codes, dense = floats(mem[ADDED], (heads, v.d)), floats(mem[DENSE], (heads, v.d))
    sparse, weighted = floats(mem[SPARSE], (v.d, MOST_HEADS)), floats(mem[WEIGHTED], heads)
    mass, lines = floats(mem[MASS], heads), floats(mem[CHANNELS], (2, v.d))
    read_channels(v, row * v.channel_row + head * v.channel_head, mem)
    for a in range(heads):
        for j in range(v.d):
            value = codes[a, j] + weighted[a]
            if v.rank:
                value += dense[a, j]
            if v.outliers:
                value += sparse[j, a]
            out[a, j] = value * lines[0, j] + mass[a] * lines[1, j]
