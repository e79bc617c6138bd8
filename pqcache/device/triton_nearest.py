"""Nearest centroid and Lloyd sums on a CUDA device; sums in a fixed order, so that runs repeat.

Where the centroids of a group and their sums fit on a multiprocessor, one kernel reads the points once (`_pass`). Where they do
not, `_assign` visits centroids and dimensions in tiles, and each program of `_add` sums a tile of clusters. So shared memory and
the time to compile depend on neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pqcache.device.switch import launch

_TILE = 64  # points per visit
_BLOCK = 4096  # points per program
_PART = 32  # dimensions per visit of `_assign`
_FIT = 4096  # numbers of a group's centroids, padded, up to which `_pass` serves


@triton.jit
def _pass(
    x, groups, middle, centroids, norms, codes, best, sums, counts, n, blocks, x_group, x_line,
    D: tl.constexpr, DIMS: tl.constexpr, C: tl.constexpr, CENTERS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Program = (block of points, group): x (G, N, D), middle (A, D), centroids (A, C, D), norms (A, C) = |centroid|^2.

    Writes codes and best (A, N); with ADD sums (A, blocks, C, D) and counts (A, blocks, C) of the points around `middle`.
    """
    a = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    own = x + tl.load(groups + a).to(tl.int64) * x_group
    inside = tl.arange(0, DIMS)
    real = inside < D
    center = tl.arange(0, CENTERS)
    there = center < C
    around = tl.load(middle + a * D + inside, mask=real, other=0.0)
    grid = (a * C + center)[:, None] * D + inside[None]
    both = there[:, None] & real[None]
    lines = tl.load(centroids + grid, mask=both, other=0.0)
    length = tl.load(norms + a * C + center, mask=there, other=float("inf"))
    total = tl.zeros([CENTERS, DIMS], tl.float32)
    size = tl.zeros([CENTERS], tl.int32)
    for start in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, n), TILE):
        point = start + tl.arange(0, TILE)
        mask = point < n
        where = point.to(tl.int64)[:, None] * x_line + inside[None]
        points = tl.load(own + where, mask=mask[:, None] & real[None], other=0.0) - around[None]
        distance = length[None] - 2 * tl.dot(points, tl.trans(lines), input_precision="ieee")
        nearest = tl.min(distance, 1)
        code = tl.argmin(distance, 1, tie_break_left=True).to(tl.int32)
        tl.store(codes + a * n + point, code, mask=mask)
        tl.store(best + a * n + point, nearest, mask=mask)
        if ADD:
            member = (center[:, None] == code[None]) & mask[None]
            total += tl.dot(member.to(tl.float32), points, input_precision="ieee")
            size += tl.sum(member.to(tl.int32), 1)
    if ADD:
        to = (a * blocks + block) * C
        tl.store(sums + (to + center)[:, None] * D + inside[None], total, mask=both)
        tl.store(counts + to + center, size, mask=there)


