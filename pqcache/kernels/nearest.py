"""Nearest centroid and Lloyd sums in one pass over the points, without a distance matrix in memory.

A tile of four points and 64 centroids is one block of multiply-adds. Its 16 accumulators stay in vector registers; it is written
in LLVM IR, since compiled loops would spill them. The nearest centroid is read off those registers, and the point is added to its
cluster's sum while it is still in the cache. So memory is read once per point.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from pqcache.kernels import threads

# features of the processor that numba compiles for: users may set fewer than it has, and numba's cache on disk is keyed by them
FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
_WIDE = "+avx512f" in FEATURES
LANES = 16 if _WIDE else 8  # floats per vector register
_VECTORS = 4  # registers of centroids side by side
_POINTS = 4 if _WIDE else 2  # points per tile: _POINTS * _VECTORS accumulators must fit the register file
_COLUMNS = LANES * _VECTORS  # centroids per tile
# points per task: sums are added block by block, so that the result does not depend on the number of threads
_BLOCK = 2048

ROUGH = "+avx512bf16" in FEATURES  # whether the processor has products of bfloat16, which take half the time

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_ROUGH_MAX_D = 256  # entries of a point that the rough tile has room for
_WHOLE = ir.VectorType(_I32, LANES)  # a register of integers, or of pairs of bfloat16
_HALF = ir.VectorType(_I16, LANES)
if ROUGH:
    llvm.initialize_native_asmparser()  # for the instruction's mnemonic: its intrinsic has another type in every LLVM


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_at(builder, address, kind), align=4)


def _spread(builder: Any, scalar: Any, kind: Any) -> Any:
    """A vector of `kind` that has the scalar in every lane."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_WHOLE, [0] * LANES))


def _function(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _multiply_add(builder: Any, rows: list[Any], middle: Any, centroids: Any, d: Any, sums: list[list[Any]]) -> None:
    """sums[p][v] += (x_p - middle) . c over d entries, fp32; x_p at rows[p], centroids (d, columns)."""
    fma = _function(builder, f"llvm.fma.v{LANES}f32", _VECTOR, _VECTOR, _VECTOR, _VECTOR)
    with cgutils.for_range(builder, d) as loop:
        offset = builder.mul(loop.index, _number(4))
        center = _load(builder, builder.add(middle, offset), _F32)
        line = builder.add(centroids, builder.mul(loop.index, _number(4 * _COLUMNS)))
        columns = [_load(builder, builder.add(line, _number(4 * LANES * v)), _VECTOR) for v in range(_VECTORS)]
        for row, of_point in zip(rows, sums, strict=True):
            entry = builder.fsub(_load(builder, builder.add(row, offset), _F32), center)
            for column, place in zip(columns, of_point, strict=True):
                entries = _spread(builder, entry, _VECTOR)
                builder.store(builder.call(fma, [entries, column, builder.load(place)]), place)


def _multiply_add_rough(
    builder: Any, rows: list[Any], middle: Any, centroids: Any, d: Any, sums: list[list[Any]]
) -> None:
    """The same of x_p - middle and c rounded to bfloat16, d a multiple of 16; centroids (d / 2, columns) pairs of entries.

    The sum of a pair's two products is one instruction, so that this takes half the multiply-adds.
    """
    rounded = [cgutils.alloca_once(builder, ir.ArrayType(_I16, _ROUGH_MAX_D)) for _ in rows]
    with cgutils.for_range(builder, builder.udiv(d, _number(LANES))) as loop:
        offset = builder.mul(loop.index, _number(4 * LANES))
        center = _load(builder, builder.add(middle, offset), _VECTOR)
        for row, buffer in zip(rows, rounded, strict=True):
            bits = builder.bitcast(builder.fsub(_load(builder, builder.add(row, offset), _VECTOR), center), _WHOLE)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_WHOLE, [16] * LANES)), ir.Constant(_WHOLE, [1] * LANES))
            nearest_even = builder.add(builder.add(bits, ir.Constant(_WHOLE, [0x7FFF] * LANES)), odd)
            half = builder.trunc(builder.lshr(nearest_even, ir.Constant(_WHOLE, [16] * LANES)), _HALF)
            to = builder.add(builder.ptrtoint(buffer, _I64), builder.mul(loop.index, _number(2 * LANES)))
            builder.store(half, _at(builder, to, _HALF), align=2)
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _WHOLE, _WHOLE])
    dot = ir.InlineAsm(kind, "vdpbf16ps $2, $3, $0", "=v,0,v,v", side_effect=False)
    with cgutils.for_range(builder, builder.udiv(d, _number(2))) as loop:
        line = builder.add(centroids, builder.mul(loop.index, _number(4 * _COLUMNS)))
        columns = [_load(builder, builder.add(line, _number(4 * LANES * v)), _WHOLE) for v in range(_VECTORS)]
        for buffer, of_point in zip(rounded, sums, strict=True):
            at = builder.add(builder.ptrtoint(buffer, _I64), builder.mul(loop.index, _number(4)))
            pair = _spread(builder, _load(builder, at, _I32), _WHOLE)
            for column, place in zip(columns, of_point, strict=True):
                builder.store(builder.call(dot, [builder.load(place), pair, column]), place)


