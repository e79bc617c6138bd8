"""Building blocks of kernels that are written in LLVM IR: vector registers, 16-bit floats, exponentials.

Compiled loops leave vector registers half empty where several query heads share one read, and take one exponential at a time.
All memory is named by addresses (intp), which a caller takes from tensors that it keeps alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# features of the processor that numba compiles for: users may set fewer than it has, and numba's cache on disk is keyed by them
_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
LINE = 64  # bytes of a cache line
LANES = 16 if "+avx512f" in _FEATURES else 8  # floats per vector register

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


def fetch(builder: Any, address: Any, size: Any) -> None:
    """Bring `size` bytes, whole cache lines of them, to the second-level cache without waiting for them."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, near, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    with cgutils.for_range(builder, builder.udiv(size, number(LINE))) as loop:
        place = add(builder, address, builder.mul(loop.index, number(LINE)))
        builder.call(prefetch, [at(builder, place, I8), read, near, data])


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


_LOWEST = -87.0  # exp of less is taken for 0
_ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds a float to an integer in its lowest bits
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exponential(builder: Any, x: Any) -> Any:
    """exp(x) of a vector of numbers <= 0, within 2 units of fp32's last place; NaN stays NaN.

    exp(x) = 2^n exp(r) with n = round(x / ln 2); exp(r), |r| <= ln 2 / 2, by the polynomial of the Cephes library's expf.
    """
    small = builder.fcmp_ordered("<", x, floats(_LOWEST))
    x = builder.select(small, floats(_LOWEST), x)
    shifted = multiply_add(builder, x, floats(1.44269504088896341), floats(_ROUND))
    n = builder.fsub(shifted, floats(_ROUND))
    r = multiply_add(builder, n, floats(-0.693359375), x)
    r = multiply_add(builder, n, floats(2.12194440e-4), r)
    y = floats(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        y = multiply_add(builder, y, r, floats(coefficient))
    y = multiply_add(builder, builder.fmul(r, r), y, builder.fadd(r, floats(1.0)))
    # the bits of _ROUND are 0x4B400000, and n was added to them
    power = builder.shl(builder.add(builder.bitcast(shifted, WORDS), words(127 - 0x4B400000)), words(23))
    return builder.select(small, floats(0.0), builder.fmul(y, builder.bitcast(power, FLOATS)))


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
        whole = builder.udiv(count, number(LANES))
        done = builder.mul(whole, number(LANES))
        for kind, first, steps, size in (
            (ir.VectorType(I16, LANES), number(0), whole, LANES),
            (I16, done, builder.sub(count, done), 1),
        ):
            with cgutils.for_range(builder, steps) as loop:
                entry = builder.add(first, builder.mul(loop.index, number(size)))
                value = widened(builder, load(builder, add(builder, halves, builder.mul(entry, number(2))), kind))
                store(builder, value, add(builder, out, builder.mul(entry, number(4))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


widen: Any = intrinsic(_generate_widen)


def _generate_add_four(typingctx: Any, out: Any, x: Any, factor: Any) -> Any:
    """Four floats at `out` grow by `factor` times those at x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, x, factor = args
        kind = ir.VectorType(F32, 4)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, ir.Constant(I32, 0))
        four = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, 4), [0] * 4))
        store(builder, multiply_add(builder, load(builder, x, kind), four, load(builder, out, kind)), out)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), generate


add_four: Any = intrinsic(_generate_add_four)


def _generate_write(typingctx: Any, address: Any, word: Any) -> Any:
    """Write 64 bits to an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.intp, types.uint64), generate


write_word: Any = intrinsic(_generate_write)


def _generate_peak(typingctx: Any, x: Any, blocks: Any) -> Any:
    """The largest of blocks * LANES floats at x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, blocks = args
        best = cgutils.alloca_once_value(builder, floats(float("-inf")))
        with cgutils.for_range(builder, blocks) as loop:
            value = load(builder, add(builder, x, builder.mul(loop.index, number(4 * LANES))), FLOATS)
            builder.store(greater(builder, value, builder.load(best)), best)
        return folded(builder, builder.load(best), lambda a, b: greater(builder, a, b))

    return types.float32(types.intp, types.intp), generate


peak: Any = intrinsic(_generate_peak)


def _generate_weights(typingctx: Any, x: Any, blocks: Any, top: Any) -> Any:
    """Replace blocks * LANES floats at x by exp(x - top), where none exceeds `top`; return their sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, blocks, top = args
        total = cgutils.alloca_once_value(builder, floats(0.0))
        tops = spread(builder, top)
        with cgutils.for_range(builder, blocks) as loop:
            place = add(builder, x, builder.mul(loop.index, number(4 * LANES)))
            value = exponential(builder, builder.fsub(load(builder, place, FLOATS), tops))
            store(builder, value, place)
            builder.store(builder.fadd(builder.load(total), value), total)
        return folded(builder, builder.load(total), lambda a, b: builder.fadd(a, b))

    return types.float32(types.intp, types.intp, types.float32), generate


weights: Any = intrinsic(_generate_weights)
