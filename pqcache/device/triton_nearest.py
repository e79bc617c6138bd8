"""Nearest centroid and Lloyd sums on a CUDA device; sums in a fixed order, so that runs repeat.

Where the centroids of a group and their sums fit on a multiprocessor, one kernel reads the points once (`_pass`). Where they do
not, `_assign` visits centroids and dimensions in tiles, and each program of `_add` sums a tile of clusters. So shared memory and
the time to compile depend on neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pqcache.device.switch import cdiv, launch, power_of_2

_TILE = 64  # points per visit
_BLOCK = 4096  # points per program
_PART = 32  # dimensions per visit of `_assign`
_FIT = 4096  # numbers of a group's centroids, padded, up to which `_pass` serves


@triton.jit
def _points_of(x, group, heads, subs, x_row, x_head, x_sub):
    """Where a group's points begin: group = (row * heads + head) * subs + sub-space."""
    group = group.to(tl.int64)
    return x + group // (heads * subs) * x_row + group // subs % heads * x_head + group % subs * x_sub


@triton.jit
def _pass(
    x, groups, middle, centroids, norms, codes, best, sums, counts, n, blocks,
    heads, subs, x_row, x_head, x_sub, x_line,
    D: tl.constexpr, DIMS: tl.constexpr, C: tl.constexpr, CENTERS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Program = (block of points, group): middle (A, D), centroids (A, C, D), norms (A, C) = |centroid|^2; x: see `_points_of`.

    Writes codes and best (A, N); with ADD sums (A, blocks, C, D) and counts (A, blocks, C) of the points around `middle`.
    """
    a = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    own = _points_of(x, tl.load(groups + a), heads, subs, x_row, x_head, x_sub)
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
        points = tl.load(own + where, mask=mask[:, None] & real[None], other=0.0).to(tl.float32) - around[None]
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
    x, groups, middle, centroids, norms, codes, best, n, heads, subs, x_row, x_head, x_sub, x_line, c, d,
    TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program = (tile of points, group): codes and best as in `_pass`, TILE centroids and PART dimensions at a time."""
    a = tl.program_id(1).to(tl.int64)
    point = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = point < n
    own = _points_of(x, tl.load(groups + a), heads, subs, x_row, x_head, x_sub)
    own += point.to(tl.int64)[:, None] * x_line
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
            points = (
                tl.load(own + inside[None], mask=mask[:, None] & real[None], other=0.0).to(tl.float32) - around[None]
            )
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
    x, groups, middle, codes, sums, counts, n, blocks, block, heads, subs, x_row, x_head, x_sub, x_line, c, d,
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
    own = _points_of(x, tl.load(groups + a), heads, subs, x_row, x_head, x_sub)
    total = tl.zeros([TILE, PART], tl.float32)
    size = tl.zeros([TILE], tl.int32)
    for start in range(at * block, tl.minimum(at * block + block, n), TILE):
        point = start + tl.arange(0, TILE)
        mask = point < n
        code = tl.load(codes + a * n + point, mask=mask, other=-1)
        where = point.to(tl.int64)[:, None] * x_line + inside[None]
        points = tl.load(own + where, mask=mask[:, None] & real[None], other=0.0).to(tl.float32) - around[None]
        member = center[:, None] == code[None]
        total += tl.dot(member.to(tl.float32), points, input_precision="ieee")
        size += tl.sum(member.to(tl.int32), 1)
    to = (a * blocks + at) * c + center
    tl.store(sums + to[:, None] * d + inside[None], total, mask=there[:, None] & real[None])
    if tl.program_id(2) % parts == 0:
        tl.store(counts + to, size, mask=there)


@triton.jit
def _moments(
    x, total, square, n, blocks, block, heads, subs, x_row, x_head, x_sub, x_line, d,
    TILE: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Program = (block of points, group): sums of x - x[0] and of its square, total and square (G, blocks, d)."""
    g = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0)
    own = _points_of(x, g, heads, subs, x_row, x_head, x_sub)
    inside = tl.arange(0, DIMS)
    real = inside < d
    origin = tl.load(own + inside, mask=real, other=0.0).to(tl.float32)
    added, squares = tl.zeros([DIMS], tl.float32), tl.zeros([DIMS], tl.float32)
    for start in range(at * block, tl.minimum(at * block + block, n), TILE):
        point = start + tl.arange(0, TILE)
        both = (point < n)[:, None] & real[None]
        where = point.to(tl.int64)[:, None] * x_line + inside[None]
        away = tl.where(both, tl.load(own + where, mask=both, other=0.0).to(tl.float32) - origin[None], 0.0)
        added += tl.sum(away, 0)
        squares += tl.sum(away * away, 0)
    to = (g * blocks + at) * d + inside
    tl.store(total + to, added, mask=real)
    tl.store(square + to, squares, mask=real)


def by_group(x: torch.Tensor) -> torch.Tensor:
    """Points (G, N, d) or (n, h_kv, m, N, d) as (n, h_kv, m, N, d) with d dense: a view where it can be one."""
    x = x[:, None, None] if x.ndim == 3 else x
    return x if x.stride(4) == 1 else x.contiguous()


def _layout(x: torch.Tensor) -> tuple[int, ...]:
    """What `_points_of` and the kernels take: heads, sub-spaces; strides of rows, heads, sub-spaces and points."""
    return x.shape[1], x.shape[2], *x.stride()[:4]


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (G, 1, d) and mean variance over d (G,) of points x as in `nearest`, fp32; they are read once, as they are."""
    x = by_group(x)
    groups, n, d = x.shape[0] * x.shape[1] * x.shape[2], x.shape[3], x.shape[4]
    blocks = cdiv(n, _BLOCK)
    total, square = (torch.empty((groups, blocks, d), dtype=torch.float32, device=x.device) for _ in range(2))
    launch(_moments, (blocks, groups), x)(
        x, total, square, n, blocks, _BLOCK, *_layout(x), d, TILE=_TILE, DIMS=power_of_2(d), num_warps=4
    )
    shift = total.double().sum(1) / n
    variance = square.double().sum(1) / n - shift.square()
    origin = x[:, :, :, 0].reshape(groups, d).float()
    return (origin + shift.float())[:, None], variance.clamp_min(0).mean(-1).float()


def nearest(
    x: torch.Tensor,
    centroids: torch.Tensor,
    middle: torch.Tensor,
    groups: torch.Tensor | None = None,
    add: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each point's nearest centroid and sums per cluster, of the points x (G, N, d) of `groups` (A,), default all.

    x may also be a view of keys, (n, h_kv, m, N, d) with G = n * h_kv * m groups. It is fp16, bf16 or fp32 and read as it is
    stored. centroids (A, C, d) and middle (A, 1, d), fp32; distances are those of x - middle to the centroids. Returns codes
    (A, N) int32, the squared distance without |x - middle|^2 (A, N), and with add=True the sums of x - middle (A, C, d) and the
    sizes (A, C) of the clusters (else empty).
    """
    x = by_group(x)
    groups = torch.arange(x.shape[0] * x.shape[1] * x.shape[2], device=x.device) if groups is None else groups
    a, n, d = len(groups), x.shape[3], x.shape[4]
    c = centroids.shape[1]
    dims, centers = max(16, power_of_2(d)), max(16, power_of_2(c))
    block = _BLOCK * max(1, centers // 256)  # the sums of many centroids take memory: fewer blocks
    blocks = cdiv(n, block)
    codes = torch.empty((a, n), dtype=torch.int32, device=x.device)
    best = torch.empty((a, n), dtype=torch.float32, device=x.device)
    sums = torch.empty((a, blocks if add else 0, c, d), dtype=torch.float32, device=x.device)
    counts = torch.empty((a, blocks if add else 0, c), dtype=torch.int32, device=x.device)
    centroids, middle = centroids.contiguous(), middle.reshape(a, d).contiguous()
    norms, layout = centroids.square().sum(-1), _layout(x)
    if centers * dims <= _FIT:
        launch(_pass, (blocks, a), x)(
            x, groups, middle, centroids, norms, codes, best, sums, counts, n, blocks, *layout,
            D=d, DIMS=dims, C=c, CENTERS=centers, TILE=_TILE, BLOCK=block, ADD=add, num_warps=8,
        )  # fmt: skip
        return codes, best, sums.sum(1), counts.sum(1)
    tile = cdiv(n, _TILE), cdiv(c, _TILE)
    launch(_assign, (tile[0], a), x)(
        x, groups, middle, centroids, norms, codes, best, n, *layout, c, d, TILE=_TILE, PART=_PART, num_warps=8
    )
    if add:
        launch(_add, (blocks, tile[1], a * cdiv(d, _TILE)), x)(
            x, groups, middle, codes, sums, counts, n, blocks, block, *layout, c, d, TILE=_TILE, PART=_TILE, num_warps=8
        )
    return codes, best, sums.sum(1), counts.sum(1)
