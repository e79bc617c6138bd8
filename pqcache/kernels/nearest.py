"""Nearest centroid and Lloyd sums in one pass over the points, without a distance matrix in memory.

A tile of four points and 64 centroids is one block of multiply-adds. Its 16 accumulators stay in vector registers; it is written
in LLVM IR, since compiled loops would spill them. The nearest centroid is read off those registers, and the point is added to its
cluster's sum while it is still in the cache. So memory is read once per point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_WHOLE = ir.VectorType(_I32, LANES)


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


def _multiply_add(builder: Any, rows: list[Any], centroids: Any, d: Any, sums: list[list[Any]]) -> None:
    """sums[p][v] += x_p . c over d entries; x_p at rows[p], centroids (d, columns)."""
    fma = _function(builder, f"llvm.fma.v{LANES}f32", _VECTOR, _VECTOR, _VECTOR, _VECTOR)
    with cgutils.for_range(builder, d) as loop:
        offset = builder.mul(loop.index, _number(4))
        line = builder.add(centroids, builder.mul(loop.index, _number(4 * _COLUMNS)))
        columns = [_load(builder, builder.add(line, _number(4 * LANES * v)), _VECTOR) for v in range(len(sums[0]))]
        for row, of_point in zip(rows, sums, strict=True):
            entries = _spread(builder, _load(builder, builder.add(row, offset), _F32), _VECTOR)
            for column, place in zip(columns, of_point, strict=True):
                builder.store(builder.call(fma, [entries, column, builder.load(place)]), place)


def _make_tile(points: int, vectors: int = _VECTORS) -> Any:
    """The tile as a numba intrinsic; every argument is an address or a number of bytes or entries.

    vectors: registers that hold a centroid; the others of the _VECTORS hold padding.
    """

    @intrinsic
    def tile(typingctx, x, step, centroids, bias, d, values, indices):
        """Scores x_p . c + bias_c of `points` points at x, `step` bytes apart; the best value and its index."""
        signature = types.void(*[types.intp] * 7)

        def generate(context, builder, signature, args):
            x, step, centroids, bias, d, values, indices = args
            first_bit = _function(builder, "llvm.cttz.i64", _I64, _I64, ir.IntType(1))

            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(points)]
            for v in range(vectors):
                start = _load(builder, builder.add(bias, _number(4 * LANES * v)), _VECTOR)
                for p in range(points):
                    builder.store(start, sums[p][v])
            rows = [builder.add(x, builder.mul(step, _number(p))) for p in range(points)]
            _multiply_add(builder, rows, centroids, d, sums)
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
                for v in range(vectors):
                    equal = builder.bitcast(builder.fcmp_ordered("==", scores[v], best), ir.IntType(LANES))
                    bits = builder.or_(bits, builder.shl(builder.zext(equal, _I64), _number(LANES * v)))
                index = builder.trunc(builder.call(first_bit, [bits, ir.Constant(ir.IntType(1), 0)]), _I32)
                builder.store(top, _at(builder, builder.add(values, _number(4 * p)), _F32), align=4)
                builder.store(index, _at(builder, builder.add(indices, _number(4 * p)), _I32), align=4)
            return context.get_dummy_value()

        return signature, generate

    return tile


_tile = _make_tile(_POINTS)
_tile3, _tile2, _tile1 = (_make_tile(_POINTS, vectors) for vectors in (3, 2, 1))
_single = _make_tile(1)


def _rowwise(join: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    """An intrinsic out = join(a, b) over d floats, given by addresses, which a compiler would have to assume to overlap."""

    def generate_row(typingctx, out, a, b, d):
        def generate(context, builder, signature, args):
            out, a, b, d = args
            whole = builder.udiv(d, _number(LANES))
            done = builder.mul(whole, _number(LANES))
            for kind, first, count, size in (
                (_VECTOR, _number(0), whole, LANES),
                (_F32, done, builder.sub(d, done), 1),
            ):
                with cgutils.for_range(builder, count) as loop:
                    entry = builder.add(first, builder.mul(loop.index, _number(size)))
                    offset = builder.mul(entry, _number(4))
                    x, y = (_load(builder, builder.add(row, offset), kind) for row in (a, b))
                    builder.store(join(builder, x, y), _at(builder, builder.add(out, offset), kind), align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    generate_row.__doc__ = doc
    return intrinsic(generate_row)


_subtract = _rowwise(lambda builder, x, y: builder.fsub(x, y), "out = a - b")
_add = _rowwise(lambda builder, x, y: builder.fadd(x, y), "out = a + b")


@numba.njit(nogil=True, cache=True, fastmath={"contract", "arcp"})
def _pass(first, last, x, group_step, step, groups, middle, centroids, bias, codes, best, sums, counts):
    """Tasks are (group, block of points); middle (A, d), centroids (A, tiles, d, columns), bias (A, tiles, columns).

    x is the address of points (G, N, d), whose groups are group_step bytes apart, and points of a group step bytes. Writes
    codes and best (A, N); sums (A, blocks, C, d) and counts (A, blocks, C) too unless they have no blocks.
    """
    n, d = codes.shape[1], middle.shape[1]
    blocks = (n + _BLOCK - 1) // _BLOCK
    tiles, last_centroid = centroids.shape[1], sums.shape[2] - 1
    last_vectors = (last_centroid % _COLUMNS) // LANES + 1  # of the last tile that hold a centroid
    values = np.empty(_POINTS, np.float32)
    indices = np.empty(_POINTS, np.int32)
    centered = np.empty((_POINTS, d), np.float32)  # the points less the mean, read by every tile of centroids
    at, width = centered.ctypes.data, 4 * d
    adding = sums.shape[1] > 0
    for task in range(first, last):
        a, block = task // blocks, task % blocks
        shift = middle[a]
        base, center = x + groups[a] * group_step, shift.ctypes.data
        if adding:
            total, size = sums[a, block], counts[a, block]
            sums_at = total.ctypes.data
        i = block * _BLOCK
        end = min(n, i + _BLOCK)
        while i < end:
            many = end - i >= _POINTS
            points_now = _POINTS if many else 1
            for p in range(points_now):
                _subtract(at + p * width, base + (i + p) * step, center, d)
            for tile in range(tiles):
                line, low = centroids[a, tile].ctypes.data, bias[a, tile].ctypes.data
                vectors = _VECTORS if tile < tiles - 1 else last_vectors
                if not many:
                    _single(at, width, line, low, d, values.ctypes.data, indices.ctypes.data)
                elif vectors == 4:
                    _tile(at, width, line, low, d, values.ctypes.data, indices.ctypes.data)
                elif vectors == 3:
                    _tile3(at, width, line, low, d, values.ctypes.data, indices.ctypes.data)
                elif vectors == 2:
                    _tile2(at, width, line, low, d, values.ctypes.data, indices.ctypes.data)
                else:
                    _tile1(at, width, line, low, d, values.ctypes.data, indices.ctypes.data)
                for p in range(points_now):
                    if tile == 0 or values[p] > best[a, i + p]:
                        best[a, i + p] = values[p]
                        # for a point of NaN the index is past all centroids
                        codes[a, i + p] = min(indices[p] + tile * _COLUMNS, last_centroid)
            if adding:
                for p in range(points_now):
                    c = codes[a, i + p]
                    size[c] += 1
                    _add(sums_at + c * width, sums_at + c * width, at + p * width, d)
            i += points_now
    centered[0, 0] = 0  # numba frees an array behind its last use, and addresses are none


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
    product: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass over the points x (G, N, d) fp32 of `groups` (default all, A of them): nearest centroids, sums per cluster.

    centroids (A, C, d) and middle (A, 1, d) fp32; distances are those of x - middle to the centroids, so middle = 0 compares
    as they are. Returns codes (A, N) int32, the squared distance without |x - middle|^2 (A, N), and with add=True the sums
    of x - middle (A, C, d) and the sizes (A, C) of the clusters (else empty).
    product=True: the nearest is the centroid of the largest inner product, and the second result -2 times that.
    """
    groups = list(range(len(x))) if groups is None else groups
    a, n, d = len(groups), x.shape[1], x.shape[2]
    c = centroids.shape[1]
    tiles = -(-c // _COLUMNS)
    packed = torch.zeros(a, tiles * _COLUMNS, d)
    packed[:, :c] = centroids
    packed = packed.view(a, tiles, _COLUMNS, d)
    bias = np.full((a, tiles, _COLUMNS), -np.inf, np.float32)  # padding never wins
    bias.reshape(a, -1)[:, :c] = 0 if product else (centroids.square().sum(-1) / -2).numpy()
    codes = np.empty((a, n), np.int32)
    best = np.empty((a, n), np.float32)
    blocks = _blocks(n)
    sums = np.zeros((a, blocks if add else 0, c, d), np.float32)
    counts = np.zeros((a, blocks if add else 0, c), np.int64)
    points = x if x.stride(-1) == 1 else x.contiguous()
    threads.run(
        _pass,
        a * blocks,
        points.data_ptr(),
        4 * points.stride(0),
        4 * points.stride(1),
        np.asarray(groups, np.int64),
        middle.reshape(a, d).contiguous().numpy(),
        packed.transpose(2, 3).contiguous().numpy(),
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