def _make_tile(points: int, rough: bool = False) -> Any:
    """The tile as a numba intrinsic; every argument is an address or a number of bytes or entries."""

    @intrinsic
    def tile(typingctx, x, step, middle, centroids, bias, d, values, indices):
        """Scores (x_p - middle) . c + bias_c of `points` points at x, `step` bytes apart; the best value and its index."""
        signature = types.void(*[types.intp] * 8)

        def generate(context, builder, signature, args):
            x, step, middle, centroids, bias, d, values, indices = args
            first_bit = _function(builder, "llvm.cttz.i64", _I64, _I64, ir.IntType(1))

            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(_VECTORS)] for _ in range(points)]
            for v in range(_VECTORS):
                start = _load(builder, builder.add(bias, _number(4 * LANES * v)), _VECTOR)
                for p in range(points):
                    builder.store(start, sums[p][v])
            rows = [builder.add(x, builder.mul(step, _number(p))) for p in range(points)]
            (_multiply_add_rough if rough else _multiply_add)(builder, rows, middle, centroids, d, sums)
            for p in range(points):
                scores = [builder.load(s) for s in sums[p]]
                best = scores[0]
                for other in scores[1:]:
                    best = _greater(builder, other, best)
                half = LANES // 2  # fold halves onto each other: LLVM's own reduction visits the lanes one by one
                while half:
                    lanes = ir.Constant(_WHOLE, [lane ^ half for lane in range(LANES)])
                    other = builder.shuffle_vector(best, ir.Constant(_VECTOR, ir.Undefined), lanes)
                    best = _greater(builder, other, best)
                    half //= 2
                top = builder.extract_element(best, ir.Constant(_I32, 0))
                bits = _number(0)
                for v in range(_VECTORS):
                    equal = builder.bitcast(builder.fcmp_ordered("==", scores[v], best), ir.IntType(LANES))
                    bits = builder.or_(bits, builder.shl(builder.zext(equal, _I64), _number(LANES * v)))
                index = builder.trunc(builder.call(first_bit, [bits, ir.Constant(ir.IntType(1), 0)]), _I32)
                builder.store(top, _at(builder, builder.add(values, _number(4 * p)), _F32), align=4)
                builder.store(index, _at(builder, builder.add(indices, _number(4 * p)), _I32), align=4)
            return context.get_dummy_value()

        return signature, generate

    return tile


_tile = _make_tile(_POINTS)
_single = _make_tile(1)
_rough = _make_tile(_POINTS, rough=ROUGH)