@triton.jit
def _assign(
    x, groups, middle, centroids, norms, codes, best, n, x_group, x_line, c, d,
    TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program = (tile of points, group): codes and best as in `_pass`, TILE centroids and PART dimensions at a time."""
    a = tl.program_id(1).to(tl.int64)
    point = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = point < n
    own = x + tl.load(groups + a).to(tl.int64) * x_group + point.to(tl.int64)[:, None] * x_line
    shortest = tl.full([TILE], float("inf"), tl.float32)
    code = tl.zeros([TILE], tl.int32)
    for first in range(0, c, TILE):
        center = first + tl.arange(0, TILE)
        there = center < c
        lines = centroids + (a * c + center)[:, None] * d
        products = tl.zeros([TILE, TILE], tl.float32)
        for begin in range(0, d, PART):
            inside = begin + tl.arange(0, PART)
            real = inside < d
            around = tl.load(middle + a * d + inside, mask=real, other=0.0)
            points = tl.load(own + inside[None], mask=mask[:, None] & real[None], other=0.0) - around[None]
            centers = tl.load(lines + inside[None], mask=there[:, None] & real[None], other=0.0)
            products += tl.dot(points, tl.trans(centers), input_precision="ieee")
        length = tl.load(norms + a * c + center, mask=there, other=float("inf"))
        distance = length[None] - 2 * products
        nearest = tl.min(distance, 1)
        closer = nearest < shortest  # an equal one of an earlier chunk stays
        code = tl.where(closer, first + tl.argmin(distance, 1, tie_break_left=True).to(tl.int32), code)
        shortest = tl.where(closer, nearest, shortest)
    tl.store(codes + a * n + point, code, mask=mask)
    tl.store(best + a * n + point, shortest, mask=mask)


@triton.jit
def _add(
    x, groups, middle, codes, sums, counts, n, blocks, block, x_group, x_line, c, d,
    TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program = (block of points, TILE centroids, group and PART dimensions): sums and counts as in `_pass`, by one-hot codes."""
    parts = tl.cdiv(d, PART)
    a = (tl.program_id(2) // parts).to(tl.int64)
    inside = tl.program_id(2) % parts * PART + tl.arange(0, PART)
    real = inside < d
    at = tl.program_id(0)
    center = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = center < c
    around = tl.load(middle + a * d + inside, mask=real, other=0.0)
    own = x + tl.load(groups + a).to(tl.int64) * x_group
    total = tl.zeros([TILE, PART], tl.float32)
    size = tl.zeros([TILE], tl.int32)
    for start in range(at * block, tl.minimum(at * block + block, n), TILE):
        point = start + tl.arange(0, TILE)
        mask = point < n
        code = tl.load(codes + a * n + point, mask=mask, other=-1)
        where = point.to(tl.int64)[:, None] * x_line + inside[None]
        points = tl.load(own + where, mask=mask[:, None] & real[None], other=0.0) - around[None]
        member = center[:, None] == code[None]
        total += tl.dot(member.to(tl.float32), points, input_precision="ieee")
        size += tl.sum(member.to(tl.int32), 1)
    to = (a * blocks + at) * c + center
    tl.store(sums + to[:, None] * d + inside[None], total, mask=there[:, None] & real[None])
    if tl.program_id(2) % parts == 0:
        tl.store(counts + to, size, mask=there)


def nearest(
    x: torch.Tensor,
    centroids: torch.Tensor,
    middle: torch.Tensor,
    groups: torch.Tensor | None = None,
    add: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each point's nearest centroid and sums per cluster, of the points x (G, N, d) fp32 of `groups` (A,), default all.

    centroids (A, C, d) and middle (A, 1, d), fp32; distances are those of x - middle to the centroids. Returns codes
    (A, N) int32, the squared distance without |x - middle|^2 (A, N), and with add=True the sums of x - middle (A, C, d) and the
    sizes (A, C) of the clusters (else empty).
    """
    groups = torch.arange(len(x), device=x.device) if groups is None else groups
    a, n, d = len(groups), x.shape[1], x.shape[2]
    c = centroids.shape[1]
    dims, centers = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(c))
    block = _BLOCK * max(1, centers // 256)  # the sums of many centroids take memory: fewer blocks
    blocks = triton.cdiv(n, block)
    x = x if x.stride(2) == 1 else x.contiguous()
    codes = torch.empty((a, n), dtype=torch.int32, device=x.device)
    best = torch.empty((a, n), dtype=torch.float32, device=x.device)
    sums = torch.empty((a, blocks if add else 0, c, d), dtype=torch.float32, device=x.device)
    counts = torch.empty((a, blocks if add else 0, c), dtype=torch.int32, device=x.device)
    centroids, middle = centroids.contiguous(), middle.reshape(a, d).contiguous()
    norms, lines = centroids.square().sum(-1), (x.stride(0), x.stride(1))
    if centers * dims <= _FIT:
        launch(_pass, (blocks, a), x)(
            x, groups, middle, centroids, norms, codes, best, sums, counts, n, blocks, *lines,
            D=d, DIMS=dims, C=c, CENTERS=centers, TILE=_TILE, BLOCK=block, ADD=add, num_warps=8,
        )  # fmt: skip
        return codes, best, sums.sum(1), counts.sum(1)
    tile = triton.cdiv(n, _TILE), triton.cdiv(c, _TILE)
    launch(_assign, (tile[0], a), x)(
        x, groups, middle, centroids, norms, codes, best, n, *lines, c, d, TILE=_TILE, PART=_PART, num_warps=8
    )
    if add:
        launch(_add, (blocks, tile[1], a * triton.cdiv(d, _TILE)), x)(
            x, groups, middle, codes, sums, counts, n, blocks, block, *lines, c, d, TILE=_TILE, PART=_TILE, num_warps=8
        )
    return codes, best, sums.sum(1), counts.sum(1)
