"""Logits of a tile: queries against packed keys, their outliers and their low-rank part."""

import numpy as np

from pqcache.kernels.loops import call
from pqcache.kernels.numeric import FAST, at, floats, part, widen
from pqcache.kernels.packed.memory import (
    AHEAD,
    BESIDE_QUERY,
    CHANNELS,
    CURSOR,
    FACTORS,
    FOLDED,
    LOGITS,
    LOWS,
    NEAR,
    NUMBERS,
    ONE,
    QUERY,
    SEEN,
    STEPS,
    SUMS,
    code_at,
    half_at,
    position_at,
    read_channels,
    read_factors,
    read_tile,
)
from pqcache.kernels.packed.tiles import LINE, MOST_HEADS, TILE


@part
def read_query(k, q, heads, mem):
    """A block's queries q (heads, d), also with heads side by side."""
    query, beside = floats(mem[QUERY], (heads, k.d)), floats(mem[BESIDE_QUERY], (k.d, MOST_HEADS))
    for a in range(heads):
        for j in range(k.d):
            query[a, j] = beside[j, a] = q[a, j]


@part(fastmath=FAST)
def _fold(k, row, head, segment, heads, mem):
    """Queries times the channel steps of a segment, their sums, and their products with its lows."""
    read_channels(k, row * k.channel_row + head * k.channel_head + segment * k.channel_segment, mem)
    step, low = floats(mem[CHANNELS], k.d), floats(mem[CHANNELS] + 4 * k.d, k.d)
    sums = floats(mem[SUMS], (2, heads))
    for a in range(heads):
        query, folded = floats(mem[QUERY] + 4 * a * k.d, k.d), floats(mem[FOLDED] + 4 * a * k.d, k.d)
        added = summed = np.float32(0)
        for j in range(k.d):
            value = query[j] * step[j]
            folded[j] = value
            summed += value
            added += query[j] * low[j]
        sums[0, a], sums[1, a] = added, summed


@part
def _codes_of(stream, row, head, token):
    """Where a token's codes are."""
    return stream.codes + row * stream.codes_row + head * stream.codes_head + token * stream.codes_token


@part(fastmath=FAST)
def score_codes(k, v, row, head, start, count, segment, heads, mem):
    """Write the tile's logits over codes, steps and lows; return the segment that is folded from now on."""
    codes, stride = read_tile(k, row, head, start, count, mem)
    steps, lows, sums = floats(mem[STEPS], TILE), floats(mem[LOWS], TILE), floats(mem[SUMS], (2, heads))
    first = 0
    while first < count:
        here = (k.offset + start + first) // k.span
        last = min(count, (here + 1) * k.span - start - k.offset)
        if here != segment:
            _fold(k, row, head, here, heads, mem)
            segment = here
        soon, pair = start + first + TILE, 4 * first * k.groups
        call(k.tile, (
            codes + first * stride, stride, last - first, mem[STEPS] + pair, mem[LOWS] + pair, mem[NUMBERS],
            mem[FOLDED], mem[LOGITS] + 4 * first,
            _codes_of(k, row, head, soon), k.codes_token, _codes_of(v, row, head, soon), v.codes_token, k.table,
        ))  # fmt: skip
        for a in range(heads):
            logits, added, whole = floats(mem[LOGITS] + 4 * a * LINE, LINE), sums[0, a], sums[1, a]
            if k.groups == 1 and k.read == k.bits:  # else decoding has applied them
                for i in range(first, last):
                    logits[i] = logits[i] * steps[i] + lows[i] * whole + added
            else:
                for i in range(first, last):
                    logits[i] += added
        first = last
    return segment


@part
def _near(k, row, head, token, channel):
    """What the code of a key's channel stands for."""
    of = row * k.channel_row + head * k.channel_head + token // k.span * k.channel_segment + 2 * channel
    return code_at(_codes_of(k, row, head, token), k.bits, channel) * half_at(k.channel_step + of) + half_at(
        k.channel_low + of
    )


