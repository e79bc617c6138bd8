"""Loops over rows of K and V: products with queries, exponentials, weighted sums, and how parts are joined.

`products` and `add_rows` make loops that kernels call by their addresses (loops.py); the others are compiled into the kernels.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from pqcache.kernels.loops import compiled
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
    part,
    tuple_setitem,
    whole_registers,
    wide,
)

AHEAD = 16  # rows fetched before they are read: no processor predicts the address of the next chosen token
# head dimensions with loops of their own; others share a loop, which is told the dimension at each call
_CONSTANT = (64, 128)


def products(kind: str, known: int, heads: int, stamp: str) -> Callable[..., None]:
    """Logits (g', > count), `step` numbers apart, of queries (g', d) with `count` rows at these addresses.

    g' is a multiple of `heads`, which share what is read of a row. Up to one number behind the last row's is written.
    """
    number, item, zeros = np.dtype(kind).type(0), np.dtype(kind).itemsize, (np.float32(0),) * heads

    def run(queries, g, length, places, count, logits, step):
        stamp  # noqa: B018
        whole_registers()
        d = known if known else length
        size, rows = item * d, at(places, count, np.int64(0))
        for i in range(min(AHEAD, count)):
            fetch(rows[i], size)
        for block in range(0, g, heads):
            query = floats(queries + 4 * block * d, heads * d)
            out = floats(logits + 4 * block * step, heads * step)
            for i in range(0, count, 2):  # two rows share what is read of the queries
                for ahead in range(i + AHEAD, min(i + AHEAD + 2, count)):
                    fetch(rows[ahead], size)
                row, other = at(rows[i], d, number), at(rows[min(i + 1, count - 1)], d, number)
                first = second = zeros
                for j in range(d):
                    x, y = wide(row[j]), wide(other[j])
                    for a in range(heads):
                        first = tuple_setitem(first, a, first[a] + query[a * d + j] * x)
                        second = tuple_setitem(second, a, second[a] + query[a * d + j] * y)
                for a in range(heads):
                    out[a * step + i], out[a * step + i + 1] = first[a], second[a]

    return run


def add_rows(kind: str, known: int, heads: int, stamp: str) -> Callable[..., None]:
    """Add to sums (g', d) the weights (g', step) times `count` rows; weights and places are written up to a multiple of 4."""
    number, item, zeros = np.dtype(kind).type(0), np.dtype(kind).itemsize, (np.float32(0),) * heads

    def run(weights, step, g, length, places, count, sums):
        stamp  # noqa: B018
        whole_registers()
        d = known if known else length
        size, rows = item * d, at(places, count + 3, np.int64(0))
        for i in range(count, count + 3):
            rows[i] = rows[count - 1]
        for block in range(0, g, heads):
            w, out = floats(weights + 4 * block * step, heads * step), floats(sums + 4 * block * d, heads * d)
            for a in range(heads):
                for i in range(count, count + 3):
                    w[a * step + i] = 0
            for i in range(0, count, 4):
                for ahead in range(i + AHEAD, min(i + AHEAD + 4, count)):
                    fetch(rows[ahead], size)
                v0, v1, v2, v3 = (
                    at(rows[i], d, number), at(rows[i + 1], d, number), at(rows[i + 2], d, number), at(rows[i + 3], d, number),
                )  # fmt: skip
                w0 = w1 = w2 = w3 = zeros
                for a in range(heads):
                    w0, w1 = tuple_setitem(w0, a, w[a * step + i]), tuple_setitem(w1, a, w[a * step + i + 1])
                    w2, w3 = tuple_setitem(w2, a, w[a * step + i + 2]), tuple_setitem(w3, a, w[a * step + i + 3])
                for j in range(d):
                    x0, x1, x2, x3 = wide(v0[j]), wide(v1[j]), wide(v2[j]), wide(v3[j])
                    for a in range(heads):
                        out[a * d + j] += w0[a] * x0 + w1[a] * x1 + w2[a] * x2 + w3[a] * x3

    return run


@cache
def loop_at(make: Callable[..., Callable[..., None]], kind: str, d: int, heads: int) -> int:
    """The address of `products` or `add_rows` for rows of d numbers of a kind (numeric.KINDS), `heads` query heads at a time."""
    return compiled(make, kind, d if d in _CONSTANT else 0, heads).address


@part(fastmath=FAST)
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


@part(fastmath=FAST)
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


@part(fastmath=FAST)
def add_probabilities(kept, lse, sums, each, step):
    """sums (E, T) += the probabilities of logits kept (g, T), of each head (E = g) or their mean (E = 1). sums: an address."""
    g = kept.shape[0]
    for a in range(g):
        line, of_head = kept[a], floats(sums + a % each * step, kept.shape[1])
        exponentials(line, lse[0, a], LEAST, SCALE)
        share = np.float32(each) / np.float32(g) / lse[1, a]
        for i in range(line.shape[0]):
            of_head[i] += line[i] * share * BACK
