"""Nearest centroid and Lloyd sums in one pass over the points, on a CUDA device; sums in a fixed order, so that runs repeat."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pqcache.device.switch import launch

_TILE = 64  # points per visit
_BLOCK = 4096  # points per program


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


def nearest(
    x: torch.Tensor,
    centroids: torch.Tensor,
    middle: torch.Tensor,
    groups: torch.Tensor | None = None,
    add: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass over the points x (G, N, d) fp32 of `groups` (A,), default all: each point's nearest centroid, sums per cluster.

    centroids (A, C, d), C <= 256 as a tile's sums are a product with one-hot codes, and middle (A, 1, d), fp32; distances are
    those of x - middle to the centroids. Returns codes (A, N) int32, the squared distance without |x - middle|^2 (A, N), and with
    add=True the sums of x - middle (A, C, d) and the sizes (A, C) of the clusters (else empty).
    """
    groups = torch.arange(len(x), device=x.device) if groups is None else groups
    a, n, d = len(groups), x.shape[1], x.shape[2]
    c = centroids.shape[1]
    blocks = triton.cdiv(n, _BLOCK)
    x = x if x.stride(2) == 1 else x.contiguous()
    codes = torch.empty((a, n), dtype=torch.int32, device=x.device)
    best = torch.empty((a, n), dtype=torch.float32, device=x.device)
    sums = torch.empty((a, blocks if add else 0, c, d), dtype=torch.float32, device=x.device)
    counts = torch.empty((a, blocks if add else 0, c), dtype=torch.int32, device=x.device)
    launch(_pass, (blocks, a), x)(
        x, groups, middle.reshape(a, d).contiguous(), centroids.contiguous(), centroids.square().sum(-1),
        codes, best, sums, counts, n, blocks, x.stride(0), x.stride(1),
        D=d, DIMS=max(16, triton.next_power_of_2(d)), C=c, CENTERS=max(16, triton.next_power_of_2(c)),
        TILE=_TILE, BLOCK=_BLOCK, ADD=add, num_warps=8,
    )  # fmt: skip
    return codes, best, sums.sum(1), counts.sum(1)
