"""Products of query heads with packed codes, and their weighted sums: nothing is unpacked but into vector registers.

A vector of LANES codes of 2 or 4 bits is one word of 32 or 64 bits, spread over all lanes. Each lane turns its code to the upper
end of a float's mantissa and puts the exponent of 1 before it: two instructions, and no conversion. What tiles compute with
is therefore 1 + code / 2^bits below 8 bits; steps and lows are given so that they undo it (`memory.undo`). Codes of 8 bits are
converted, those of 32 bits are floats.

A block of 1, 2, 4 or 8 query heads shares one read and one unpacking. Their number is known when a kernel is compiled:
`heads`, here and in the other modules, is a tuple with an entry for each, and what the entries are means nothing.
`grouped` codes have a step and a low per group of channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels.registers import (
    F32,
    FLOATS,
    I8,
    I32,
    LANES,
    WORDS,
    add,
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

MOST_HEADS = LANES // 2  # query heads of a block: their sums fit the registers
TOGETHER = 2  # vectors of codes that `accumulate` takes at a time; a group of channels is a multiple of so many
READ = (2, 4, 8, 32)  # bits of codes that are read in place


def _raw(builder: Any, bits: int, address: Any) -> Any:
    """LANES codes at an address, as floats that stand for them: see the module."""
    if bits == 32:
        return load(builder, address, FLOATS)
    if bits == 8:
        return builder.sitofp(builder.zext(load(builder, address, ir.VectorType(I8, LANES)), WORDS), FLOATS)
    size = LANES * bits
    if size <= 32:
        word = load(builder, address, ir.IntType(size))
        x = spread(builder, word if size == 32 else builder.zext(word, I32))
    else:
        pair = load(builder, address, ir.VectorType(I32, 2))
        halves = ir.Constant(WORDS, [lane * 2 // LANES for lane in range(LANES)])
        x = builder.shuffle_vector(pair, ir.Constant(pair.type, ir.Undefined), halves)
    place = 23 - bits  # of a code in a float
    turns = [(place - lane * bits) % 32 for lane in range(LANES)]
    kind = ir.FunctionType(WORDS, [WORDS] * 3)
    turn = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fshl.v{LANES}i32")
    x = builder.call(turn, [x, x, ir.Constant(WORDS, turns)])
    one = words(0x3F800000)
    return builder.bitcast(builder.or_(builder.and_(x, words(((1 << bits) - 1) << place)), one), FLOATS)


def _scaled(builder: Any, x: Any, step: Any, low: Any, entry: Any) -> Any:
    """x step + low, with a group's step and low at an entry."""
    place = builder.mul(entry, number(4))
    both = (spread(builder, load(builder, add(builder, base, place), F32)) for base in (step, low))
    return multiply_add(builder, x, *both)


class Soon(NamedTuple):
    """Codes to be read soon. The processor fetches on its own only within a page of memory, and a tile fills a few pages."""

    keys: int  # address of those of the tile's first token
    key_size: int  # bytes of a token
    values: int
    value_size: int


