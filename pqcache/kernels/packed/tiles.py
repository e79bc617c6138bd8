"""Products of query heads with packed codes, and their weighted sums: codes are unpacked in registers only.

A byte holds 1, 2 or 4 codes, `per` of them. Queries and sums have their channels in the order of planes: first the channels whose
codes are the lowest in their bytes, then the next ones. So a loop over bytes meets channels side by side in every plane. Codes of
32 bits are the numbers themselves.

Each loop is compiled apart for the bits of a code, the bytes of a token, its groups of channels and the query heads of a block,
when codes like that are first met: loops of unknown length would spend half their time on their ends, and one kernel with all of
them would take long to compile. The kernel calls them by their addresses.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels.launch import STAMP
from pqcache.kernels.numeric import FAST, at, eight, fetch, floats, look_up, tuple_setitem, whole_registers

TILE = 128  # tokens between two updates of the running maximum; its codes fit the nearest cache
LINE = TILE + 4  # floats of a head's logits: values are added four tokens at a time
MOST_HEADS = 4  # query heads of a block
READ = (2, 4, 8, 32)  # bits of codes that are read in place
_LONG = 16  # bytes of a group that have a loop of their own


@numba.njit(nogil=True, inline="always")
def _row(bits, address, width, listed, table, space):
    """The bytes of a token, or its numbers; those that codes have in a table are written to `space`."""
    if listed == 1:
        look_up(address, table, space, width, bits)
        return floats(space, 8 // bits * width)
    return floats(address, width) if bits == 32 else at(address, width, np.uint8(0))


@numba.njit(nogil=True, inline="always")
def _number(bits, row, c, plane, listed, width):
    """The code of a plane in byte c, or its number."""
    if listed == 1:
        return row[plane * width + c]
    if bits == 32:
        return np.float32(row[c])
    return np.float32(np.uint8((np.uint8(row[c]) >> np.uint8(plane * bits)) & np.uint8((1 << min(bits, 8)) - 1)))


@numba.njit(nogil=True, inline="always")
def _in_place(bits, row, c, plane, listed, width):
    """`_number` times 2^(plane bits) where codes are smaller than a byte: moving bits would take as long as the products."""
    if listed == 1 or bits == 32:
        return _number(bits, row, c, plane, listed, width)
    return np.float32(np.int32(row[c]) & np.int32(((1 << min(bits, 8)) - 1) << (plane * bits)))


@numba.njit(nogil=True, inline="always")
def _per_byte(each, count, numbers, space):
    """The address of `count` numbers of groups; of small groups, of a number of each of their bytes, written to `space`."""
    if each >= _LONG:
        return numbers
    source, out = floats(numbers, count), floats(space, count * each)
    for i in range(count):
        number = source[i]
        if each >= 8:  # one store for eight bytes, where LLVM makes eight
            eight(space + 4 * i * each, number)
            eight(space + 4 * ((i + 1) * each - 8), number)
        else:
            for c in range(each):
                out[i * each + c] = number
    return space


def products(bits: int, width: int, groups: int, heads: int, listed: int, stamp: str) -> Callable[..., None]:
    """Write q_a . x_i of `count` tokens from an address on to out[a, i] (heads, LINE). width: bytes of a token, or numbers.

    steps, lows (count, groups), used where a token has several; space for two floats per byte. The codes of as many keys and
    values are fetched meanwhile: the processor fetches on its own only within a page of memory, and a tile fills a few.
    listed: 1 where codes stand for the numbers of a table.
    """
    per, each = max(1, 8 // bits), width // groups
    many = 1 if groups > 1 else 2  # tokens at a time: the sums of one would wait for each other
    short, zeros = groups > 1 and each < _LONG, (np.float32(0),) * (heads * many)
    # loops over a token's bytes, bytes of a loop, steps of a token
    loops, span, size = (1, width, width) if short else (groups, each, groups)

    def run(address, stride, count, steps, lows, space, query, out_at, keys, key_size, values, value_size, table):
        stamp  # noqa: B018
        whole_registers()
        q, out = floats(query, heads * width * per), floats(out_at, heads * LINE)
        if groups > 1:
            steps = _per_byte(each, count * groups, steps, space)
            lows = _per_byte(each, count * groups, lows, space + 4 * count * width)
        elif per > 1 and listed == 0:  # see `_in_place`
            q = floats(space, heads * width * per)
            for part in range(heads * per):
                source, to = floats(query + 4 * part * width, width), floats(space + 4 * part * width, width)
                unit = np.float32(1) / np.float32(1 << (part % per * bits))
                for c in range(width):
                    to[c] = source[c] * unit
        for i in range(0, count, many):
            fetch(keys + i * key_size, many * key_size)
            fetch(values + i * value_size, many * value_size)
            other = min(i + many, count) - 1
            row = _row(bits, address + i * stride, width, listed, table, space)
            row1 = _row(bits, address + other * stride, width, listed, table, space + 4 * per * width)
            step, low, sums = floats(steps + 4 * i * size, size), floats(lows + 4 * i * size, size), zeros
            for loop in range(loops):
                s, l = step[loop], low[loop]  # noqa: E741
                for c in range(loop * span, (loop + 1) * span):
                    for plane in range(per):
                        if groups > 1:
                            x = _number(bits, row, c, plane, listed, width)
                            x = x * (step[c] if short else s) + (low[c] if short else l)
                        else:
                            x = _in_place(bits, row, c, plane, listed, width)
                        for a in range(heads):
                            sums = tuple_setitem(sums, a, sums[a] + q[(a * per + plane) * width + c] * x)
                        if many > 1:
                            x = _in_place(bits, row1, c, plane, listed, width)
                            for a in range(heads):
                                b = heads + a
                                sums = tuple_setitem(sums, b, sums[b] + q[(a * per + plane) * width + c] * x)
            for a in range(heads):
                out[a * LINE + i] = sums[a]
                if many > 1:
                    out[a * LINE + i + 1] = sums[heads + a]

    return run


def weighted(bits: int, width: int, groups: int, heads: int, listed: int, stamp: str) -> Callable[..., None]:
    """Add to out (heads, channels by planes) the sum over `count` tokens of p[a, i] x_i, four tokens at a time.

    p (heads, LINE) is 0 from `count` up to a multiple of 4. Otherwise as `products`.
    """
    per, each, zeros = max(1, 8 // bits), width // groups, (np.float32(0),) * heads
    short = groups > 1 and each < _LONG
    # loops over a token's bytes, bytes of a loop, steps of a token
    loops, span, size = (1, width, width) if short else (groups, each, groups)

    def run(address, stride, count, steps, lows, space, weights, out_at, table):
        stamp  # noqa: B018
        whole_registers()
        out, p = floats(out_at, heads * width * per), floats(weights, heads * LINE)
        if groups > 1:
            steps = _per_byte(each, count * groups, steps, space)
            lows = _per_byte(each, count * groups, lows, space + 4 * count * width)
        for i in range(0, count, 4):
            last = count - 1
            i1, i2, i3 = min(i + 1, last), min(i + 2, last), min(i + 3, last)
            r0 = _row(bits, address + i * stride, width, listed, table, space)
            r1 = _row(bits, address + i1 * stride, width, listed, table, space + 4 * per * width)
            r2 = _row(bits, address + i2 * stride, width, listed, table, space + 8 * per * width)
            r3 = _row(bits, address + i3 * stride, width, listed, table, space + 12 * per * width)
            at0, at1, at2, at3 = 4 * i * size, 4 * i1 * size, 4 * i2 * size, 4 * i3 * size
            s0, s1 = floats(steps + at0, size), floats(steps + at1, size)
            s2, s3 = floats(steps + at2, size), floats(steps + at3, size)
            l0, l1 = floats(lows + at0, size), floats(lows + at1, size)
            l2, l3 = floats(lows + at2, size), floats(lows + at3, size)
            p0 = p1 = p2 = p3 = zeros
            for a in range(heads):
                p0, p1 = tuple_setitem(p0, a, p[a * LINE + i]), tuple_setitem(p1, a, p[a * LINE + i + 1])
                p2, p3 = tuple_setitem(p2, a, p[a * LINE + i + 2]), tuple_setitem(p3, a, p[a * LINE + i + 3])
            for loop in range(loops):
                t0, t1, t2, t3 = s0[loop], s1[loop], s2[loop], s3[loop]
                u0, u1, u2, u3 = l0[loop], l1[loop], l2[loop], l3[loop]
                for c in range(loop * span, (loop + 1) * span):
                    for plane in range(per):
                        x0 = _number(bits, r0, c, plane, listed, width)
                        x1 = _number(bits, r1, c, plane, listed, width)
                        x2 = _number(bits, r2, c, plane, listed, width)
                        x3 = _number(bits, r3, c, plane, listed, width)
                        if short:
                            x0, x1 = x0 * s0[c] + l0[c], x1 * s1[c] + l1[c]
                            x2, x3 = x2 * s2[c] + l2[c], x3 * s3[c] + l3[c]
                        elif groups > 1:
                            x0, x1, x2, x3 = x0 * t0 + u0, x1 * t1 + u1, x2 * t2 + u2, x3 * t3 + u3
                        for a in range(heads):
                            out[(a * per + plane) * width + c] += p0[a] * x0 + p1[a] * x1 + p2[a] * x2 + p3[a] * x3

    return run


@cache
def compiled(
    make: Callable[..., Callable[..., None]], bits: int, width: int, groups: int, heads: int, listed: int
) -> Any:
    """`products` or `weighted` of these constants, compiled; its `address` is what `call` takes."""
    function = make(bits, width, groups, heads, listed, STAMP)
    signature = types.void(*[types.intp] * function.__code__.co_argcount)
    return numba.cfunc(signature, cache=True, fastmath=FAST)(function)


def _generate_call(typingctx: Any, address: Any, args: Any) -> Any:
    """Call the function of `compiled` at an address, with a tuple of integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [number.type for number in numbers])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, args.count)), generate


call: Any = intrinsic(_generate_call)
