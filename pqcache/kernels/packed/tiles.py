"""Products of query heads with packed codes, and their weighted sums: a few tokens are decoded at a time, into the nearest cache.

Each loop is compiled apart (loops.py) for the bits of a code, the channels of a token, their groups and the query heads of a
block. Codes of 32 bits are the numbers themselves.
"""

from collections.abc import Callable

import numpy as np

from pqcache.kernels.numeric import decode, dots, fetch, floats, lanes_of, part, tuple_setitem, whole_registers

TILE = 128  # tokens between two updates of the running maximum; its codes fit the nearest cache
LINE = TILE + 4  # floats of a head's logits: values are added four tokens at a time
MOST_HEADS = 4  # query heads of a block
READ = (2, 4, 8, 32)  # bits of codes that are read in place


@part(inline="always")
def _rows(rows, bits, d, groups, listed, address, stride, i, last, steps, lows, table, space):
    """Where the numbers of tokens from i on are, or what their codes stand for, written to `space`; none is after the last."""
    for t in range(len(rows)):
        token, row = min(i + t, last), space + 4 * t * d
        step, low, codes = steps + 4 * token * groups, lows + 4 * token * groups, address + token * stride
        if bits == 32:
            row = codes
        else:
            decode(codes, row, step, low, table, d, bits, groups, listed)
        rows = tuple_setitem(rows, t, row)
    return rows


def products(bits: int, d: int, groups: int, heads: int, listed: int, stamp: str) -> Callable[..., None]:
    """Write q_a . x_i of `count` tokens from an address on to out[a, i] (heads, LINE). d: numbers of a token.

    steps, lows (count, groups), used where groups > 0; space: for the numbers of four tokens. The codes of as many keys and
    values are fetched meanwhile: the processor fetches on its own only within a page of memory, and a tile fills a few.
    listed: 1 where codes stand for the numbers of a table.
    """
    many = lanes_of(d) // MOST_HEADS  # tokens at a time: all sums fill one register
    nowhere, zeros = (0,) * many, (np.float32(0),) * heads

    def run(address, stride, count, steps, lows, space, query, out, keys, key_size, values, value_size, table):
        stamp  # noqa: B018
        whole_registers()
        for i in range(0, count, many):
            fetch(keys + i * key_size, many * key_size)
            fetch(values + i * value_size, many * value_size)
            last = count - 1
            rows = _rows(nowhere, bits, d, groups, listed, address, stride, i, last, steps, lows, table, space)
            dots(rows, query, out + 4 * i, 4 * LINE, zeros, d)

    return run


def weighted(bits: int, d: int, groups: int, heads: int, listed: int, stamp: str) -> Callable[..., None]:
    """Add to out (heads, d) the sum over `count` tokens of p[a, i] x_i, four tokens at a time.

    p (heads, LINE) is 0 from `count` up to a multiple of 4. Otherwise as `products`.
    """
    nowhere, zeros = (0,) * 4, (np.float32(0),) * heads

    def run(address, stride, count, steps, lows, space, weights, out_at, table):
        stamp  # noqa: B018
        whole_registers()
        out, p, last = floats(out_at, heads * d), floats(weights, heads * LINE), count - 1
        for i in range(0, count, 4):
            rows = _rows(nowhere, bits, d, groups, listed, address, stride, i, last, steps, lows, table, space)
            x0, x1, x2, x3 = floats(rows[0], d), floats(rows[1], d), floats(rows[2], d), floats(rows[3], d)
            p0 = p1 = p2 = p3 = zeros
            for a in range(heads):
                p0, p1 = tuple_setitem(p0, a, p[a * LINE + i]), tuple_setitem(p1, a, p[a * LINE + i + 1])
                p2, p3 = tuple_setitem(p2, a, p[a * LINE + i + 2]), tuple_setitem(p3, a, p[a * LINE + i + 3])
            for c in range(d):
                y0, y1, y2, y3 = x0[c], x1[c], x2[c], x3[c]  # read once, since `out` might overlap them
                for a in range(heads):
                    out[a * d + c] += p0[a] * y0 + p1[a] * y1 + p2[a] * y2 + p3[a] * y3

    return run