@part
def first_outliers(k, row, head, start, mem):
    """Point each channel's cursor to its first outlier from token `start` on: binary searches."""
    cursor, near = at(mem[CURSOR], k.d, np.int32(0)), floats(mem[NEAR], k.d)
    block = row * k.entry_row + head * k.entry_head + start // k.length * k.entry_block
    positions, size, step, within = k.positions, k.position_bytes, k.entry_next, start % k.length
    for j in range(k.d):
        low, high = 0, k.outliers
        while low < high:
            middle = (low + high) // 2
            if position_at(positions, size, block + middle * step + j) < within:
                low = middle + 1
            else:
                high = middle
        cursor[j] = low
        if k.alike:
            near[j] = _near(k, row, head, start - within + position_at(positions, size, block + j), j)


@part(fastmath=FAST)
def read_outliers(k, row, head, start, count, mem):
    """By how much outliers of key channels change the logits of `count` tokens, in one block: AHEAD (WINDOW, MOST_HEADS).

    Many tiles at once, since the end of each channel's entries is a jump that the processor cannot foresee.
    """
    cursor, nears = at(mem[CURSOR], k.d, np.int32(0)), floats(mem[NEAR], k.d)
    block = row * k.entry_row + head * k.entry_head + start // k.length * k.entry_block
    positions, size, most, step, within = k.positions, k.position_bytes, k.outliers, k.entry_next, start % k.length
    ahead, query = floats(mem[AHEAD], count * MOST_HEADS), floats(mem[BESIDE_QUERY], k.d * MOST_HEADS)
    ahead[:] = 0
    for j in range(k.d):
        entry, near = cursor[j], nears[j]
        while entry < most:
            i = position_at(positions, size, block + entry * step + j) - within
            if i >= count:
                break
            if not k.alike:
                near = _near(k, row, head, start + i, j)
            change = floats(k.values + 4 * (block + entry * step + j), 1)[0] - near
            for a in range(MOST_HEADS):
                ahead[i * MOST_HEADS + a] += change * query[j * MOST_HEADS + a]
            entry += 1
        cursor[j] = entry


@part(fastmath=FAST)
def score_outliers(first, count, heads, mem):
    """Add to the tile's logits what outliers change; the tile begins with token `first` of those read ahead."""
    ahead = floats(mem[AHEAD] + 4 * MOST_HEADS * first, (count, MOST_HEADS))
    for a in range(heads):
        logits = floats(mem[LOGITS] + 4 * a * LINE, LINE)
        for i in range(count):
            logits[i] += ahead[i, a]


@part(fastmath=FAST)
def see_block(k, row, head, start, mem):
    """The query times the second low-rank factor of a block: SEEN."""
    seen, line = floats(mem[SEEN], (k.rank, MOST_HEADS)), floats(mem[ONE], k.d)
    query = floats(mem[BESIDE_QUERY], (k.d, MOST_HEADS))
    address = k.b + row * k.b_row + head * k.b_head + start // k.length * k.b_block
    for r in range(k.rank):
        widen(address + 2 * r * k.d, line)
        for a in range(MOST_HEADS):
            seen[r, a] = 0
        for j in range(k.d):
            for a in range(MOST_HEADS):
                seen[r, a] += line[j] * query[j, a]


@part(fastmath=FAST)
def score_low_rank(k, row, head, start, count, heads, mem):
    """Add q . (a b) to the tile's logits, as a . (b q). The tile is in one block."""
    read_factors(k, row, head, start, count, mem)
    seen = floats(mem[SEEN], (k.rank, MOST_HEADS))
    for r in range(k.rank):
        factors = floats(mem[FACTORS] + 4 * r * TILE, TILE)
        for a in range(heads):
            product, logits = seen[r, a], floats(mem[LOGITS] + 4 * a * LINE, LINE)
            for i in range(count):
                logits[i] += product * factors[i]
