"""Vector code that compiled loops would not become: rows by address, query heads side by side, exponentials.

Written in LLVM IR, since compiled loops would spill these accumulators and read a row once per query head. A tile is `LANES`
pairs of (token, query head): their sums fill half of the vector registers, and one register holds the result. All arguments
are addresses and numbers of bytes or entries. A caller must use its arrays after the call, else numba frees them before it.

Rows hold fp32 numbers; `any_dot` and `any_add` also take rows of 16 bits, which are widened in registers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels.registers import (
    CACHE_LINE,
    F32,
    FEATURES,
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    WORDS,
    fetch_lines,
    floats,
    load,
    multiply_add,
    number,
    spread,
    store,
    sums,
    words,
)

# what rows may hold -> a number whose type tells kernels so
KINDS: dict[torch.dtype, Any] = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
if "+f16c" in FEATURES or platform.machine() in (
    "aarch64",
    "arm64",
):  # elsewhere fp16 is converted by a call per number
    KINDS[torch.float16] = np.int16(0)

FP32 = KINDS[torch.float32]
ROWS = 4  # rows of V that are added at a time


def _load_row(builder: Any, start: Any, offset: Any, kind: Any) -> Any:
    """LANES numbers of a row as fp32; `offset` is that in bytes of a row of fp32. kind: the type of a value of KINDS."""
    if kind == types.float32:
        return load(builder, builder.add(start, offset), FLOATS)
    raw = load(builder, builder.add(start, builder.lshr(offset, number(1))), ir.VectorType(I16, LANES))
    if kind == types.int16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    # bfloat16 is the upper half of fp32
    return builder.bitcast(builder.shl(builder.zext(raw, WORDS), words(16)), FLOATS)


def _for_vectors(builder: Any, d: Any, visit: Callable[[Any, Callable[[Any], Any]], None]) -> None:
    """Call visit(offset in bytes, keep) for every vector of d >= LANES floats.

    The last one may overlap the one before: `keep` then sets to 0 those lanes of a vector that were visited before.
    """
    whole = builder.udiv(d, number(LANES))
    with cgutils.for_range(builder, whole) as loop:
        visit(builder.mul(loop.index, number(4 * LANES)), lambda vector: vector)
    rest = builder.sub(d, builder.mul(whole, number(LANES)))
    with builder.if_then(builder.icmp_unsigned("!=", rest, number(0)), likely=False):
        first = builder.trunc(builder.sub(number(LANES), rest), I32)
        lane = ir.Constant(WORDS, list(range(LANES)))
        new = builder.icmp_unsigned(">=", lane, spread(builder, first))
        last = builder.mul(builder.sub(d, number(LANES)), number(4))
        visit(last, lambda vector: builder.select(new, vector, floats(0.0)))


def _dot(builder: Any, heads: int, kind: Any, args: Any) -> None:
    """The code of `make_dot`."""
    rows, query, query_step, d, out, out_step = args
    tokens = LANES // heads
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in range(tokens)] for _ in range(heads)]
    for place in (place for of_head in totals for place in of_head):
        builder.store(floats(0.0), place)
    starts = [load(builder, builder.add(rows, number(8 * t)), I64) for t in range(tokens)]
    queries = [builder.add(query, builder.mul(query_step, number(a))) for a in range(heads)]

    def multiply(offset: Any, keep: Callable[[Any], Any]) -> None:
        keys = [keep(_load_row(builder, start, offset, kind)) for start in starts]
        for line, of_head in zip(queries, totals, strict=True):
            part = load(builder, builder.add(line, offset), FLOATS)
            for key, place in zip(keys, of_head, strict=True):
                builder.store(multiply_add(builder, part, key, builder.load(place)), place)

    _for_vectors(builder, d, multiply)
    joined = sums(builder, [builder.load(place) for of_head in totals for place in of_head])
    for a in range(heads):
        lanes = ir.Constant(ir.VectorType(I32, tokens), [a * tokens + t for t in range(tokens)])
        mine = builder.shuffle_vector(joined, ir.Constant(FLOATS, ir.Undefined), lanes)
        store(builder, mine, builder.add(out, builder.mul(out_step, number(a))))


def _add(builder: Any, heads: int, kind: Any, args: Any) -> None:
    """The code of `make_add`."""
    rows, weights, weight_step, d, out, out_step = args
    starts = [load(builder, builder.add(rows, number(8 * i)), I64) for i in range(ROWS)]
    shares = []
    for a in range(heads):
        line = builder.add(weights, builder.mul(weight_step, number(a)))
        shares.append([spread(builder, load(builder, builder.add(line, number(4 * i)), F32)) for i in range(ROWS)])
    places = [builder.add(out, builder.mul(out_step, number(a))) for a in range(heads)]

    def accumulate(offset: Any, keep: Callable[[Any], Any]) -> None:
        values = [keep(_load_row(builder, start, offset, kind)) for start in starts]
        for place, mine in zip(places, shares, strict=True):
            to = builder.add(place, offset)
            total = load(builder, to, FLOATS)
            for share, value in zip(mine, values, strict=True):
                total = multiply_add(builder, share, value, total)
            store(builder, total, to)

    _for_vectors(builder, d, accumulate)


def make_dot(heads: int) -> Any:
    """The products of LANES / heads rows with `heads` queries, as a numba intrinsic."""

    @intrinsic
    def dot(typingctx, kind, rows, query, query_step, d, out, out_step):
        """out[head, token] = query . row over d >= LANES entries.

        kind: a value of KINDS; rows: address of the rows' addresses; queries and heads of out so many bytes apart.
        """

        def generate(context, builder, signature, args):
            _dot(builder, heads, kind, args[1:])
            return context.get_dummy_value()

        return types.void(kind, *[types.intp] * 6), generate

    return dot


def make_add(heads: int) -> Any:
    """The weighted sum of ROWS rows for `heads` heads, as a numba intrinsic."""

    @intrinsic
    def add(typingctx, kind, rows, weights, weight_step, d, out, out_step):
        """out[head] += sum over rows of weights[head, row] times the row, d >= LANES entries; heads so many bytes apart.

        kind: a value of KINDS.
        """

        def generate(context, builder, signature, args):
            _add(builder, heads, kind, args[1:])
            return context.get_dummy_value()

        return types.void(kind, *[types.intp] * 6), generate

    return add


def _generate_fetch(typingctx: Any, address: Any, size: Any) -> Any:
    """Prefetch `size` bytes at the address into the caches, without waiting."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fetch_lines(builder, args[0], builder.add(args[1], number(CACHE_LINE - 1)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


