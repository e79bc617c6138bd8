"""What numba has no words for, and the few loops that all kernels share: addresses, bits of numbers, exponentials."""

import functools
import platform
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.cpython.unsafe import tuple as unsafe
from numba.extending import intrinsic

_intrinsic: Any = intrinsic
# a tuple with one entry replaced: tuples serve as accumulators, see rows.py
tuple_setitem: Any = unsafe.tuple_setitem
FAST = {"reassoc", "contract", "arcp", "nsz"}  # additions in any order; NaN and infinity stay what they are
SCALE = 64  # weights times 2^64 are normal numbers where fp32 has subnormal ones, which some CPUs multiply much slower
BACK = np.float32(2.0**-SCALE)
NEGLIGIBLE = np.float32(-70)  # nats: a weight of less has no part in a sum of fp32, whatever the number of tokens
LEAST = np.float32(-104)  # nats: an exponential of less is 0 in fp32

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
# what rows may hold -> the type that tells kernels so; fp16 only where the processor converts it, bfloat16 by its bits
KINDS = {torch.float32: "float32", torch.bfloat16: "uint16"}
if "+f16c" in _FEATURES or platform.machine() in ("aarch64", "arm64"):
    KINDS[torch.float16] = "int16"
FP32 = KINDS[torch.float32]
PERMUTES = "+avx2" in _FEATURES  # whether the processor looks numbers up in a table
_LONGEST = 16 if "+avx512f" in _FEATURES else 8  # fp32 numbers in a vector register

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()

# Decorates functions that only kernels call. They have no wrapper for Python, where a call would end the process, and so they
# compile in three quarters of the time.
part: Any = functools.partial(numba.njit, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_intrinsic
def _pointer(typingctx, address, kind):
    """An address as a pointer to numbers of kind's type."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.intp, kind), generate


@part
def at(address, shape, kind):
    """The numbers at an address as an array. It counts no references, which would cost more than the work on a row."""
    return numba.carray(_pointer(address, kind), shape)


@part
def floats(address, shape):
    """As `at`, of fp32."""
    return numba.carray(_pointer(address, np.float32(0)), shape)


@_intrinsic
def bits_of(typingctx, x):
    """The bits of an fp32 number, int32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _I32)


@_intrinsic
def float_of(typingctx, x):
    """The fp32 number that has these bits, int32."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], _FLOAT)


@_intrinsic
def wide(typingctx, x):
    """A number of a row in fp32. x has the type of a value of KINDS."""

    def generate(context, builder, signature, args):
        if x == types.float32:
            return args[0]
        if x == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _FLOAT)
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _FLOAT)

    return types.float32(x), generate


@_intrinsic
def _prefetch(typingctx, address):
    """Bring a cache line close to the processor, past the larger caches: it is read once per step."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [builder.inttoptr(args[0], _I8.as_pointer()), _I32(0), _I32(0), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@part
def fetch(address, size):
    """Prefetch `size` bytes, without waiting for them."""
    for offset in range(0, size, 64):
        _prefetch(address + offset)


@_intrinsic
def increment(typingctx, address):
    """Add 1 to the 64 bits at an address, which several threads may do at once, and return what they were.

    What a thread wrote before it is seen by the threads that increment later.
    """

    def generate(context, builder, signature, args):
        word = ir.IntType(64)
        return builder.atomic_rmw("add", builder.inttoptr(args[0], word.as_pointer()), word(1), "acq_rel")

    return types.int64(types.intp), generate


@part
def half(bits):
    """A finite fp16 number, given by its bits (int16), in fp32, on any processor."""
    word = np.int32(bits)
    # the exponents' biases: 127 and 15
    size = float_of((word & np.int32(0x7FFF)) << np.int32(13)) * np.float32(2.0**112)
    return float_of(bits_of(size) | ((word & np.int32(0x8000)) << np.int32(16)))


@part
def widen(address, out):
    """Fill `out`, fp32, with the fp16 numbers at an address."""
    halves = at(address, out.shape, np.int16(0))
    for i in range(out.shape[0]):
        out[i] = half(halves[i])