def _generate_add(typingctx, total, x, middle, d):
    """total += x - middle over d floats at these addresses. In LLVM IR, since a compiler must assume that they overlap."""

    def generate(context, builder, signature, args):
        total, x, middle, d = args
        whole = builder.udiv(d, ir.Constant(_I64, LANES))
        done = builder.mul(whole, ir.Constant(_I64, LANES))
        for kind, first, count, size in (
            (_VECTOR, ir.Constant(_I64, 0), whole, LANES),
            (_F32, done, builder.sub(d, done), 1),
        ):
            with cgutils.for_range(builder, count) as loop:
                entry = builder.add(first, builder.mul(loop.index, ir.Constant(_I64, size)))
                offset = builder.mul(entry, ir.Constant(_I64, 4))
                value, center = (_load(builder, builder.add(a, offset), kind) for a in (x, middle))
                place = _at(builder, builder.add(total, offset), kind)
                builder.store(builder.fadd(builder.load(place, align=4), builder.fsub(value, center)), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


_add: Any = intrinsic(_generate_add)


@numba.njit(nogil=True, cache=True, fastmath={"contract", "arcp"})
def _pass(first, last, x, groups, middle, centroids, pairs, bias, codes, best, sums, counts):
    """Tasks are (group, block of points); x (G, N, d), middle (A, d), centroids (A, tiles, d, columns), bias (A, tiles, columns).

    pairs (A, tiles, d / 2, columns) int32 are the centroids in bfloat16, of size 0 where fp32 is used. Writes codes and best
    (A, N); sums (A, blocks, C, d) and counts (A, blocks, C) too unless they have no blocks.
    """
    n, d = x.shape[1], x.shape[2]
    blocks = (n + _BLOCK - 1) // _BLOCK
    tiles, last_centroid = centroids.shape[1], sums.shape[2] - 1
    values = np.empty(_POINTS, np.float32)
    indices = np.empty(_POINTS, np.int32)
    step = x.strides[1]
    adding = sums.shape[1] > 0
    rough = pairs.shape[2] > 0
    for task in range(first, last):
        a, block = task // blocks, task % blocks
        points = x[groups[a]]
        shift = middle[a]
        base, center = points.ctypes.data, shift.ctypes.data
        if adding:
            total, size = sums[a, block], counts[a, block]
            sums_at = total.ctypes.data
        i = block * _BLOCK
        end = min(n, i + _BLOCK)
        while i < end:
            many = end - i >= _POINTS
            points_now = _POINTS if many else 1
            for tile in range(tiles):
                line, low = centroids[a, tile].ctypes.data, bias[a, tile].ctypes.data
                if many and rough:
                    line = pairs[a, tile].ctypes.data
                    _rough(base + i * step, step, center, line, low, d, values.ctypes.data, indices.ctypes.data)
                elif many:
                    _tile(base + i * step, step, center, line, low, d, values.ctypes.data, indices.ctypes.data)
                else:
                    _single(base + i * step, step, center, line, low, d, values.ctypes.data, indices.ctypes.data)
                for p in range(points_now):
                    if tile == 0 or values[p] > best[a, i + p]:
                        best[a, i + p] = values[p]
                        # for a point of NaN the index is past all centroids
                        codes[a, i + p] = min(indices[p] + tile * _COLUMNS, last_centroid)
            if adding:
                for p in range(points_now):
                    c = codes[a, i + p]
                    size[c] += 1
                    _add(sums_at + c * d * 4, base + (i + p) * step, center, d)
            i += points_now


@numba.njit(nogil=True, cache=True, fastmath=True)
def _moments(first, last, x, total, square):
    """Sums of x - x[:, 0] and of its square over blocks of points: total and square (G, blocks, d)."""
    n, d = x.shape[1], x.shape[2]
    blocks = total.shape[1]
    for task in range(first, last):
        g, block = task // blocks, task % blocks
        origin = x[g, 0]
        for i in range(block * _BLOCK, min(n, (block + 1) * _BLOCK)):
            for j in range(d):
                value = x[g, i, j] - origin[j]
                total[g, block, j] += value
                square[g, block, j] += value * value


@numba.njit(nogil=True, cache=True)
def _sum_groups(first, last, x, codes, sums):
    """Task = group: sums (G, C, d) += its points x (G, N, d), one after the other, each to the cluster codes (G, N) names."""
    for g in range(first, last):
        for i in range(codes.shape[1]):
            for j in range(x.shape[2]):
                sums[g, codes[g, i], j] += x[g, i, j]


def sums_by_code(x: torch.Tensor, codes: torch.Tensor, c: int) -> torch.Tensor:
    """Sums of each cluster's points, added in their order: x (G, N, d) fp32, codes (G, N) int64 in 0 .. c-1 -> (G, c, d)."""
    sums = torch.zeros(len(x), c, x.shape[2])
    threads.run(_sum_groups, len(x), x.contiguous().numpy(), codes.contiguous().numpy(), sums.numpy())
    return sums


def _blocks(n: int) -> int:
    return -(-n // _BLOCK)


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (G, 1, d) and mean variance over d (G,) of points x (G, N, d) fp32, read once."""
    g, n, d = x.shape
    total, square = (np.zeros((g, _blocks(n), d), np.float32) for _ in range(2))
    threads.run(_moments, g * _blocks(n), x.numpy(), total, square)
    shift = torch.from_numpy(total).double().sum(1) / n
    variance = torch.from_numpy(square).double().sum(1) / n - shift.square()
    return (x[:, 0] + shift.float())[:, None], variance.clamp_min(0).mean(-1).float()


def nearest(
    x: torch.Tensor,
    centroids: torch.Tensor,
    middle: torch.Tensor,
    groups: list[int] | None = None,
    add: bool = False,
    rough: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass over the points x (G, N, d) fp32 of `groups` (default all, A of them): nearest centroids, sums per cluster.

    centroids (A, C, d) and middle (A, 1, d) fp32; distances are those of x - middle to the centroids, so middle = 0 compares
    as they are. Returns codes (A, N) int32, the squared distance without |x - middle|^2 (A, N), and with add=True the sums
    of x - middle (A, C, d) and the sizes (A, C) of the clusters (else empty). rough=True: where the processor multiplies
    bfloat16 twice as fast, distances are those of points and centroids rounded to it; sums stay those of the points.
    """
    groups = list(range(len(x))) if groups is None else groups
    a, n, d = len(groups), x.shape[1], x.shape[2]
    c = centroids.shape[1]
    tiles = -(-c // _COLUMNS)
    packed = torch.zeros(a, tiles * _COLUMNS, d)
    packed[:, :c] = centroids
    packed = packed.view(a, tiles, _COLUMNS, d)
    bias = np.full((a, tiles, _COLUMNS), -np.inf, np.float32)  # padding never wins
    bias.reshape(a, -1)[:, :c] = (centroids.square().sum(-1) / -2).numpy()
    if rough and ROUGH and d % LANES == 0 and d <= _ROUGH_MAX_D:
        of_two = packed.bfloat16().view(a, tiles, _COLUMNS, d // 2, 2).transpose(2, 3).contiguous()
        pairs = of_two.view(torch.int32)[..., 0].numpy()
    else:
        pairs = np.empty((a, tiles, 0, _COLUMNS), np.int32)
    codes = np.empty((a, n), np.int32)
    best = np.empty((a, n), np.float32)
    blocks = _blocks(n)
    sums = np.zeros((a, blocks if add else 0, c, d), np.float32)
    counts = np.zeros((a, blocks if add else 0, c), np.int64)
    points = x if x.stride(-1) == 1 else x.contiguous()
    threads.run(
        _pass,
        a * blocks,
        points.numpy(),
        np.asarray(groups, np.int64),
        middle.reshape(a, d).contiguous().numpy(),
        packed.transpose(2, 3).contiguous().numpy(),
        pairs,
        bias,
        codes,
        best,
        sums,
        counts,
    )
    return (
        torch.from_numpy(codes),
        torch.from_numpy(best).mul_(-2),
        torch.from_numpy(sums).sum(1),
        torch.from_numpy(counts).sum(1),
    )
