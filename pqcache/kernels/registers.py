"""Building blocks of kernels that are written in LLVM IR: vector registers, 16-bit floats, exponentials.

Compiled loops leave vector registers half empty where several query heads share one read, and take one exponential at a time.
All memory is named by addresses (intp), which a caller takes from tensors that it keeps alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# features of the processor that numba compiles for: users may set fewer than it has, and numba's cache on disk is keyed by them
FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
CACHE_LINE = 64  # bytes of a cache line
LANES = 16 if "+avx512f" in FEATURES else 8  # floats per vector register

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS = ir.VectorType(F32, LANES)
WORDS = ir.VectorType(I32, LANES)


def number(value: int) -> Any:
    return ir.Constant(I64, value)


def floats(value: float, kind: Any = FLOATS) -> Any:
    """A constant vector."""
    return ir.Constant(kind, [value] * kind.count)


def words(value: int, kind: Any = WORDS) -> Any:
    """A constant vector of 32-bit integers."""
    return ir.Constant(kind, [value] * kind.count)


def add(builder: Any, *parts: Any) -> Any:
    """The sum of addresses and numbers of bytes."""
    total = parts[0]
    for part in parts[1:]:
        total = builder.add(total, part if isinstance(part, ir.Value) else number(part))
    return total


def at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: Any) -> Any:
    """What is at an address of any alignment."""
    return builder.load(at(builder, address, kind), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, at(builder, address, value.type), align=1)


def spread(builder: Any, scalar: Any) -> Any:
    """A vector that has the number in every lane."""
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), words(0))


def fetch_lines(builder: Any, address: Any, size: Any) -> None:
    """Bring `size` bytes, whole cache lines of them, close to the processor without waiting for them.

    They are read once per step, so they pass by the larger caches. Else what they push out would be written there, which takes
    bandwidth: on an AMD EPYC scattered rows arrive a quarter sooner so.
    """
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, once, data = (ir.Constant(I32, value) for value in (0, 0, 1))
    with cgutils.for_range(builder, builder.udiv(size, number(CACHE_LINE))) as loop:
        place = add(builder, address, builder.mul(loop.index, number(CACHE_LINE)))
        builder.call(prefetch, [at(builder, place, I8), read, once, data])


def in_vectors(builder: Any, count: Any, visit: Callable[[Any, int], None]) -> None:
    """Call visit(index, size) for all of `count` entries: whole vectors of LANES, then one by one. index: of the first."""
    whole = builder.udiv(count, number(LANES))
    done = builder.mul(whole, number(LANES))
    for first, steps, size in ((number(0), whole, LANES), (done, builder.sub(count, done), 1)):
        with cgutils.for_range(builder, steps) as loop:
            visit(builder.add(first, builder.mul(loop.index, number(size))), size)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def greater(builder: Any, a: Any, b: Any) -> Any:
    """a where it is greater, else b: a NaN in a is passed over."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _blend(builder: Any, a: Any, b: Any, width: int, crossed: bool) -> Any:
    """Of lanes whose index has no bit `width` those of a, of the others those of b; crossed: their partners' values."""
    lanes = [(lane ^ width if crossed else lane) + (LANES if lane & width else 0) for lane in range(LANES)]
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, lanes))


def sums(builder: Any, vectors: list[Any]) -> Any:
    """Of LANES vectors, the vector whose lane i is the sum of vector i's lanes: half as many shuffles as one by one."""
    width = LANES // 2
    while width:
        pairs = list(zip(vectors[:width], vectors[width:], strict=True))
        vectors = [
            builder.fadd(_blend(builder, a, b, width, False), _blend(builder, a, b, width, True)) for a, b in pairs
        ]
        width //= 2
    return vectors[0]