def _make_products(bits: int, grouped: bool) -> Any:
    """q . x of `count` tokens and the block's query heads."""

    @intrinsic
    def products(typingctx, codes, stride, count, q, q_stride, groups, per, step, low, out, out_stride, soon, heads):
        """Write q_a . x_i to out[a, i], and up to LANES - 1 numbers behind it. Rows are `stride` bytes apart.

        groups of `per` vectors each. step, low (count, groups): of grouped codes. soon: memory to fetch meanwhile, see Soon.
        """
        signature = types.void(*[types.intp] * 11, soon, heads)
        count_heads, tokens = heads.count, LANES // heads.count  # at a time: all sums fit one register

        def generate(context, builder, signature, args):
            codes, stride, count, q, q_stride, groups, per, step, low, out, out_stride, soon, _ = args
            keys, key_size, values, value_size = cgutils.unpack_tuple(builder, soon, 4)
            last = builder.sub(count, number(1))
            total = [[cgutils.alloca_once(builder, FLOATS) for _ in range(tokens)] for _ in range(count_heads)]
            tiles = builder.udiv(builder.add(count, number(tokens - 1)), number(tokens))
            with cgutils.for_range(builder, tiles) as outer:
                first = builder.mul(outer.index, number(tokens))
                index = [builder.add(first, number(i)) for i in range(tokens)]
                index = [builder.select(builder.icmp_signed("<", i, last), i, last) for i in index]
                rows = [add(builder, codes, builder.mul(i, stride)) for i in index]
                for base, size in ((keys, key_size), (values, value_size)):
                    fetch_lines(
                        builder, add(builder, base, builder.mul(first, size)), builder.mul(size, number(tokens))
                    )
                for held in (held for of_head in total for held in of_head):
                    builder.store(floats(0.0), held)
                with cgutils.for_range(builder, groups) as group, cgutils.for_range(builder, per) as inner:
                    block = builder.add(builder.mul(group.index, per), inner.index)
                    offset = builder.mul(block, number(LANES * bits // 8))
                    x = [_raw(builder, bits, add(builder, row, offset)) for row in rows]
                    if grouped:
                        entries = [builder.add(builder.mul(i, groups), group.index) for i in index]
                        x = [_scaled(builder, part, step, low, e) for part, e in zip(x, entries, strict=True)]
                    place = add(builder, q, builder.mul(block, number(4 * LANES)))
                    for a, of_head in enumerate(total):
                        query = load(builder, add(builder, place, builder.mul(q_stride, number(a))), FLOATS)
                        for part, held in zip(x, of_head, strict=True):
                            builder.store(multiply_add(builder, query, part, builder.load(held)), held)
                result = sums(builder, [builder.load(held) for of_head in total for held in of_head])
                for a in range(count_heads):
                    lanes = ir.Constant(ir.VectorType(I32, tokens), [a * tokens + i for i in range(tokens)])
                    part = builder.shuffle_vector(result, ir.Constant(FLOATS, ir.Undefined), lanes)
                    place = add(builder, out, builder.mul(out_stride, number(a)), builder.mul(first, number(4)))
                    store(builder, part, place)
            return context.get_dummy_value()

        return signature, generate

    return products


def _make_accumulate(bits: int, grouped: bool) -> Any:
    """Weighted sums of codes, for the block's query heads."""

    @intrinsic
    def accumulate(typingctx, codes, stride, count, p, p_stride, groups, per, step, low, out, out_stride, heads):
        """out[a] += sum over `count` tokens of p[a, i] x_i; arguments as of `products`, `per` a multiple of TOGETHER."""
        signature = types.void(*[types.intp] * 11, heads)

        def generate(context, builder, signature, args):
            codes, stride, count, p, p_stride, groups, per, step, low, out, out_stride, _ = args
            slots = [(a, u) for a in range(heads.count) for u in range(TOGETHER)]
            total = {slot: cgutils.alloca_once(builder, FLOATS) for slot in slots}
            passes = builder.udiv(per, number(TOGETHER))
            with cgutils.for_range(builder, groups) as group, cgutils.for_range(builder, passes) as outer:
                block = builder.add(builder.mul(group.index, per), builder.mul(outer.index, number(TOGETHER)))
                start = add(builder, out, builder.mul(block, number(4 * LANES)))
                place = {
                    (a, u): add(builder, start, 4 * LANES * u, builder.mul(out_stride, number(a))) for a, u in slots
                }
                for slot in slots:
                    builder.store(load(builder, place[slot], FLOATS), total[slot])
                column = add(builder, codes, builder.mul(block, number(LANES * bits // 8)))
                with cgutils.for_range(builder, count) as inner:
                    row = add(builder, column, builder.mul(inner.index, stride))
                    x = [_raw(builder, bits, add(builder, row, LANES * bits // 8 * u)) for u in range(TOGETHER)]
                    if grouped:
                        entry = builder.add(builder.mul(inner.index, groups), group.index)
                        x = [_scaled(builder, part, step, low, entry) for part in x]
                    weights = add(builder, p, builder.mul(inner.index, number(4)))
                    for a in range(heads.count):
                        weight = load(builder, add(builder, weights, builder.mul(p_stride, number(a))), F32)
                        for u, part in enumerate(x):
                            new = multiply_add(builder, spread(builder, weight), part, builder.load(total[a, u]))
                            builder.store(new, total[a, u])
                for slot in slots:
                    store(builder, builder.load(total[slot]), place[slot])
            return context.get_dummy_value()

        return signature, generate

    return accumulate


_products2, _products4, _products8, _products32 = (_make_products(bits, grouped=False) for bits in READ)
_products2g, _products4g, _products8g = (_make_products(bits, grouped=True) for bits in READ[:3])
_accumulate2, _accumulate4, _accumulate8, _accumulate32 = (_make_accumulate(bits, grouped=False) for bits in READ)
_accumulate2g, _accumulate4g, _accumulate8g = (_make_accumulate(bits, grouped=True) for bits in READ[:3])


@numba.njit(nogil=True)
def products(bits, codes, stride, count, q, q_stride, groups, per, step, low, out, out_stride, soon, heads):
    """By how codes are read, and grouped where there is a step; see _make_products."""
    if bits == 32:
        _products32(codes, stride, count, q, q_stride, groups, per, 0, 0, out, out_stride, soon, heads)
    elif step and bits == 2:
        _products2g(codes, stride, count, q, q_stride, groups, per, step, low, out, out_stride, soon, heads)
    elif step and bits == 4:
        _products4g(codes, stride, count, q, q_stride, groups, per, step, low, out, out_stride, soon, heads)
    elif step:
        _products8g(codes, stride, count, q, q_stride, groups, per, step, low, out, out_stride, soon, heads)
    elif bits == 2:
        _products2(codes, stride, count, q, q_stride, groups, per, 0, 0, out, out_stride, soon, heads)
    elif bits == 4:
        _products4(codes, stride, count, q, q_stride, groups, per, 0, 0, out, out_stride, soon, heads)
    else:
        _products8(codes, stride, count, q, q_stride, groups, per, 0, 0, out, out_stride, soon, heads)


@numba.njit(nogil=True)
def accumulate(bits, codes, stride, count, p, p_stride, groups, per, step, low, out, out_stride, heads):
    """As `products`; see _make_accumulate."""
    if bits == 32:
        _accumulate32(codes, stride, count, p, p_stride, groups, per, 0, 0, out, out_stride, heads)
    elif step and bits == 2:
        _accumulate2g(codes, stride, count, p, p_stride, groups, per, step, low, out, out_stride, heads)
    elif step and bits == 4:
        _accumulate4g(codes, stride, count, p, p_stride, groups, per, step, low, out, out_stride, heads)
    elif step:
        _accumulate8g(codes, stride, count, p, p_stride, groups, per, step, low, out, out_stride, heads)
    elif bits == 2:
        _accumulate2(codes, stride, count, p, p_stride, groups, per, 0, 0, out, out_stride, heads)
    elif bits == 4:
        _accumulate4(codes, stride, count, p, p_stride, groups, per, 0, 0, out, out_stride, heads)
    else:
        _accumulate8(codes, stride, count, p, p_stride, groups, per, 0, 0, out, out_stride, heads)
