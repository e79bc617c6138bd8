"""Nearest centroid and Lloyd sums in one pass over the points, without a distance matrix in memory.

Scores of two points with 64 centroids lie in the nearest cache, and grow by the products of eight channels at a time. The nearest
centroid is read off them, and the point is added to its cluster's sum while it is still in the cache. So memory is read once
per point.
"""

from functools import partial

import numpy as np
import torch

from pqcache.kernels.launch import kernel, run
from pqcache.kernels.numeric import floats, largest, part, whole_registers

_COLUMNS = 64  # centroids whose scores exist at a time
# points per task: sums are added block by block, so that the result does not depend on the number of threads
_BLOCK = 2048


@part(fastmath={"contract"})
def _score(points, d, centroids, bias, scores):
    """Scores x . c + bias_c of two points with 64 centroids: addresses of (2, d), (d, COLUMNS), COLUMNS, and out (2, COLUMNS).

    Additions are in the order of channels. All lines are parts of one array, so that compilers see that none overlap.
    """
    whole_registers()
    x, out, low = floats(points, 2 * d), floats(scores, 2 * _COLUMNS), floats(bias, _COLUMNS)
    for c in range(_COLUMNS):
        out[c] = out[_COLUMNS + c] = low[c]
    for j in range(0, d - 7, 8):
        y = floats(centroids + 4 * _COLUMNS * j, 8 * _COLUMNS)
        a0, a1, a2, a3, a4, a5, a6, a7 = x[j], x[j + 1], x[j + 2], x[j + 3], x[j + 4], x[j + 5], x[j + 6], x[j + 7]
        z = floats(points + 4 * (d + j), 8)
        b0, b1, b2, b3, b4, b5, b6, b7 = z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7]
        for c in range(_COLUMNS):
            y0, y1, y2, y3 = y[c], y[_COLUMNS + c], y[2 * _COLUMNS + c], y[3 * _COLUMNS + c]
            y4, y5, y6, y7 = y[4 * _COLUMNS + c], y[5 * _COLUMNS + c], y[6 * _COLUMNS + c], y[7 * _COLUMNS + c]
            out[c] = out[c] + a0 * y0 + a1 * y1 + a2 * y2 + a3 * y3 + a4 * y4 + a5 * y5 + a6 * y6 + a7 * y7
            other = out[_COLUMNS + c] + b0 * y0 + b1 * y1 + b2 * y2 + b3 * y3
            out[_COLUMNS + c] = other + b4 * y4 + b5 * y5 + b6 * y6 + b7 * y7
    for j in range(d // 8 * 8, d):
        y, a, b = floats(centroids + 4 * _COLUMNS * j, _COLUMNS), x[j], x[d + j]
        for c in range(_COLUMNS):
            out[c] += a * y[c]
            out[_COLUMNS + c] += b * y[c]


@part
def _first(line, value):
    """The first index of a value in a line; its length if it has none, as for NaN."""
    index = np.int32(line.shape[0])
    for c in range(line.shape[0]):
        index = min(index, np.int32(c) if line[c] == value else np.int32(line.shape[0]))
    return index


@partial(kernel, fastmath={"contract", "arcp"})
def _pass(first, last, x, group_step, step, groups, middle, centroids, bias, codes, best, sums, counts):
    """Tasks are (group, block of points); middle (A, d), centroids (A, tiles, d, COLUMNS), bias (A, tiles, COLUMNS).

    x is the address of points (G, N, d), whose groups are group_step bytes apart, and points of a group step bytes. Writes
    codes and best (A, N); sums (A, blocks, C, d) and counts (A, blocks, C) too unless they have no blocks.
    """
    n, d = codes.shape[1], middle.shape[1]
    blocks = (n + _BLOCK - 1) // _BLOCK
    tiles, last_centroid = centroids.shape[1], sums.shape[2] - 1
    centroids_at, bias_at = centroids.ctypes.data, bias.ctypes.data
    scores, centered = np.empty((2, _COLUMNS), np.float32), np.zeros((2, d), np.float32)
    scores_at, centered_at = scores.ctypes.data, centered.ctypes.data
    adding = sums.shape[1] > 0
    for task in range(first, last):
        a, block = task // blocks, task % blocks
        base, shift = x + groups[a] * group_step, floats(middle.ctypes.data + 4 * a * d, d)
        if adding:
            sums_at, sizes = sums[a, block].ctypes.data, counts[a, block]
        for i in range(block * _BLOCK, min(n, (block + 1) * _BLOCK), 2):
            points = min(2, n - i)
            for p in range(points):
                point, row = floats(centered_at + 4 * p * d, d), floats(base + (i + p) * step, d)
                for j in range(d):
                    point[j] = row[j] - shift[j]
            for tile in range(tiles):
                lines, low = (
                    centroids_at + (a * tiles + tile) * 4 * d * _COLUMNS,
                    bias_at + (a * tiles + tile) * 4 * _COLUMNS,
                )
                _score(centered_at, d, lines, low, scores_at)
                for p in range(points):
                    line = floats(scores_at + 4 * p * _COLUMNS, _COLUMNS)
                    top = largest(line)
                    if tile == 0 or top > best[a, i + p]:
                        best[a, i + p] = top
                        # for a point of NaN the index is past all centroids
                        codes[a, i + p] = min(_first(line, top) + tile * _COLUMNS, last_centroid)
            if adding:
                for p in range(points):
                    c = codes[a, i + p]
                    point, total = floats(centered_at + 4 * p * d, d), floats(sums_at + 4 * c * d, d)
                    sizes[c] += 1
                    for j in range(d):
                        total[j] += point[j]
    centered[0, 0] = scores[0, 0] = 0  # numba frees an array behind its last use, and addresses are none


@partial(kernel, fastmath=True)
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


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (G, 1, d) and mean variance over d (G,) of points x (G, N, d) fp32, read once."""
    g, n, d = x.shape
    blocks = -(-n // _BLOCK)
    total, square = (np.zeros((g, blocks, d), np.float32) for _ in range(2))
    run(_moments, g * blocks, x.numpy(), total, square)
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
    blocks = -(-n // _BLOCK)
    sums = np.zeros((a, blocks if add else 0, c, d), np.float32)
    counts = np.zeros((a, blocks if add else 0, c), np.int64)
    points = x if x.stride(-1) == 1 else x.contiguous()
    run(
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
