"""Logits of a tile: queries against packed keys, their outliers and their low-rank part."""

from __future__ import annotations

import numba
import numpy as np

from pqcache.kernels.packed import registers
from pqcache.kernels.packed.memory import FAST, LINE, TILE, code_at, position_at, prepare_tile, read_factors
from pqcache.kernels.packed.registers import LANES
from pqcache.kernels.packed.tiles import HEADS, TOKENS, products, products_grouped


@numba.njit(nogil=True)
def read_query(k, q, d, scratch):
    """A block's queries q (HEADS, d), in planes and with heads side by side; channels without a step have step 1."""
    planes, width = max(1, k.planes), k.width
    source = registers.floats_at(q, (HEADS, d))
    in_planes = registers.floats_at(scratch.query, (HEADS, planes * width))
    beside = registers.floats_at(scratch.beside_query, (d, HEADS))
    steps = registers.floats_at(scratch.channels, (d,))
    in_planes[:] = 0
    for j in range(d):
        steps[j] = 1
        for a in range(HEADS):
            in_planes[a, j % planes * width + j // planes] = source[a, j]
            beside[j, a] = source[a, j]


@numba.njit(nogil=True, fastmath=FAST)
def _fold(k, row, head, segment, d, scratch):
    """Queries times the channel steps of a segment, their sums, and their products with its lows."""
    planes, width = max(1, k.planes), k.width
    wide = planes * width
    widest = max(d, wide)
    lines = registers.floats_at(scratch.channels, (4, widest))
    query, folded = (
        registers.floats_at(scratch.query, (HEADS, wide)),
        registers.floats_at(scratch.folded, (HEADS, wide)),
    )
    sums = registers.floats_at(scratch.sums, (2, HEADS))
    offset = row * k.channel_row + head * k.channel_head + segment * k.channel_segment
    if k.channel_step:
        registers.widen(k.channel_step + offset, scratch.channels, d)
    if k.channel_low:
        registers.widen(k.channel_low + offset, scratch.channels + 4 * widest, d)
    for which in range(2):
        for p in range(planes):
            for b in range(d // planes):
                lines[2 + which, p * width + b] = lines[which, b * planes + p]
    for a in range(HEADS):
        added, summed = np.float32(0), np.float32(0)
        for j in range(wide):
            value = query[a, j] * lines[2, j]
            added += query[a, j] * lines[3, j]
            folded[a, j] = value
            summed += value
        sums[0, a], sums[1, a] = added, summed


@numba.njit(nogil=True, fastmath=FAST)
def score_codes(k, row, head, start, count, d, segment, scratch):
    """Write the tile's logits over codes, steps and lows; return the segment that is folded from now on."""
    logits = registers.floats_at(scratch.logits, (HEADS, LINE))
    steps, lows = registers.floats_at(scratch.steps, (TILE,)), registers.floats_at(scratch.lows, (TILE,))
    sums = registers.floats_at(scratch.sums, (2, HEADS))
    planes, blocks = max(1, k.planes), k.width // LANES
    q_stride, grouped, bits = 4 * planes * k.width, k.groups > 1, k.bits_read
    codes, stride = prepare_tile(k, row, head, start, count, d, scratch)
    first = 0
    while first < count:
        here = (start + first) // k.span
        last = min(count, (here + 1) * k.span - start)
        if here != segment:
            _fold(k, row, head, here, d, scratch)
            segment = here
        for i in range(first, last, TOKENS):
            at, valid, out = codes + i * stride, min(last - i, TOKENS), scratch.logits + 4 * i
            if grouped:
                beside = 4 * i * k.width
                products_grouped(
                    bits, planes, at, stride, valid, scratch.folded, q_stride, blocks, scratch.wide_steps + beside,
                    scratch.wide_lows + beside, out, 4 * LINE,
                )  # fmt: skip
            else:
                products(bits, planes, at, stride, valid, scratch.folded, q_stride, blocks, 0, 0, out, 4 * LINE)
        for a in range(HEADS):
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
def first_outliers(k, row, head, start, d, scratch):
    """Point each channel's cursor to its first outlier from token `start` on: binary searches."""
    cursor = registers.ints_at(scratch.cursor, (d,))
    block = row * k.entry_row + head * k.entry_head + start // k.length * k.entry_block
    positions, size, step, within = k.positions, k.position_bytes, k.entry_next, start % k.length
    for j in range(d):
        low, high = 0, k.outliers
        while low < high:
            middle = (low + high) // 2
            if position_at(positions, size, block + middle * step + j) < within:
                low = middle + 1
            else:
                high = middle
        cursor[j] = low


@numba.njit(nogil=True, fastmath=FAST)
def score_outliers(k, row, head, start, count, d, scratch):
    """Add to the tile's logits by how much outliers of key channels differ from their codes. The tile is in one block."""
    cursor = registers.ints_at(scratch.cursor, (d,))
    logits, beside = (
        registers.floats_at(scratch.logits, (HEADS, LINE)),
        registers.floats_at(scratch.beside, (TILE, HEADS)),
    )
    query = registers.floats_at(scratch.beside_query, (d, HEADS))
    block = row * k.entry_row + head * k.entry_head + start // k.length * k.entry_block
    positions, size, values, most, step = k.positions, k.position_bytes, k.values, k.outliers, k.entry_next
    codes = k.codes + row * k.codes_row + head * k.codes_head + start * k.codes_token
    bits, stride, span, segment = k.bits, k.codes_token, k.span, k.channel_segment
    of_channels = row * k.channel_row + head * k.channel_head
    steps, lows = k.channel_step + of_channels, k.channel_low + of_channels
    within = start % k.length
    one_segment = start // span == (start + count - 1) // span
    offset = start // span * segment
    beside[:] = 0
    for j in range(d):
        at = cursor[j]
        while at < most:
            entry = block + at * step + j
            i = position_at(positions, size, entry) - within
            if i >= count:
                break
            if not one_segment:
                offset = (start + i) // span * segment
            near = code_at(codes + i * stride, bits, j) * registers.read_half(steps + offset + 2 * j)
            change = registers.read_float(values + 4 * entry) - near - registers.read_half(lows + offset + 2 * j)
            for a in range(HEADS):
                beside[i, a] += query[j, a] * change
            at += 1
        cursor[j] = at
    for i in range(count):
        for a in range(HEADS):
            logits[a, i] += beside[i, a]


@numba.njit(nogil=True, fastmath=FAST)
def see_block(k, row, head, start, d, scratch):
    """The query times the second low-rank factor of a block: `seen`."""
    seen, line = registers.floats_at(scratch.seen, (k.rank, HEADS)), registers.floats_at(scratch.line, (d,))
    query = registers.floats_at(scratch.beside_query, (d, HEADS))
    at = k.b + row * k.b_row + head * k.b_head + start // k.length * k.b_block
    for r in range(k.rank):
        registers.widen(at + 2 * r * d, scratch.line, d)
        for a in range(HEADS):
            seen[r, a] = 0
        for j in range(d):
            for a in range(HEADS):
                seen[r, a] += line[j] * query[j, a]


@numba.njit(nogil=True, fastmath=FAST)
def score_low_rank(k, row, head, start, count, scratch):
    """Add q . (a b) to the tile's logits, as a . (b q). The tile is in one block."""
    read_factors(k, row, head, start, count, scratch)
    factors, seen = (
        registers.floats_at(scratch.factors, (k.rank, TILE)),
        registers.floats_at(scratch.seen, (k.rank, HEADS)),
    )
    logits = registers.floats_at(scratch.logits, (HEADS, LINE))
    for r in range(k.rank):
        for a in range(HEADS):
            product = seen[r, a]
            for i in range(count):
                logits[a, i] += product * factors[r, i]
