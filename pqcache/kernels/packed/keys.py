"""Logits of a tile: queries against packed keys, their outliers and their low-rank part."""

from __future__ import annotations

import numba
import numpy as np

from pqcache.kernels import registers
from pqcache.kernels.packed.memory import FAST, LINE, TILE, code_at, position_at, prepare_tile, read_factors, undo
from pqcache.kernels.packed.tiles import Soon, products
from pqcache.kernels.registers import LANES


@numba.njit(nogil=True)
def read_query(k, q, heads, scratch):
    """A block's queries q (heads, d), padded, and with heads side by side."""
    source = registers.floats_at(q, (len(heads), k.d))
    query = registers.floats_at(scratch.query, (len(heads), k.width))
    beside = registers.floats_at(scratch.beside_query, (k.d, len(heads)))
    query[:] = 0
    for a in range(len(heads)):
        for j in range(k.d):
            query[a, j] = source[a, j]
            beside[j, a] = source[a, j]


@numba.njit(nogil=True, fastmath=FAST)
def _fold(k, row, head, segment, heads, scratch):
    """Queries times the channel steps of a segment, their sums, and their products with its lows."""
    width = k.width
    lines = registers.floats_at(scratch.channels, (2, width))
    query, folded = (
        registers.floats_at(scratch.query, (len(heads), width)),
        registers.floats_at(scratch.folded, (len(heads), width)),
    )
    sums = registers.floats_at(scratch.sums, (2, len(heads)))
    offset = row * k.channel_row + head * k.channel_head + segment * k.channel_segment
    lines[0], lines[1] = 1, 0
    if k.channel_step:
        registers.widen(k.channel_step + offset, scratch.channels, k.d)
    if k.channel_low:
        registers.widen(k.channel_low + offset, scratch.channels + 4 * width, k.d)
    if not k.groups:
        undo(k.read, lines[0], lines[1])
    for a in range(len(heads)):
        added, summed = np.float32(0), np.float32(0)
        for j in range(width):
            value = query[a, j] * lines[0, j]
            added += query[a, j] * lines[1, j]
            folded[a, j] = value
            summed += value
        sums[0, a], sums[1, a] = added, summed


@numba.njit(nogil=True)
def _next_tile(k, v, row, head, token):
    """Where the codes are that follow a token's by a tile."""
    keys = k.codes + row * k.codes_row + head * k.codes_head + (token + TILE) * k.codes_token
    values = v.codes + row * v.codes_row + head * v.codes_head + (token + TILE) * v.codes_token
    return Soon(keys, k.codes_token, values, v.codes_token)


@numba.njit(nogil=True, fastmath=FAST)
def score_codes(k, v, row, head, start, count, segment, heads, scratch):
    """Write the tile's logits over codes, steps and lows; return the segment that is folded from now on."""
    logits = registers.floats_at(scratch.logits, (len(heads), LINE))
    steps, lows = registers.floats_at(scratch.steps, (TILE,)), registers.floats_at(scratch.lows, (TILE,))
    sums = registers.floats_at(scratch.sums, (2, len(heads)))
    groups, step, low = k.tile_groups, 0, 0
    codes, stride = prepare_tile(k, row, head, start, count, scratch)
    first = 0
    while first < count:
        here = (k.offset + start + first) // k.span
        last = min(count, (here + 1) * k.span - start - k.offset)
        if here != segment:
            _fold(k, row, head, here, heads, scratch)
            segment = here
        if groups > 1:
            step, low = scratch.steps + 4 * first * groups, scratch.lows + 4 * first * groups
        soon = _next_tile(k, v, row, head, start + first)
        products(
            k.read, codes + first * stride, stride, last - first, scratch.folded, 4 * k.width, groups,
            k.width // LANES // groups, step, low, scratch.logits + 4 * first, 4 * LINE, soon, heads,
        )  # fmt: skip
        for a in range(len(heads)):
            added, whole = sums[0, a], sums[1, a]
            if k.groups == 1:
                for i in range(first, last):
                    logits[a, i] = logits[a, i] * steps[i] + lows[i] * whole + added
            else:
                for i in range(first, last):
                    logits[a, i] += added
        first = last
    return segment