@part(fastmath={"contract"})
def _exponential(x, least, scale):
    """2^scale exp(x) for x <= 0 to 1e-7, 0 below `least`. NaN stays NaN. No additions in another order: they round."""
    whole = np.float32(1.5 * 2**23)  # adding it rounds a float to an integer, which its low bits then are
    inside = least if x < least else x
    shifted = inside * np.float32(1 / np.log(2)) + whole
    n = shifted - whole
    r = inside - n * np.float32(0.693359375)  # ln 2 in nine bits: its products with n are exact
    r -= n * np.float32(np.log(2) - 0.693359375)
    total = np.float32(1 / 5040)
    total = total * r + np.float32(1 / 720)
    total = total * r + np.float32(1 / 120)
    total = total * r + np.float32(1 / 24)
    total = total * r + np.float32(1 / 6)
    total = total * r + np.float32(1 / 2)
    total = total * r + np.float32(1)
    total = total * r + np.float32(1)
    power = bits_of(shifted) - bits_of(whole) + scale
    first = power >> np.int32(1)  # two factors, of which none underflows
    total *= float_of((first + np.int32(127)) << np.int32(23))
    total *= float_of((power - first + np.int32(127)) << np.int32(23))
    return np.float32(0) if x < least else total


@part(fastmath=FAST)
def exponentials(line, top, least, scale):
    """The numbers of `line`, none above `top`, become 2^scale exp(number - top), 0 below `least` nats; their sum."""
    total = np.float32(0)
    for i in range(line.shape[0]):
        value = _exponential(line[i] - top, least, np.int32(scale))
        line[i] = value
        total += value
    return total


@part
def largest(line):
    """The largest number of `line`, -inf if it has none. By bits, which compilers put into vectors."""
    best = bits_of(np.float32(-np.inf)) ^ np.int32(0x7FFFFFFF)
    for i in range(line.shape[0]):
        bits = bits_of(line[i])
        best = max(best, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return float_of(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF)))


def lanes_of(d: int, listed: int = 0) -> int:
    """Numbers that `decode` writes and `dots` multiplies at a time. d: a multiple of 8."""
    return 8 if d % 16 or listed else _LONGEST


