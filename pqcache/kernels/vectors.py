"""Vector code that compiled loops would not become: rows by address, query heads side by side, exponentials.

Written in LLVM IR, since compiled loops would spill these accumulators and read a row once per query head. A tile is `LANES`
pairs of (token, query head): their sums fill half of the vector registers, and one register holds the result. All arguments
are addresses and numbers of bytes or entries. A caller must use its arrays after the call, else numba frees them before it.

Rows hold fp32 numbers; `any_dot` and `any_add` also take rows of 16 bits, which are widened in registers. numba's cache on disk
looks at a kernel's own file alone: a kernel with `STAMP` in its closure is compiled again when this file changes.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels.nearest import FEATURES, LANES

STAMP = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
# what rows may hold -> a number whose type tells kernels so
KINDS: dict[torch.dtype, Any] = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
if "+f16c" in FEATURES or platform.machine() in (
    "aarch64",
    "arm64",
):  # elsewhere fp16 is converted by a call per number
    KINDS[torch.float16] = np.int16(0)

FP32 = KINDS[torch.float32]
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _WHOLE = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_LINE = 64  # bytes of a cache line
ROWS = 4  # rows of V that are added at a time
_LEAST = -110.0  # nats below which an exponential is 0 in fp32


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_at(builder, address, kind), align=kind.width // 8 if kind is _I64 else 4)


def _load_row(builder: Any, start: Any, offset: Any, number: Any) -> Any:
    """LANES numbers of a row as fp32; `offset` is that in bytes of a row of fp32. number: the type of a value of KINDS."""
    if number == types.float32:
        return _load(builder, builder.add(start, offset), _VECTOR)
    place = builder.add(start, builder.lshr(offset, _number(1)))
    raw = builder.load(_at(builder, place, ir.VectorType(_I16, LANES)), align=2)
    if number == types.int16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)
    # bfloat16 is the upper half of fp32
    return builder.bitcast(builder.shl(builder.zext(raw, _WHOLE), ir.Constant(_WHOLE, [16] * LANES)), _VECTOR)


def _spread(builder: Any, scalar: Any, kind: Any = _VECTOR) -> Any:
    """A vector that has the scalar in every lane."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_WHOLE, [0] * LANES))


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _plus(builder: Any, address: Any, count: Any, size: int) -> Any:
    """The address of entry `count` of `size` bytes each."""
    return builder.add(address, builder.mul(count, _number(size)))


def _fma(builder: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """The sums over the lanes of LANES vectors, as one vector."""
    half = LANES // 2
    while half:
        low = [base + i for base in range(0, LANES, 2 * half) for i in (*range(half), *range(LANES, LANES + half))]
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [
            builder.fadd(
                *(builder.shuffle_vector(x, y, ir.Constant(_WHOLE, [i + up for i in low])) for up in (0, half))
            )
            for x, y in pairs
        ]
        half //= 2
    return vectors[0]


def _for_vectors(builder: Any, d: Any, visit: Callable[[Any, Callable[[Any], Any]], None]) -> None:
    """Call visit(offset in bytes, keep) for every vector of d >= LANES floats.

    The last one may overlap the one before: `keep` then sets to 0 those lanes of a vector that were visited before.
    """
    whole = builder.udiv(d, _number(LANES))
    with cgutils.for_range(builder, whole) as loop:
        visit(builder.mul(loop.index, _number(4 * LANES)), lambda vector: vector)
    rest = builder.sub(d, builder.mul(whole, _number(LANES)))
    with builder.if_then(builder.icmp_unsigned("!=", rest, _number(0)), likely=False):
        first = builder.trunc(builder.sub(_number(LANES), rest), _I32)
        lane = ir.Constant(_WHOLE, list(range(LANES)))
        new = builder.icmp_unsigned(">=", lane, _spread(builder, first, _WHOLE))
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        visit(builder.mul(builder.sub(d, _number(LANES)), _number(4)), lambda vector: builder.select(new, vector, zero))


def _dot(builder: Any, heads: int, number: Any, args: Any) -> None:
    """The code of `make_dot`."""
    rows, query, query_step, d, out, out_step = args
    fma, tokens = _fma(builder), LANES // heads
    sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(tokens)] for _ in range(heads)]
    for place in (place for of_head in sums for place in of_head):
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), place)
    starts = [_load(builder, builder.add(rows, _number(8 * t)), _I64) for t in range(tokens)]
    queries = [builder.add(query, builder.mul(query_step, _number(a))) for a in range(heads)]

    def multiply(offset: Any, keep: Callable[[Any], Any]) -> None:
        keys = [keep(_load_row(builder, start, offset, number)) for start in starts]
        for line, of_head in zip(queries, sums, strict=True):
            part = _load(builder, builder.add(line, offset), _VECTOR)
            for key, place in zip(keys, of_head, strict=True):
                builder.store(builder.call(fma, [part, key, builder.load(place)]), place)

    _for_vectors(builder, d, multiply)
    total = _sums(builder, [builder.load(place) for of_head in sums for place in of_head])
    kind = ir.VectorType(_F32, tokens)
    for a in range(heads):
        lanes = ir.Constant(ir.VectorType(_I32, tokens), [a * tokens + t for t in range(tokens)])
        mine = builder.shuffle_vector(total, ir.Constant(_VECTOR, ir.Undefined), lanes)
        place = builder.add(out, builder.mul(out_step, _number(a)))
        builder.store(mine, _at(builder, place, kind), align=4)


