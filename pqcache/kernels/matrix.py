"""Products of small matrices in vector registers: the tiles that a kernel's larger products are made of.

A tile is STRIP rows of the left matrix times WIDE columns of the right one. Its sums stay in registers. Each number of the left
matrix is spread over a register and multiplied with a line of the right one.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels.registers import (
    F32,
    FLOATS,
    LANES,
    WORDS,
    add,
    floats,
    floats_at,
    in_vectors,
    load,
    multiply_add,
    number,
    spread,
    store,
)

_VECTORS = 2  # side by side in a tile
STRIP = 12 if LANES == 16 else 6  # rows: STRIP * _VECTORS accumulators of 32 or 16 registers
WIDE = _VECTORS * LANES


def _make_product(adding: bool) -> Any:
    """The tile as an intrinsic; every argument is an address or a number of bytes, rows or entries."""

    @intrinsic
    def product(typingctx, a, a_step, rows, b, b_step, c, c_step, count):
        """c (rows, WIDE) = a (rows, count) b (count, WIDE), or += where `adding`; rows <= STRIP. Steps: bytes between lines."""
        signature = types.void(*[types.intp] * 8)

        def generate(context, builder, signature, args):
            a, a_step, rows, b, b_step, c, c_step, count = args
            last = builder.sub(rows, number(1))  # rows behind it are computed again, and written the same
            index = [builder.select(builder.icmp_signed("<", number(i), last), number(i), last) for i in range(STRIP)]
            left = [add(builder, a, builder.mul(i, a_step)) for i in index]
            places = [[add(builder, c, builder.mul(i, c_step), 4 * LANES * u) for u in range(_VECTORS)] for i in index]
            total = [[cgutils.alloca_once(builder, FLOATS) for _ in range(_VECTORS)] for _ in index]
            pairs = [pair for lines in zip(total, places, strict=True) for pair in zip(*lines, strict=True)]
            for held, place in pairs:
                builder.store(load(builder, place, FLOATS) if adding else floats(0.0), held)
            with cgutils.for_range(builder, count) as loop:
                line, offset = add(builder, b, builder.mul(loop.index, b_step)), builder.mul(loop.index, number(4))
                columns = [load(builder, add(builder, line, 4 * LANES * u), FLOATS) for u in range(_VECTORS)]
                for row, of_row in zip(left, total, strict=True):
                    x = spread(builder, load(builder, add(builder, row, offset), F32))
                    for column, held in zip(columns, of_row, strict=True):
                        builder.store(multiply_add(builder, x, column, builder.load(held)), held)
            for held, place in pairs:
                store(builder, builder.load(held), place)
            return context.get_dummy_value()

        return signature, generate

    return product


product: Any = _make_product(adding=False)
add_product: Any = _make_product(adding=True)


def _generate_transpose(typingctx: Any, x: Any, x_step: Any, out: Any, out_step: Any) -> Any:
    """out (LANES, LANES) = the transpose of x; lines are so many bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_step, out, out_step = args
        lines = [load(builder, add(builder, x, builder.mul(x_step, number(i))), FLOATS) for i in range(LANES)]
        width = LANES // 2
        while width:  # swap the blocks of width x width numbers on both sides of the diagonal
            first = [LANES + (lane ^ width) if lane & width else lane for lane in range(LANES)]
            second = [LANES + lane if lane & width else lane ^ width for lane in range(LANES)]
            for i in range(LANES):
                if not i & width:
                    a, b = lines[i], lines[i | width]
                    lines[i], lines[i | width] = (
                        builder.shuffle_vector(a, b, ir.Constant(WORDS, lanes)) for lanes in (first, second)
                    )
            width //= 2
        for i, line in enumerate(lines):
            store(builder, line, add(builder, out, builder.mul(out_step, number(i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


_transpose: Any = intrinsic(_generate_transpose)


def _generate_add_scaled(typingctx: Any, out: Any, x: Any, factor: Any, count: Any) -> Any:
    """`count` floats at `out` grow by `factor` times those at x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, x, factor, count = args
        factors = spread(builder, factor)

        def visit(index: Any, size: int) -> None:
            kind, by = (FLOATS, factors) if size > 1 else (F32, factor)
            offset = builder.mul(index, number(4))
            place = add(builder, out, offset)
            new = multiply_add(builder, by, load(builder, add(builder, x, offset), kind), load(builder, place, kind))
            store(builder, new, place)

        in_vectors(builder, count, visit)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, types.intp), generate


add_scaled: Any = intrinsic(_generate_add_scaled)


@numba.njit(nogil=True)
def transposed(x, x_step, count, d, out):
    """Write `count` rows of d floats at x, `x_step` bytes apart, as columns to out (d, WIDE); count <= WIDE, the rest is 0."""
    if count == WIDE and d % LANES == 0:
        for first in range(0, WIDE, LANES):
            for j in range(0, d, LANES):
                _transpose(x + first * x_step + 4 * j, x_step, out + 4 * (j * WIDE + first), 4 * WIDE)
        return
    to = floats_at(out, (d, WIDE))
    to[:] = 0
    for i in range(count):
        row = floats_at(x + i * x_step, (d,))
        for j in range(d):
            to[j, i] = row[j]


@numba.njit(nogil=True)
def in_panels(x, x_step, count, d, height, out):
    """Write `count` rows of d floats at x, `x_step` bytes apart, to out (panels, height, WIDE); columns behind d are 0."""
    for first in range(0, d, WIDE):
        width = min(WIDE, d - first)
        for i in range(count):
            row = floats_at(x + i * x_step + 4 * first, (width,))
            to = floats_at(out + 4 * (first * height + i * WIDE), (WIDE,))
            for j in range(width):
                to[j] = row[j]
            for j in range(width, WIDE):
                to[j] = np.float32(0)
