"""Nearest centroid and Lloyd sums in one pass over the points: no distance matrix ever leaves the registers.

A tile of four points against 64 centroids is one block of multiply-adds whose 16 accumulators stay in vector registers
(written in LLVM IR, since a compiler asked for it in loops spills them); the best centroid is found in those registers, and
the point is added to its cluster's sum while it is still in the cache. Reading the points once is all the memory traffic.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pqcache.kernels import threads

_WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))
_LANES = 16 if _WIDE else 8  # floats per vector register
_VECTORS = 4  # registers of centroids side by side
_POINTS = 4 if _WIDE else 2  # points per tile: _POINTS * _VECTORS accumulators must fit the register file
_COLUMNS = _LANES * _VECTORS  # centroids per tile
_BLOCK = (
    2048  # points per task: sums are added block by block, so that the result does not depend on the number of threads
)

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, _LANES)


def _make_tile(points: int) -> Any:
    """The tile as a numba intrinsic; every argument is an address or a number of bytes or entries."""

    @intrinsic
    def tile(typingctx, x, step, middle, centroids, bias, d, values, indices):
        """Scores (x_p - middle) . c + bias_c of `points` points at x, `step` bytes apart; the best value and its index."""
        signature = types.void(*[types.intp] * 8)

        def generate(context, builder, signature, args):
            x, step, middle, centroids, bias, d, values, indices = args

            def number(value):
                return ir.Constant(_I64, value)

            def at(address, kind):
                return builder.inttoptr(address, kind.as_pointer())

            def load(address, kind):
                return builder.load(at(address, kind), align=4)

            def spread(scalar):
                vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
                lanes = ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES)
                return builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), lanes)

            def function(name, result, *arguments):
                return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)

            fma = function(f"llvm.fma.v{_LANES}f32", _VECTOR, _VECTOR, _VECTOR, _VECTOR)
            highest = function(f"llvm.vector.reduce.fmax.v{_LANES}f32", _F32, _VECTOR)
            first_bit = function("llvm.cttz.i64", _I64, _I64, ir.IntType(1))

            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(_VECTORS)] for _ in range(points)]
            for v in range(_VECTORS):
                start = load(builder.add(bias, number(4 * _LANES * v)), _VECTOR)
                for p in range(points):
                    builder.store(start, sums[p][v])
            rows = [builder.add(x, builder.mul(step, number(p))) for p in range(points)]
            with cgutils.for_range(builder, d) as loop:
                offset = builder.mul(loop.index, number(4))
                center = load(builder.add(middle, offset), _F32)
                line = builder.add(centroids, builder.mul(loop.index, number(4 * _COLUMNS)))
                columns = [load(builder.add(line, number(4 * _LANES * v)), _VECTOR) for v in range(_VECTORS)]
                for p in range(points):
                    entry = spread(builder.fsub(load(builder.add(rows[p], offset), _F32), center))
                    for v in range(_VECTORS):
                        builder.store(builder.call(fma, [entry, columns[v], builder.load(sums[p][v])]), sums[p][v])
            for p in range(points):
                scores = [builder.load(s) for s in sums[p]]
                best = scores[0]
                for other in scores[1:]:
                    best = builder.select(builder.fcmp_ordered(">", other, best), other, best)
                top = builder.call(highest, [best])
                bits = number(0)
                for v in range(_VECTORS):
                    equal = builder.bitcast(builder.fcmp_ordered("==", scores[v], spread(top)), ir.IntType(_LANES))
                    bits = builder.or_(bits, builder.shl(builder.zext(equal, _I64), number(_LANES * v)))
                index = builder.trunc(builder.call(first_bit, [bits, ir.Constant(ir.IntType(1), 0)]), _I32)
                builder.store(top, at(builder.add(values, number(4 * p)), _F32), align=4)
                builder.store(index, at(builder.add(indices, number(4 * p)), _I32), align=4)
            return context.get_dummy_value()

        return signature, generate

    return tile


_tile = _make_tile(_POINTS)
_single = _make_tile(1)


@numba.njit(nogil=True, cache=True, fastmath={"contract", "arcp"})
def _pass(first, last, x, groups, middle, centroids, bias, codes, best, sums, counts):
    """Tasks are (group, block of points); x (G, N, d), middle (A, d), centroids (A, tiles, d, columns), bias (A, tiles, columns).

    Writes codes and best (A, N); sums (A, blocks, C, d) and counts (A, blocks, C) too unless they have no blocks.
    """
    n, d = x.shape[1], x.shape[2]
    blocks = (n + _BLOCK - 1) // _BLOCK
    tiles = centroids.shape[1]
    values = np.empty(_POINTS, np.float32)
    indices = np.empty(_POINTS, np.int32)
    step = x.strides[1]
    adding = sums.shape[1] > 0
    for task in range(first, last):
        a, block = task // blocks, task % blocks
        points = x[groups[a]]
        shift = middle[a]
        base, center = points.ctypes.data, shift.ctypes.data
        if adding:
            total, size = sums[a, block], counts[a, block]
        i = block * _BLOCK
        end = min(n, i + _BLOCK)
        while i < end:
            many = end - i >= _POINTS
            took = _POINTS if many else 1
            for tile in range(tiles):
                line, low = centroids[a, tile].ctypes.data, bias[a, tile].ctypes.data
                if many:
                    _tile(base + i * step, step, center, line, low, d, values.ctypes.data, indices.ctypes.data)
                else:
                    _single(base + i * step, step, center, line, low, d, values.ctypes.data, indices.ctypes.data)
                for p in range(took):
                    if tile == 0 or values[p] > best[a, i + p]:
                        best[a, i + p] = values[p]
                        codes[a, i + p] = indices[p] + tile * _COLUMNS
            if adding:
                for p in range(took):
                    c = codes[a, i + p]
                    size[c] += 1
                    for j in range(d):
                        total[c, j] += points[i + p, j] - shift[j]
            i += took


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
    x: torch.Tensor, centroids: torch.Tensor, middle: torch.Tensor, groups: list[int] | None = None, add: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass over the points x (G, N, d) fp32 of `groups` (default all, A of them): who is nearest, and their sums.

    centroids (A, C, d) and middle (A, 1, d) fp32; distances are those of x - middle to the centroids, so middle = 0 compares
    as they are. Returns codes (A, N) int64, the squared distance without |x - middle|^2 (A, N), and with add=True the sums
    of x - middle (A, C, d) and the sizes (A, C) of the clusters (else empty).
    """
    groups = list(range(len(x))) if groups is None else groups
    a, n, d = len(groups), x.shape[1], x.shape[2]
    c = centroids.shape[1]
    tiles = -(-c // _COLUMNS)
    packed = np.zeros((a, tiles * _COLUMNS, d), np.float32)
    packed[:, :c] = centroids.numpy()
    bias = np.full((a, tiles, _COLUMNS), -np.inf, np.float32)  # padding never wins
    bias.reshape(a, -1)[:, :c] = (centroids.square().sum(-1) / -2).numpy()
    lines = np.ascontiguousarray(packed.reshape(a, tiles, _COLUMNS, d).transpose(0, 1, 3, 2))
    codes = np.empty((a, n), np.int32)
    best = np.empty((a, n), np.float32)
    blocks = _blocks(n)
    sums = np.zeros((a, blocks if add else 0, c, d), np.float32)
    counts = np.zeros((a, blocks if add else 0, c), np.int64)
    center = np.ascontiguousarray(middle.reshape(a, d).numpy())
    points = x if x.stride(-1) == 1 else x.contiguous()
    threads.run(
        _pass,
        a * blocks,
        points.numpy(),
        np.asarray(groups, np.int64),
        center,
        lines,
        bias,
        codes,
        best,
        sums,
        counts,
    )
    return (
        torch.from_numpy(codes).long(),
        torch.from_numpy(best).mul_(-2),
        torch.from_numpy(sums).sum(1),
        torch.from_numpy(counts).sum(1),
    )