@numba.njit(nogil=True)
def _near(k, row, head, token, channel):
    """What the code of a key's channel stands for."""
    at = k.codes + row * k.codes_row + head * k.codes_head + token * k.codes_token
    of = row * k.channel_row + head * k.channel_head + token // k.span * k.channel_segment + 2 * channel
    return code_at(at, k.bits, channel) * registers.read_half(k.channel_step + of) + registers.read_half(
        k.channel_low + of
    )


@numba.njit(nogil=True)
def first_outliers(k, row, head, start, scratch):
    """Point each channel's cursor to its first outlier from token `start` on: binary searches."""
    cursor, near = registers.ints_at(scratch.cursor, (k.d,)), registers.floats_at(scratch.near, (k.d,))
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


@numba.njit(nogil=True, fastmath=FAST)
def read_outliers(k, row, head, start, count, heads, scratch):
    """By how much outliers of key channels change the logits of `count` tokens, in one block: scratch.ahead (WINDOW, heads).

    Many tiles at once, since the end of each channel's entries is a jump that the processor cannot foresee.
    """
    cursor, nears = registers.ints_at(scratch.cursor, (k.d,)), registers.floats_at(scratch.near, (k.d,))
    block = row * k.entry_row + head * k.entry_head + start // k.length * k.entry_block
    positions, size, values, most, step = k.positions, k.position_bytes, k.values, k.outliers, k.entry_next
    within, size_of_row = start % k.length, 4 * len(heads)
    registers.floats_at(scratch.ahead, (count * len(heads),))[:] = 0
    for j in range(k.d):
        at, near = cursor[j], nears[j]
        while at < most:
            entry = block + at * step + j
            i = position_at(positions, size, entry) - within
            if i >= count:
                break
            if not k.alike:
                near = _near(k, row, head, start + i, j)
            change = registers.read_float(values + 4 * entry) - near
            registers.add_row(scratch.ahead + size_of_row * i, scratch.beside_query + size_of_row * j, change, heads)
            at += 1
        cursor[j] = at


@numba.njit(nogil=True, fastmath=FAST)
def score_outliers(first, count, heads, scratch):
    """Add to the tile's logits what outliers change; the tile begins with token `first` of those read ahead."""
    logits = registers.floats_at(scratch.logits, (len(heads), LINE))
    ahead = registers.floats_at(scratch.ahead + 4 * len(heads) * first, (count, len(heads)))
    for a in range(len(heads)):
        for i in range(count):
            logits[a, i] += ahead[i, a]


@numba.njit(nogil=True, fastmath=FAST)
def see_block(k, row, head, start, heads, scratch):
    """The query times the second low-rank factor of a block: `seen`."""
    seen, line = registers.floats_at(scratch.seen, (k.rank, len(heads))), registers.floats_at(scratch.line, (k.d,))
    query = registers.floats_at(scratch.beside_query, (k.d, len(heads)))
    at = k.b + row * k.b_row + head * k.b_head + start // k.length * k.b_block
    for r in range(k.rank):
        registers.widen(at + 2 * r * k.d, scratch.line, k.d)
        for a in range(len(heads)):
            seen[r, a] = 0
        for j in range(k.d):
            for a in range(len(heads)):
                seen[r, a] += line[j] * query[j, a]


@numba.njit(nogil=True, fastmath=FAST)
def score_low_rank(k, row, head, start, count, heads, scratch):
    """Add q . (a b) to the tile's logits, as a . (b q). The tile is in one block."""
    read_factors(k, row, head, start, count, scratch)
    factors, seen = (
        registers.floats_at(scratch.factors, (k.rank, TILE)),
        registers.floats_at(scratch.seen, (k.rank, len(heads))),
    )
    logits = registers.floats_at(scratch.logits, (len(heads), LINE))
    for r in range(k.rank):
        for a in range(len(heads)):
            product = seen[r, a]
            for i in range(count):
                logits[a, i] += product * factors[r, i]
