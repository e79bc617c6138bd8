"""What numba has no words for, and the few loops that all kernels share: addresses, bits of numbers, exponentials."""

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
# a tuple with one entry replaced: tuples serve as accumulators, see attend.block
tuple_setitem: Any = unsafe.tuple_setitem
FAST = {"reassoc", "contract", "arcp", "nsz"}  # additions in any order; NaN and infinity stay what they are
SCALE = 64  # weights times 2^64 are normal numbers where fp32 has subnormal ones, which some CPUs multiply much slower
BACK = np.float32(2.0**-SCALE)
NEGLIGIBLE = np.float32(-70)  # nats: a weight of less has no part in a sum of fp32, whatever the number of tokens
LEAST = np.float32(-104)  # nats: an exponential of less is 0 in fp32

# what rows may hold -> a number whose type tells kernels so; fp16 only where the processor converts it, bfloat16 by its bits
KINDS: dict[torch.dtype, Any] = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
if "+f16c" in cpu_target.target_context.codegen().magic_tuple()[2] or platform.machine() in ("aarch64", "arm64"):
    KINDS[torch.float16] = np.int16(0)
FP32 = KINDS[torch.float32]
PERMUTES = "+avx2" in cpu_target.target_context.codegen().magic_tuple()[2]  # whether the processor has `look_up`

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


@_intrinsic
def _pointer(typingctx, address, kind):
    """An address as a pointer to numbers of kind's type."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.intp, kind), generate


@numba.njit(nogil=True)
def at(address, shape, kind):
    """The numbers at an address as an array. It counts no references, which would cost more than the work on a row."""
    return numba.carray(_pointer(address, kind), shape)


@numba.njit(nogil=True)
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


@numba.njit(nogil=True)
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


@numba.njit(nogil=True)
def half(bits):
    """A finite fp16 number, given by its bits (int16), in fp32, on any processor."""
    word = np.int32(bits)
    # the exponents' biases: 127 and 15
    size = float_of((word & np.int32(0x7FFF)) << np.int32(13)) * np.float32(2.0**112)
    return float_of(bits_of(size) | ((word & np.int32(0x8000)) << np.int32(16)))


@numba.njit(nogil=True)
def widen(address, out):
    """Fill `out`, fp32, with the fp16 numbers at an address."""
    halves = at(address, out.shape, np.int16(0))
    for i in range(out.shape[0]):
        out[i] = half(halves[i])


@numba.njit(nogil=True, fastmath={"contract"})
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


@numba.njit(nogil=True, fastmath=FAST)
def exponentials(line, top, least, scale):
    """The numbers of `line`, none above `top`, become 2^scale exp(number - top), 0 below `least` nats; their sum."""
    total = np.float32(0)
    for i in range(line.shape[0]):
        value = _exponential(line[i] - top, least, np.int32(scale))
        line[i] = value
        total += value
    return total


@numba.njit(nogil=True)
def largest(line):
    """The largest number of `line`, -inf if it has none. By bits, which compilers put into vectors."""
    best = bits_of(np.float32(-np.inf)) ^ np.int32(0x7FFFFFFF)
    for i in range(line.shape[0]):
        bits = bits_of(line[i])
        best = max(best, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return float_of(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_intrinsic
def eight(typingctx, address, x):
    """Write an fp32 number eight times from an address on."""

    def generate(context, builder, signature, args):
        kind = ir.VectorType(_FLOAT, 8)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), args[1], _I32(0))
        all_eight = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, 8), None))
        builder.store(all_eight, builder.inttoptr(args[0], kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


@_intrinsic
def look_up(typingctx, source, table, out, width, bits):
    """Write to `out` the fp32 numbers that 2- or 4-bit codes have in a table, by planes (packed/tiles.py); see PERMUTES.

    source: address of `width` bytes, a multiple of 8. table: that of 16 numbers, repeated where codes are fewer.
    """

    def generate(context, builder, signature, args):
        source, table, out, width, bits = args
        numbers, lanes, word = ir.VectorType(_FLOAT, 8), ir.VectorType(_I32, 8), ir.IntType(64)

        def pointer(address, offset, kind):
            return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

        def splat(x):
            one = builder.insert_element(ir.Constant(lanes, ir.Undefined), x, _I32(0))
            return builder.shuffle_vector(one, one, ir.Constant(lanes, None))

        kind = ir.FunctionType(numbers, [numbers, lanes])
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permps")
        low, high = (builder.load(pointer(table, word(at), numbers), align=4) for at in (0, 32))
        with cgutils.for_range_slice(builder, word(0), width, word(8), word) as (byte, _):
            codes = builder.zext(builder.load(pointer(source, byte, ir.VectorType(_I8, 8)), align=1), lanes)
            with cgutils.for_range(builder, builder.sdiv(word(8), bits), intp=word) as plane:
                shift = builder.mul(plane.index, bits)
                code = builder.lshr(codes, splat(builder.trunc(shift, _I32)))
                upper = builder.icmp_signed("<", builder.shl(code, splat(_I32(28))), ir.Constant(lanes, None))
                found = builder.select(upper, *(builder.call(permute, [half, code]) for half in (high, low)))
                place = builder.shl(builder.add(builder.mul(plane.index, width), byte), word(2))
                builder.store(found, pointer(out, place, numbers), align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


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