def _add(builder: Any, heads: int, number: Any, args: Any) -> None:
    """The code of `make_add`."""
    rows, weights, weight_step, d, out, out_step = args
    fma = _fma(builder)
    starts = [_load(builder, builder.add(rows, _number(8 * i)), _I64) for i in range(ROWS)]
    shares = []
    for a in range(heads):
        line = builder.add(weights, builder.mul(weight_step, _number(a)))
        each = [_load(builder, builder.add(line, _number(4 * i)), _F32) for i in range(ROWS)]
        shares.append([_spread(builder, share) for share in each])
    places = [builder.add(out, builder.mul(out_step, _number(a))) for a in range(heads)]

    def accumulate(offset: Any, keep: Callable[[Any], Any]) -> None:
        values = [keep(_load_row(builder, start, offset, number)) for start in starts]
        for place, mine in zip(places, shares, strict=True):
            to = _at(builder, builder.add(place, offset), _VECTOR)
            total = builder.load(to, align=4)
            for share, value in zip(mine, values, strict=True):
                total = builder.call(fma, [share, value, total])
            builder.store(total, to, align=4)

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


def _power_of_two(builder: Any, exponent: Any) -> Any:
    """2 to integers of -126 .. 127, by their place among a float's bits."""
    bits = builder.shl(builder.add(exponent, ir.Constant(_WHOLE, [127] * LANES)), ir.Constant(_WHOLE, [23] * LANES))
    return builder.bitcast(bits, _VECTOR)


def _exponential(builder: Any, x: Any) -> Any:
    """exp(x) for x <= 0, 0 for -inf, to 1e-7; subnormal results are rounded as any others.

    x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) is its Taylor polynomial, 2^n two factors, so that neither underflows.
    """

    def constant(value: float) -> Any:
        return ir.Constant(_VECTOR, [float(np.float32(value))] * LANES)

    fma = _fma(builder)
    low = builder.fcmp_ordered("<", x, constant(_LEAST))
    x = builder.select(low, constant(_LEAST), x)
    whole = 1.5 * 2**23  # adding it rounds a float to an integer, which its low bits then are
    shifted = builder.call(fma, [x, constant(1 / np.log(2)), constant(whole)])
    n = builder.fsub(shifted, constant(whole))
    high = float(np.float32(0.693359375))  # ln 2 in nine bits: its products with n are exact
    r = builder.call(fma, [n, constant(-high), x])
    r = builder.call(fma, [n, constant(high - np.log(2)), r])
    total = constant(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        total = builder.call(fma, [total, r, constant(1 / factorial)])
    integer = builder.sub(builder.bitcast(shifted, _WHOLE), builder.bitcast(constant(whole), _WHOLE))
    first = builder.ashr(integer, ir.Constant(_WHOLE, [1] * LANES))
    total = builder.fmul(total, _power_of_two(builder, first))
    return builder.fmul(total, _power_of_two(builder, builder.sub(integer, first)))


def _across(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """The lanes of a vector, combined to one number."""
    lane = LANES // 2
    while lane:
        lanes = ir.Constant(_WHOLE, [i ^ lane for i in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), lanes))
        lane //= 2
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _generate_exp(typingctx: Any, at: Any, count: Any, shift: Any) -> Any:
    """count floats x at an address, a multiple of LANES, become exp(x - shift), no x being above shift; returns their sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at, count, shift = args
        total = cgutils.alloca_once(builder, _VECTOR)
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
        top = _spread(builder, shift)
        with cgutils.for_range(builder, builder.udiv(count, _number(LANES))) as loop:
            place = _at(builder, _plus(builder, at, loop.index, 4 * LANES), _VECTOR)
            value = _exponential(builder, builder.fsub(builder.load(place, align=4), top))
            builder.store(value, place, align=4)
            builder.store(builder.fadd(builder.load(total), value), total)
        return _across(builder, builder.load(total), builder.fadd)

    return types.float32(types.intp, types.intp, types.float32), generate


def _generate_largest(typingctx: Any, at: Any, count: Any) -> Any:
    """The largest of `count` floats at an address, a multiple of LANES and at least one, NaN left out."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at, count = args
        best = cgutils.alloca_once(builder, _VECTOR)
        builder.store(ir.Constant(_VECTOR, [float("-inf")] * LANES), best)

        def greater(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        with cgutils.for_range(builder, builder.udiv(count, _number(LANES))) as loop:
            place = _at(builder, _plus(builder, at, loop.index, 4 * LANES), _VECTOR)
            builder.store(greater(builder.load(place, align=4), builder.load(best)), best)
        return _across(builder, builder.load(best), greater)

    return types.float32(types.intp, types.intp), generate


def _generate_fetch(typingctx: Any, address: Any, size: Any) -> Any:
    """Prefetch `size` bytes at the address into the caches, without waiting."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        last = builder.add(args[1], ir.Constant(ir.IntType(64), _LINE - 1))
        lines = builder.udiv(last, ir.Constant(ir.IntType(64), _LINE))
        with cgutils.for_range(builder, lines) as loop:
            at = builder.add(args[0], builder.mul(loop.index, ir.Constant(ir.IntType(64), _LINE)))
            read, near, data = (ir.Constant(word, value) for value in (0, 2, 1))  # into the second-level cache
            builder.call(prefetch, [builder.inttoptr(at, byte), read, near, data])
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


largest: Any = intrinsic(_generate_largest)
exp_below: Any = intrinsic(_generate_exp)
fetch: Any = intrinsic(_generate_fetch)


def head_block(g: int) -> tuple[int, int]:
    """Query heads that share a tile where a group has g of them, and g rounded up to whole tiles."""
    block = min(4, 1 << (g - 1).bit_length())
    return block, -(-g // block) * block
