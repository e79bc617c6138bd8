"""Nearest centroid and Lloyd sums in one pass over the points, without a distance matrix in memory.

A tile of four points and 64 centroids is one block of multiply-adds. Its 16 accumulators stay in vector registers; it is written
in LLVM IR, since compiled loops would spill them. The nearest centroid is read off those registers, and the point is added to its
cluster's sum while it is still in the cache. So memory is read once per point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels import threads
from pqcache.kernels.registers import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    WORDS,
    greater,
    in_vectors,
    load,
    multiply_add,
    number,
    spread,
    store,
)

_VECTORS = 4  # registers of centroids side by side
_POINTS = LANES // 4  # points per tile: _POINTS * _VECTORS accumulators must fit the register file
_COLUMNS = LANES * _VECTORS  # centroids per tile
# points per task: sums are added block by block, so that the result does not depend on the number of threads
_BLOCK = 2048


def _multiply_add(builder: Any, rows: list[Any], centroids: Any, d: Any, sums: list[list[Any]]) -> None:
    """sums[p][v] += x_p . c over d entries; x_p at rows[p], centroids (d, columns)."""
    with cgutils.for_range(builder, d) as loop:
        offset = builder.mul(loop.index, number(4))
        line = builder.add(centroids, builder.mul(loop.index, number(4 * _COLUMNS)))
        columns = [load(builder, builder.add(line, number(4 * LANES * v)), FLOATS) for v in range(len(sums[0]))]
        for row, of_point in zip(rows, sums, strict=True):
            entries = spread(builder, load(builder, builder.add(row, offset), F32))
            for column, place in zip(columns, of_point, strict=True):
                builder.store(multiply_add(builder, entries, column, builder.load(place)), place)


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
            count = ir.FunctionType(I64, [I64, ir.IntType(1)])
            first_bit = cgutils.get_or_insert_function(builder.module, count, "llvm.cttz.i64")

            sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(vectors)] for _ in range(points)]
            for v in range(vectors):
                start = load(builder, builder.add(bias, number(4 * LANES * v)), FLOATS)
                for p in range(points):
                    builder.store(start, sums[p][v])
            rows = [builder.add(x, builder.mul(step, number(p))) for p in range(points)]
            _multiply_add(builder, rows, centroids, d, sums)
            for p in range(points):
                scores = [builder.load(s) for s in sums[p]]
                best = scores[0]
                for other in scores[1:]:
                    best = greater(builder, other, best)
                half = LANES // 2  # fold halves onto each other: LLVM's own reduction visits the lanes one by one
                while half:
                    lanes = ir.Constant(WORDS, [lane ^ half for lane in range(LANES)])
                    other = builder.shuffle_vector(best, ir.Constant(FLOATS, ir.Undefined), lanes)
                    best = greater(builder, other, best)
                    half //= 2
                bits = number(0)
                for v in range(vectors):
                    equal = builder.bitcast(builder.fcmp_ordered("==", scores[v], best), ir.IntType(LANES))
                    bits = builder.or_(bits, builder.shl(builder.zext(equal, I64), number(LANES * v)))
                index = builder.trunc(builder.call(first_bit, [bits, ir.Constant(ir.IntType(1), 0)]), I32)
                top = builder.extract_element(best, ir.Constant(I32, 0))
                store(builder, top, builder.add(values, number(4 * p)))
                store(builder, index, builder.add(indices, number(4 * p)))
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

            def visit(index, size):
                kind, offset = FLOATS if size > 1 else F32, builder.mul(index, number(4))
                x, y = (load(builder, builder.add(row, offset), kind) for row in (a, b))
                store(builder, join(builder, x, y), builder.add(out, offset))

            in_vectors(builder, d, visit)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    generate_row.__doc__ = doc
    return intrinsic(generate_row)


_subtract = _rowwise(lambda builder, x, y: builder.fsub(x, y), "out = a - b")
_add = _rowwise(lambda builder, x, y: builder.fadd(x, y), "out = a + b")


@threads.kernel(fastmath={"contract", "arcp"})
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


@threads.kernel(fastmath=True)
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
