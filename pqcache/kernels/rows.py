"""Loops over rows of K and V: products with queries, exponentials, weighted sums, and how parts are joined.

They are compiled into the kernels of attend.py and packed/.
"""

import numba
import numpy as np

from pqcache.kernels.numeric import (
    BACK,
    FAST,
    LEAST,
    NEGLIGIBLE,
    SCALE,
    at,
    exponentials,
    fetch,
    floats,
    largest,
    tuple_setitem,
    whole_registers,
    wide,
)

AHEAD = 16  # rows fetched before they are read: no processor predicts the address of the next chosen token


@numba.njit(nogil=True, inline="always", fastmath=FAST)
def dots(d, kind, size, query, rows, count, heads, out, step):
    """`products` of one block of heads; d may be a constant. Two rows share what is read of the queries."""
    for i in range(0, count, 2):
        for ahead in range(i + AHEAD, min(i + AHEAD + 2, count)):
            fetch(rows[ahead], size)
        row, other = at(rows[i], d, kind), at(rows[min(i + 1, count - 1)], d, kind)
        first = second = heads
        for j in range(d):
            x, y = wide(row[j]), wide(other[j])
            for a in range(len(heads)):
                first = tuple_setitem(first, a, first[a] + query[a * d + j] * x)
                second = tuple_setitem(second, a, second[a] + query[a * d + j] * y)
        for a in range(len(heads)):
            out[a * step + i], out[a * step + i + 1] = first[a], second[a]


@numba.njit(nogil=True, inline="always", fastmath=FAST)
def add_tile(d, kind, size, weights, step, rows, count, heads, out):
    """`add_rows` of one block of heads; d may be a constant."""
    for i in range(0, count, 4):
        for ahead in range(i + AHEAD, min(i + AHEAD + 4, count)):
            fetch(rows[ahead], size)
        v0, v1, v2, v3 = (
            at(rows[i], d, kind),
            at(rows[i + 1], d, kind),
            at(rows[i + 2], d, kind),
            at(rows[i + 3], d, kind),
        )
        w0 = w1 = w2 = w3 = heads
        for a in range(len(heads)):
            w0, w1 = tuple_setitem(w0, a, weights[a * step + i]), tuple_setitem(w1, a, weights[a * step + i + 1])
            w2, w3 = tuple_setitem(w2, a, weights[a * step + i + 2]), tuple_setitem(w3, a, weights[a * step + i + 3])
        for j in range(d):
            x0, x1, x2, x3 = wide(v0[j]), wide(v1[j]), wide(v2[j]), wide(v3[j])
            for a in range(len(heads)):
                out[a * d + j] += w0[a] * x0 + w1[a] * x1 + w2[a] * x2 + w3[a] * x3


# compiled for the common head dimensions: short loops of unknown length would spend much of their time on their ends
@numba.njit(nogil=True, fastmath=FAST)
def products(kind, size, query, rows, count, heads, logits):
    """logits (g', > count) of queries (g', d) with rows of `size` bytes at these addresses; heads: see `block`.

    Up to one number behind the last row's is written.
    """
    whole_registers()
    d, step = query.shape[1], logits.strides[0] // 4
    for i in range(min(AHEAD, count)):
        fetch(rows[i], size)
    for a in range(0, query.shape[0], len(heads)):
        q = floats(query.ctypes.data + 4 * a * d, len(heads) * d)
        out = floats(logits.ctypes.data + 4 * a * step, len(heads) * step)
        if d == 128:
            dots(128, kind, size, q, rows, count, heads, out, step)
        elif d == 64:
            dots(64, kind, size, q, rows, count, heads, out, step)
        else:
            dots(d, kind, size, q, rows, count, heads, out, step)


@numba.njit(nogil=True, fastmath=FAST)
def add_rows(kind, size, weights, rows, count, heads, sums):
    """sums (g', d) += weights (g', TILE + 3) times the rows; weights and addresses are written up to a multiple of 4."""
    whole_registers()
    d, step = sums.shape[1], weights.shape[1]
    for i in range(count, count + 3):
        rows[i], weights[:, i] = rows[count - 1], 0
    for a in range(0, sums.shape[0], len(heads)):
        w = floats(weights.ctypes.data + 4 * a * step, len(heads) * step)
        out = floats(sums.ctypes.data + 4 * a * d, len(heads) * d)
        if d == 128:
            add_tile(128, kind, size, w, step, rows, count, heads, out)
        elif d == 64:
            add_tile(64, kind, size, w, step, rows, count, heads, out)
        else:
            add_tile(d, kind, size, w, step, rows, count, heads, out)


@numba.njit(nogil=True, fastmath=FAST)
def softmax(logits, count, high, mass, out):
    """Logits become weights relative to the running maxima `high`. If one grows, earlier sums are scaled down to it."""
    for a in range(high.shape[0]):
        line, sums = logits[a, :count], out[a]
        top = max(high[a], largest(line))
        if top == -np.inf:  # no token of this tile is this head's
            line[:] = 0
            continue
        if top > high[a]:
            shrink = np.exp(high[a] - top)
            mass[a] *= shrink
            for j in range(sums.shape[0]):
                sums[j] *= shrink
            high[a] = top
        mass[a] += exponentials(line, high[a], NEGLIGIBLE, 0)


@numba.njit(nogil=True, fastmath=FAST)
def join(outs, lse, result):
    """The softmax over all parts of a head: outs (parts, g', d), lse (parts, 2, g) -> result (g, d).

    NaN where no part has tokens. lse of the first part becomes the (maximum, sum) over all.
    """
    for a in range(result.shape[0]):
        line = result[a]
        line[:] = 0
        high, mass = lse[0, 0, a], np.float32(0)
        for p in range(1, outs.shape[0]):
            high = max(high, lse[p, 0, a])
        for p in range(outs.shape[0]):
            share, mine = np.exp(lse[p, 0, a] - high), outs[p, a]
            mass += share * lse[p, 1, a]
            for j in range(line.shape[0]):
                line[j] += share * mine[j]
        lse[0, 0, a], lse[0, 1, a] = high, mass
        share = np.float32(1) / mass if mass > 0 else np.float32(np.nan)
        for j in range(line.shape[0]):
            line[j] *= share


@numba.njit(nogil=True, fastmath=FAST)
def add_probabilities(kept, lse, sums):
    """sums (E, T) += the probabilities of logits kept (g, T), of each head (E = g) or their mean (E = 1)."""
    g, each = kept.shape[0], sums.shape[0]
    for a in range(g):
        line, of_head = kept[a], sums[a % each]
        exponentials(line, lse[0, a], LEAST, SCALE)
        share = np.float32(each) / np.float32(g) / lse[1, a]
        for i in range(line.shape[0]):
            of_head[i] += line[i] * share * BACK
