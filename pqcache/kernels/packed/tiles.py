"""Products of query heads with packed codes, a few tokens at a time: nothing is unpacked but into vector registers.

Codes of 8, 4 and 2 bits have 1, 2 and 4 planes: plane p of a row of bytes holds the codes in bits p * bits and up, so it is
unpacked by a shift and a mask. Channel j is byte j // planes of plane j % planes. Queries and results are in the order of planes,
`width` floats each, so that the codes of a byte meet their query entries in the same lane.

A block of HEADS query heads shares one read and one unpacking. `grouped` codes have a step and a low per byte, given in fp32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels.packed.registers import (
    F32,
    FLOATS,
    I8,
    I32,
    LANES,
    WORDS,
    add,
    floats,
    load,
    multiply_add,
    number,
    spread,
    store,
    sums,
)

HEADS = 4  # query heads of a block; a smaller group is padded
TOKENS = LANES // HEADS  # that `products` takes at a time: all sums fit one register
TOGETHER = 2  # vectors of bytes that `accumulate` takes at a time; a row is a multiple of so many


def _codes(builder: Any, address: Any, shift: Any, mask: Any) -> Any:
    """The codes of one plane in LANES bytes at an address, as floats. shift, mask: vectors."""
    raw = builder.zext(load(builder, address, ir.VectorType(I8, LANES)), WORDS)
    return builder.sitofp(builder.and_(builder.lshr(raw, shift), mask), FLOATS)


def _plane(builder: Any, bits: Any, plane: Any) -> tuple[Any, Any]:
    """Shift and mask of a plane, as vectors."""
    one = ir.Constant(I32, 1)
    mask = builder.sub(builder.shl(one, builder.trunc(bits, I32)), one)
    shift = builder.trunc(builder.mul(bits, plane), I32)
    return spread(builder, shift), spread(builder, mask)


def _make_products(grouped: bool) -> Any:
    """q . code of TOKENS tokens and HEADS query heads."""

    @intrinsic
    def products(typingctx, bits, planes, codes, stride, valid, q, q_stride, blocks, step, low, out, out_stride):
        """Write q_a . x_i to out[a, i]; rows are `stride` bytes apart, and those from `valid` on repeat the last."""
        signature = types.void(*[types.intp] * 12)

        def generate(context, builder, signature, args):
            bits, planes, codes, stride, valid, q, q_stride, blocks, step, low, out, out_stride = args
            last = builder.sub(valid, number(1))
            index = [builder.select(builder.icmp_signed("<", number(i), last), number(i), last) for i in range(TOKENS)]
            rows = [add(builder, codes, builder.mul(i, stride)) for i in index]
            width = builder.mul(blocks, number(4 * LANES))  # bytes of a plane of a query, and of a token's steps
            total = [
                [cgutils.alloca_once_value(builder, floats(0.0)) for _ in range(TOKENS)] for _ in range(HEADS)
            ]  # fmt: skip
            for of_head in total:
                for held in of_head:
                    builder.store(floats(0.0), held)
            with cgutils.for_range(builder, planes) as outer:
                shift, mask = _plane(builder, bits, outer.index)
                queries = add(builder, q, builder.mul(width, outer.index))
                with cgutils.for_range(builder, blocks) as inner:
                    offset = builder.mul(inner.index, number(LANES))
                    offset4 = builder.mul(offset, number(4))
                    x = [_codes(builder, add(builder, row, offset), shift, mask) for row in rows]
                    if grouped:
                        for i in range(TOKENS):
                            place = add(builder, offset4, builder.mul(index[i], width))
                            steps, lows = (load(builder, add(builder, base, place), FLOATS) for base in (step, low))
                            x[i] = multiply_add(builder, x[i], steps, lows)
                    for a in range(HEADS):
                        place = add(builder, queries, offset4, builder.mul(q_stride, number(a)))
                        entries = load(builder, place, FLOATS)
                        for i in range(TOKENS):
                            held = total[a][i]
                            builder.store(multiply_add(builder, entries, x[i], builder.load(held)), held)
            result = sums(builder, [builder.load(held) for of_head in total for held in of_head])
            for a in range(HEADS):
                lanes = ir.Constant(ir.VectorType(I32, TOKENS), [a * TOKENS + i for i in range(TOKENS)])
                part = builder.shuffle_vector(result, ir.Constant(FLOATS, ir.Undefined), lanes)
                store(builder, part, add(builder, out, builder.mul(out_stride, number(a))))
            return context.get_dummy_value()

        return signature, generate

    return products


def _make_accumulate(grouped: bool) -> Any:
    """Weighted sums of codes, for HEADS query heads."""

    @intrinsic
    def accumulate(typingctx, bits, planes, codes, stride, count, p, p_stride, blocks, step, low, out, out_stride):
        """out[a] += sum over `count` tokens of p[a, i] x_i; rows are `stride` bytes apart; blocks a multiple of TOGETHER."""
        signature = types.void(*[types.intp] * 12)

        def generate(context, builder, signature, args):
            bits, planes, codes, stride, count, p, p_stride, blocks, step, low, out, out_stride = args
            width = builder.mul(blocks, number(4 * LANES))
            slots = [(a, u) for a in range(HEADS) for u in range(TOGETHER)]
            total = {slot: cgutils.alloca_once(builder, FLOATS) for slot in slots}
            steps_of_row = builder.udiv(blocks, number(TOGETHER))
            with cgutils.for_range(builder, builder.mul(planes, steps_of_row)) as outer:
                plane = builder.udiv(outer.index, steps_of_row)
                shift, mask = _plane(builder, bits, plane)
                first = builder.mul(builder.urem(outer.index, steps_of_row), number(LANES * TOGETHER))
                first4 = builder.mul(first, number(4))
                start = add(builder, out, first4, builder.mul(width, plane))
                place = {
                    (a, u): add(builder, start, 4 * LANES * u, builder.mul(out_stride, number(a))) for a, u in slots
                }
                for slot in slots:
                    builder.store(load(builder, place[slot], FLOATS), total[slot])
                with cgutils.for_range(builder, count) as inner:
                    row = add(builder, codes, first, builder.mul(inner.index, stride))
                    x = [_codes(builder, add(builder, row, LANES * u), shift, mask) for u in range(TOGETHER)]
                    if grouped:
                        beside = add(builder, first4, builder.mul(inner.index, width))
                        for u in range(TOGETHER):
                            steps, lows = (
                                load(builder, add(builder, base, beside, 4 * LANES * u), FLOATS) for base in (step, low)
                            )
                            x[u] = multiply_add(builder, x[u], steps, lows)
                    entry = add(builder, p, builder.mul(inner.index, number(4)))
                    for a in range(HEADS):
                        weight = load(builder, add(builder, entry, builder.mul(p_stride, number(a))), F32)
                        for u in range(TOGETHER):
                            held = total[a, u]
                            new = multiply_add(builder, spread(builder, weight), x[u], builder.load(held))
                            builder.store(new, held)
                for slot in slots:
                    store(builder, builder.load(total[slot]), place[slot])
            return context.get_dummy_value()

        return signature, generate

    return accumulate


def _make_expand() -> Any:
    """Steps or lows per group, as `grouped` codes need them."""
    eight = ir.VectorType(F32, 8)

    @intrinsic
    def expand(typingctx, x, groups, each, out):
        """Write every of `groups` floats at x `each` times to `out`."""
        signature = types.void(*[types.intp] * 4)

        def generate(context, builder, signature, args):
            x, groups, each, out = args
            whole = builder.udiv(each, number(8))
            done = builder.mul(whole, number(8))
            with cgutils.for_range(builder, groups) as loop:
                value = load(builder, add(builder, x, builder.mul(loop.index, number(4))), F32)
                one = builder.insert_element(ir.Constant(eight, ir.Undefined), value, ir.Constant(I32, 0))
                zeros = ir.Constant(ir.VectorType(I32, 8), [0] * 8)
                many = builder.shuffle_vector(one, ir.Constant(eight, ir.Undefined), zeros)
                start = add(builder, out, builder.mul(builder.mul(loop.index, each), number(4)))
                with cgutils.for_range(builder, whole) as inner:
                    store(builder, many, add(builder, start, builder.mul(inner.index, number(32))))
                with cgutils.for_range(builder, builder.sub(each, done)) as inner:
                    entry = builder.mul(builder.add(done, inner.index), number(4))
                    store(builder, value, add(builder, start, entry))
            return context.get_dummy_value()

        return signature, generate

    return expand


expand: Any = _make_expand()
products: Any = _make_products(grouped=False)
products_grouped: Any = _make_products(grouped=True)
accumulate: Any = _make_accumulate(grouped=False)
accumulate_grouped: Any = _make_accumulate(grouped=True)