def _generate_decode(
    typingctx: Any, source: Any, out: Any, steps: Any, lows: Any, table: Any, d: Any, bits: Any, groups: Any, listed: Any
) -> Any:  # fmt: skip
    """Write to `out` the d fp32 numbers that a token's codes of 2, 4 or 8 bits, the lowest first, stand for.

    The first five are addresses, the others constants of the caller. With groups of channels, a number is code step + low of
    its group. listed: 1 where codes are places in a table of 16 numbers, repeated where codes are fewer; see PERMUTES.
    """
    signature = types.void(*[types.intp] * 5, d, bits, groups, listed)
    d, bits, groups, listed = (number.literal_value for number in (d, bits, groups, listed))
    lanes, each = lanes_of(d, listed), d // max(1, groups)
    lane = range(lanes)
    words, numbers = ir.VectorType(_I32, lanes), ir.VectorType(_FLOAT, lanes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, out, steps, lows, table = args[:5]

        def pointer(address: Any, offset: int, kind: Any) -> Any:
            return builder.inttoptr(builder.add(address, ir.IntType(64)(offset)), kind.as_pointer())

        def load(address: Any, offset: int, kind: Any, count: int) -> Any:
            return builder.load(pointer(address, offset, ir.VectorType(kind, count)), align=1)

        def spread(x: Any, places: Any) -> Any:
            return builder.shuffle_vector(x, x, ir.Constant(words, list(places)))

        def numbers_at(code: Any, offset: int) -> Any:
            kind = ir.FunctionType(numbers, [numbers, words])
            permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permps")
            return builder.call(permute, [load(table, offset, _FLOAT, lanes), code])

        for first in range(0, d, lanes):
            if bits == 8:
                code = builder.zext(load(source, first, _I8, lanes), words)
            else:  # a word, or what fills one, for as many lanes as have their codes in it
                count, size = max(1, lanes * bits // 32), min(32, lanes * bits)
                word = load(source, first * bits // 8, ir.IntType(size), count)
                word = word if size == 32 else builder.zext(word, ir.VectorType(_I32, count))
                code = spread(word, (i * count // lanes for i in lane))
                code = builder.lshr(code, ir.Constant(words, [i * bits % 32 for i in lane]))
                code = builder.and_(code, ir.Constant(words, [(1 << bits) - 1] * lanes))
            if listed:
                upper = builder.icmp_unsigned(">", code, ir.Constant(words, [7] * lanes))
                number = builder.select(upper, numbers_at(code, 32), numbers_at(code, 0))
            else:
                number = builder.sitofp(code, numbers)
            if groups:
                count, at = max(1, lanes // each), 4 * (first // each)
                step, low = (spread(load(x, at, _FLOAT, count), (i // each for i in lane)) for x in (steps, lows))
                number = builder.fadd(builder.fmul(number, step, flags=["contract"]), low, flags=["contract"])
            builder.store(number, pointer(out, 4 * first, numbers), align=4)
        return context.get_dummy_value()

    return signature, generate


decode: Any = intrinsic(prefer_literal=True)(_generate_decode)


def _generate_dots(typingctx: Any, rows: Any, query: Any, out: Any, line: Any, heads: Any, d: Any) -> Any:
    """Write q_a . x_t to the fp32 numbers out + line a + 4 t, for a few rows x_t of d numbers and len(heads) queries.

    rows: their addresses; query: address of (heads, d); d: a constant of the caller. rows times heads is a power of two, at
    most `lanes_of`. All sums are halved together: LLVM would halve each alone, which takes as long as the products.
    """
    lanes, many, count = lanes_of(d.literal_value), rows.count, rows.count * heads.count
    numbers, word = ir.VectorType(_FLOAT, lanes), ir.IntType(64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts, (query, out, line) = cgutils.unpack_tuple(builder, args[0], many), args[1:4]
        totals = [cgutils.alloca_once_value(builder, ir.Constant(numbers, None)) for _ in range(count)]

        def load(*places: Any) -> Any:
            return builder.load(builder.inttoptr(functools.reduce(builder.add, places), numbers.as_pointer()), align=4)

        def halves(a: Any, b: Any, width: int, crossed: int) -> Any:
            """Lanes of a, and from the upper ones of each pair of `width` lanes on those of b; crossed: their partners."""
            lane = [i ^ crossed * width | (lanes if i & width else 0) for i in range(lanes)]
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, lanes), lane))

        with cgutils.for_range_slice(builder, word(0), word(4 * d.literal_value), word(4 * lanes), word) as (at, _):
            x = [load(start, at) for start in starts]
            for i, total in enumerate(totals):
                of_query = load(query, word(4 * d.literal_value * (i // many)), at)
                product = builder.fmul(of_query, x[i % many], flags=["contract"])
                builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
        sums, width = [builder.load(total) for total in totals], lanes // 2
        while width:
            half = len(sums) // 2
            pairs = zip(sums[:half], sums[half:], strict=True) if half else [(sums[0], sums[0])]
            sums = [builder.fadd(halves(a, b, width, 0), halves(a, b, width, 1)) for a, b in pairs]
            width //= 2
        for a in range(heads.count):
            lane = [(a * many + t) * (lanes // count) for t in range(many)]
            part = builder.shuffle_vector(sums[0], sums[0], ir.Constant(ir.VectorType(_I32, many), lane))
            place = builder.add(out, builder.mul(line, word(a)))
            builder.store(part, builder.inttoptr(place, part.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(rows, *[types.intp] * 3, heads, d), generate


dots: Any = intrinsic(prefer_literal=True)(_generate_dots)


@_intrinsic
def whole_registers(typingctx):
    """Let the calling function use vectors of 512 bits where the processor has them. LLVM prefers 256 for fear of a lower clock.

    A function that calls it is not inlined: the attribute is a function's own.
    """

    def generate(context, builder, signature, args):
        for attribute in (
            '"prefer-vector-width"="512"',
            "noinline",
        ):  # llvmlite has no list of LLVM's string attributes
            set.add(builder.function.attributes, attribute)
        return context.get_dummy_value()

    return types.void(), generate