def folded(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """All lanes of a vector joined into one number."""
    width = LANES // 2
    while width:
        lanes = ir.Constant(WORDS, [lane ^ width for lane in range(LANES)])
        vector = join(builder.shuffle_vector(vector, ir.Constant(FLOATS, ir.Undefined), lanes), vector)
        width //= 2
    return builder.extract_element(vector, ir.Constant(I32, 0))


def widened(builder: Any, halves: Any) -> Any:
    """Finite fp16 numbers, given by their bits, in fp32. By integers: not every processor has an instruction for it."""
    count = halves.type.count if isinstance(halves.type, ir.VectorType) else 0
    word, kind = (ir.VectorType(I32, count), ir.VectorType(F32, count)) if count else (I32, F32)

    def constant(of: Any, value: Any) -> Any:
        return ir.Constant(of, [value] * count if count else value)

    bits = builder.zext(halves, word)
    size = builder.shl(builder.and_(bits, constant(word, 0x7FFF)), constant(word, 13))
    scaled = builder.fmul(builder.bitcast(size, kind), constant(kind, 2.0**112))  # the exponents' biases are 127 and 15
    sign = builder.shl(builder.and_(bits, constant(word, 0x8000)), constant(word, 16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, word), sign), kind)


_NEGLIGIBLE = -70.0  # nats: a weight of less has no part in a sum of fp32, whatever the number of tokens
_LEAST = -104.0  # nats: an exponential of less is 0 in fp32


def _power_of_two(builder: Any, exponent: Any) -> Any:
    """2 to integers of -126 .. 127, by their place among a float's bits."""
    return builder.bitcast(builder.shl(builder.add(exponent, words(127)), words(23)), FLOATS)


def _constant(value: float) -> Any:
    return floats(float(np.float32(value)))