_dot1, _dot2, _dot4 = (make_dot(heads) for heads in (1, 2, 4))
_add1, _add2, _add4 = (make_add(heads) for heads in (1, 2, 4))


@numba.njit(nogil=True, inline="always")
def dot(heads, kind, rows, query, query_step, d, out, out_step):
    """By the heads of a block, 1, 2 or 4; see make_dot."""
    if heads == 4:
        _dot4(kind, rows, query, query_step, d, out, out_step)
    elif heads == 2:
        _dot2(kind, rows, query, query_step, d, out, out_step)
    else:
        _dot1(kind, rows, query, query_step, d, out, out_step)


@numba.njit(nogil=True, inline="always")
def add(heads, kind, rows, weights, weight_step, d, out, out_step):
    """By the heads of a block, 1, 2 or 4; see make_add."""
    if heads == 4:
        _add4(kind, rows, weights, weight_step, d, out, out_step)
    elif heads == 2:
        _add2(kind, rows, weights, weight_step, d, out, out_step)
    else:
        _add1(kind, rows, weights, weight_step, d, out, out_step)


fetch: Any = intrinsic(_generate_fetch)


def head_block(g: int, most: int = 4) -> tuple[int, int]:
    """Query heads that share a tile where a group has g of them, a power of two up to `most`, and g rounded up to whole tiles."""
    block = min(most, 1 << (g - 1).bit_length())
    return block, -(-g // block) * block
