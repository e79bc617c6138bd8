"""Products of query heads with packed codes, and their weighted sums: codes are unpacked in registers only.

A byte holds 1, 2 or 4 codes, `per` of them. Queries and sums have their channels in the order of planes: first the channels whose
codes are the lowest in their bytes, then the next ones. So a loop over bytes meets channels side by side in every plane.

`heads`, here and in the other modules, is a tuple of zeros, one for each query head of a block: its length is known when a
kernel is compiled, and loops over it become so many accumulators. Codes of 32 bits are the numbers themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from pqcache.kernels.numeric import FAST, at, fetch, floats, tuple_setitem, whole_registers

MOST_HEADS = 4  # query heads of a block
READ = (2, 4, 8, 32)  # bits of codes that are read in place


class Rows(NamedTuple):
    """Codes of a tile's tokens."""

    address: Any
    stride: Any  # bytes from token to token
    scales: Any  # address of a factor per token and byte, fp32; 0: none


class Soon(NamedTuple):
    """Codes to be read soon. The processor fetches on its own only within a page of memory, and a tile fills a few pages."""

    keys: Any  # address of those of the tile's first token
    key_size: Any  # bytes of a token
    values: Any
    value_size: Any


@numba.njit(nogil=True, inline="always")
def _row(bits, address, width):
    """The bytes of a token, or its numbers."""
    return floats(address, width) if bits == 32 else at(address, width, np.uint8(0))


@numba.njit(nogil=True, inline="always")
def _number(bits, row, c, plane):
    """The code of a plane in byte c."""
    if bits == 32:
        return np.float32(row[c])
    return np.float32(np.uint8((np.uint8(row[c]) >> np.uint8(plane * bits)) & np.uint8((1 << min(bits, 8)) - 1)))


@numba.njit(nogil=True, inline="always", fastmath=FAST)
def _products(bits, width, scaled, rows, count, q, out, out_step, soon, heads):
    """By bits, bytes of a token, and whether there are scales, all constants to the compiler."""
    per = max(1, 8 // bits)
    for i in range(count):
        fetch(soon.keys + i * soon.key_size, soon.key_size)
        fetch(soon.values + i * soon.value_size, soon.value_size)
        row, scales = _row(bits, rows.address + i * rows.stride, width), floats(rows.scales + 4 * i * width, width)
        sums = heads
        for c in range(width):
            for plane in range(per):
                x = _number(bits, row, c, plane)
                if scaled:
                    x *= scales[c]
                for a in range(len(heads)):
                    sums = tuple_setitem(sums, a, sums[a] + q[(a * per + plane) * width + c] * x)
        for a in range(len(heads)):
            out[a * out_step + i] = sums[a]


@numba.njit(nogil=True, inline="always", fastmath=FAST)
def _accumulate(bits, width, scaled, rows, count, p, p_step, out, heads):
    """As _products, four tokens at a time."""
    per = max(1, 8 // bits)
    for i in range(0, count, 4):
        last = count - 1
        i1, i2, i3 = min(i + 1, last), min(i + 2, last), min(i + 3, last)
        first, step = rows.address, rows.stride
        r0, r1 = _row(bits, first + i * step, width), _row(bits, first + i1 * step, width)
        r2, r3 = _row(bits, first + i2 * step, width), _row(bits, first + i3 * step, width)
        at0, size = rows.scales, 4 * width
        s0, s1 = floats(at0 + i * size, width), floats(at0 + i1 * size, width)
        s2, s3 = floats(at0 + i2 * size, width), floats(at0 + i3 * size, width)
        p0 = p1 = p2 = p3 = heads
        for a in range(len(heads)):
            p0, p1 = tuple_setitem(p0, a, p[a * p_step + i]), tuple_setitem(p1, a, p[a * p_step + i + 1])
            p2, p3 = tuple_setitem(p2, a, p[a * p_step + i + 2]), tuple_setitem(p3, a, p[a * p_step + i + 3])
        for c in range(width):
            for plane in range(per):
                x0, x1 = _number(bits, r0, c, plane), _number(bits, r1, c, plane)
                x2, x3 = _number(bits, r2, c, plane), _number(bits, r3, c, plane)
                if scaled:
                    x0, x1, x2, x3 = x0 * s0[c], x1 * s1[c], x2 * s2[c], x3 * s3[c]
                for a in range(len(heads)):
                    out[(a * per + plane) * width + c] += p0[a] * x0 + p1[a] * x1 + p2[a] * x2 + p3[a] * x3


# compiled for the common sizes of a token: short loops of unknown length would spend half their time on their ends
@numba.njit(nogil=True, fastmath=FAST)
def products(bits, width, rows, count, query, out_at, out_step, soon, heads):
    """Write q_a . x_i of `count` tokens to out[a * out_step + i]. width: bytes of a token, or numbers. Addresses of fp32."""
    whole_registers()
    q, out = floats(query, len(heads) * width * max(1, 8 // bits)), floats(out_at, len(heads) * out_step)
    if bits == 2 and width == 32 and rows.scales == 0:
        _products(2, 32, False, rows, count, q, out, out_step, soon, heads)
    elif bits == 4 and width == 64 and rows.scales == 0:
        _products(4, 64, False, rows, count, q, out, out_step, soon, heads)
    elif bits == 8 and width == 128 and rows.scales == 0:
        _products(8, 128, False, rows, count, q, out, out_step, soon, heads)
    elif bits == 2 and width == 32:
        _products(2, 32, True, rows, count, q, out, out_step, soon, heads)
    elif bits == 4 and width == 64:
        _products(4, 64, True, rows, count, q, out, out_step, soon, heads)
    elif bits == 2:
        _products(2, width, rows.scales != 0, rows, count, q, out, out_step, soon, heads)
    elif bits == 4:
        _products(4, width, rows.scales != 0, rows, count, q, out, out_step, soon, heads)
    elif bits == 8:
        _products(8, width, rows.scales != 0, rows, count, q, out, out_step, soon, heads)
    else:
        _products(32, width, False, rows, count, q, out, out_step, soon, heads)


@numba.njit(nogil=True, fastmath=FAST)
def accumulate(bits, width, rows, count, weights, p_step, out_at, heads):
    """Add to out (heads, channels by planes) the sum over tokens of p[a * p_step + i] x_i; p is 0 up to a multiple of 4."""
    whole_registers()
    out, p = floats(out_at, len(heads) * width * max(1, 8 // bits)), floats(weights, len(heads) * p_step)
    if bits == 2 and width == 32 and rows.scales == 0:
        _accumulate(2, 32, False, rows, count, p, p_step, out, heads)
    elif bits == 4 and width == 64 and rows.scales == 0:
        _accumulate(4, 64, False, rows, count, p, p_step, out, heads)
    elif bits == 8 and width == 128 and rows.scales == 0:
        _accumulate(8, 128, False, rows, count, p, p_step, out, heads)
    elif bits == 2 and width == 32:
        _accumulate(2, 32, True, rows, count, p, p_step, out, heads)
    elif bits == 4 and width == 64:
        _accumulate(4, 64, True, rows, count, p, p_step, out, heads)
    elif bits == 2:
        _accumulate(2, width, rows.scales != 0, rows, count, p, p_step, out, heads)
    elif bits == 4:
        _accumulate(4, width, rows.scales != 0, rows, count, p, p_step, out, heads)
    elif bits == 8:
        _accumulate(8, width, rows.scales != 0, rows, count, p, p_step, out, heads)
    else:
        _accumulate(32, width, False, rows, count, p, p_step, out, heads)