def _reduced(builder: Any, x: Any) -> tuple[Any, Any]:
    """x = n ln 2 + r with |r| <= ln 2 / 2: the integers n and exp(r), by its Taylor polynomial."""
    whole = 1.5 * 2**23  # adding it rounds a float to an integer, which its low bits then are
    shifted = multiply_add(builder, x, _constant(1 / np.log(2)), _constant(whole))
    n = builder.fsub(shifted, _constant(whole))
    high = float(np.float32(0.693359375))  # ln 2 in nine bits: its products with n are exact
    r = multiply_add(builder, n, _constant(-high), x)
    r = multiply_add(builder, n, _constant(high - np.log(2)), r)
    total = _constant(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        total = multiply_add(builder, total, r, _constant(1 / factorial))
    return builder.sub(builder.bitcast(shifted, WORDS), builder.bitcast(_constant(whole), WORDS)), total


def _normal_exponential(builder: Any, x: Any, least: float, scale: int = 0) -> Any:
    """2^scale exp(x) for x <= 0 to 1e-7, 0 below `least`. NaN stays NaN."""
    least = _constant(least)
    small = builder.fcmp_ordered("<", x, least)
    integer, total = _reduced(builder, builder.select(small, least, x))
    total = builder.fmul(total, _power_of_two(builder, builder.add(integer, words(scale))))
    return builder.select(small, floats(0.0), total)


def _exponential(builder: Any, x: Any) -> Any:
    """exp(x) for x <= 0 to 1e-7, 0 for -inf; subnormal results are rounded as any others. NaN stays NaN."""
    least = _constant(_LEAST)
    integer, total = _reduced(builder, builder.select(builder.fcmp_ordered("<", x, least), least, x))
    first = builder.ashr(integer, words(1))  # two factors, of which none underflows
    total = builder.fmul(total, _power_of_two(builder, first))
    return builder.fmul(total, _power_of_two(builder, builder.sub(integer, first)))


def _scalar(result: Any, kind: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic that reads one number at an address."""

    def generate_read(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return convert(builder, load(builder, args[0], kind))

        return result(types.intp), generate

    return intrinsic(generate_read)


read_byte: Any = _scalar(types.int64, I8, lambda builder, x: builder.zext(x, I64))
read_short: Any = _scalar(types.int64, I16, lambda builder, x: builder.sext(x, I64))
read_int: Any = _scalar(types.int64, I32, lambda builder, x: builder.sext(x, I64))
read_float: Any = _scalar(types.float32, F32, lambda builder, x: x)
read_half: Any = _scalar(types.float32, I16, widened)


def _pointer(kind: Any) -> Any:
    """An intrinsic that makes an address a pointer to numbers of a type."""

    def generate_cast(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.intp), generate

    return intrinsic(generate_cast)


_to_floats: Any = _pointer(types.float32)
_to_shorts: Any = _pointer(types.int16)
_to_ints: Any = _pointer(types.int32)


@numba.njit(nogil=True)
def floats_at(address, shape):
    """The floats at an address as an array. It counts no references, which would cost more than the work on a tile."""
    return numba.carray(_to_floats(address), shape)


@numba.njit(nogil=True)
def shorts_at(address, shape):
    """As floats_at, int16."""
    return numba.carray(_to_shorts(address), shape)


@numba.njit(nogil=True)
def ints_at(address, shape):
    """As floats_at, int32."""
    return numba.carray(_to_ints(address), shape)


def _generate_widen(typingctx: Any, halves: Any, out: Any, count: Any) -> Any:
    """Write `count` fp16 numbers at `halves` to `out` in fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves, out, count = args

        def visit(index: Any, size: int) -> None:
            kind = ir.VectorType(I16, LANES) if size > 1 else I16
            value = widened(builder, load(builder, add(builder, halves, builder.mul(index, number(2))), kind))
            store(builder, value, add(builder, out, builder.mul(index, number(4))))

        in_vectors(builder, count, visit)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


widen: Any = intrinsic(_generate_widen)


def _generate_add_row(typingctx: Any, out: Any, x: Any, factor: Any, row: Any) -> Any:
    """As many floats at `out` as `row`, a tuple, has entries grow by `factor` times those at x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, x, factor, _ = args
        kind = ir.VectorType(F32, row.count)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, ir.Constant(I32, 0))
        all_of_it = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, row.count), [0] * row.count))
        store(builder, multiply_add(builder, load(builder, x, kind), all_of_it, load(builder, out, kind)), out)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, row), generate


add_row: Any = intrinsic(_generate_add_row)


def _generate_write(typingctx: Any, address: Any, word: Any) -> Any:
    """Write 64 bits to an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.intp, types.uint64), generate


write_word: Any = intrinsic(_generate_write)


def _generate_increment(typingctx: Any, address: Any) -> Any:
    """Add 1 to the 64 bits at an address, which several threads may do at once, and return what they were.

    What a thread wrote before it is seen by the threads that increment later.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", at(builder, args[0], I64), number(1), "acq_rel")

    return types.int64(types.intp), generate


increment: Any = intrinsic(_generate_increment)


def _generate_largest(typingctx: Any, x: Any, count: Any) -> Any:
    """The largest of `count` floats at x, a multiple of LANES and at least one, NaN left out."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, count = args
        best = cgutils.alloca_once_value(builder, floats(float("-inf")))
        with cgutils.for_range(builder, builder.udiv(count, number(LANES))) as loop:
            value = load(builder, add(builder, x, builder.mul(loop.index, number(4 * LANES))), FLOATS)
            builder.store(greater(builder, value, builder.load(best)), best)
        return folded(builder, builder.load(best), lambda a, b: greater(builder, a, b))

    return types.float32(types.intp, types.intp), generate


largest: Any = intrinsic(_generate_largest)


def _exp_below(function: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic: `count` floats at x, a multiple of LANES and none above shift, become function(float - shift).

    It returns their sum.
    """

    def generate_exp(typingctx: Any, x: Any, count: Any, shift: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, count, shift = args
            total = cgutils.alloca_once_value(builder, floats(0.0))
            top = spread(builder, shift)
            with cgutils.for_range(builder, builder.udiv(count, number(LANES))) as loop:
                place = add(builder, x, builder.mul(loop.index, number(4 * LANES)))
                value = function(builder, builder.fsub(load(builder, place, FLOATS), top))
                store(builder, value, place)
                builder.store(builder.fadd(builder.load(total), value), total)
            return folded(builder, builder.load(total), lambda a, b: builder.fadd(a, b))

        return types.float32(types.intp, types.intp, types.float32), generate

    return intrinsic(generate_exp)


# A sharp softmax has many weights that are subnormal numbers, which some CPUs multiply many times slower than others.
SCALE = 64
# for attention: weights that are too small to count are 0
exp_below: Any = _exp_below(lambda builder, x: _normal_exponential(builder, x, _NEGLIGIBLE))
# times 2^SCALE: weights that fp32 can only hold as subnormal numbers are normal
exp_scaled: Any = _exp_below(lambda builder, x: _normal_exponential(builder, x, _LEAST, SCALE))
# subnormal numbers too: for ranking as fp32 does
exp_to_zero: Any = _exp_below(_exponential)
