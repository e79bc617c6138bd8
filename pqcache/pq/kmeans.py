"""Batched K-Means: all groups of a layer (rows x KV heads x sub-spaces) at once, Lloyd with re-seeding of empty clusters."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch

from pqcache import kernels

FEW = 64  # with fewer points per group the compiled kernel does not repay rearranging the centroids
_SAMPLE = 160  # points per cluster that are enough to place its centroid in a round before the last
_CHUNK = 1 << 26  # distance-matrix entries per block: 256 MiB of fp32


class KMeansResult(NamedTuple):
    """centroids (G, C, d) fp32, codes (G, N) int64 = nearest centroid, rounds = updates really done (the slowest group's)."""

    centroids: torch.Tensor
    codes: torch.Tensor
    rounds: int


def assign(x: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest centroid by squared L2, ties to the lowest index: codes (G, N) int64 and distance without |x|^2 (G, N).

    x (G, N, d), centroids (G, C, d), fp32.
    """
    if x.shape[1] >= FEW and kernels.native(x, centroids):
        nearest_codes, distance, *_ = kernels.nearest.nearest(x, centroids, torch.zeros_like(centroids[:, :1]))
        return nearest_codes.long(), distance
    g, n, _ = x.shape
    c = centroids.shape[1]
    norms = centroids.square().sum(-1)[:, None]  # (G, 1, C)
    rows = max(1, _CHUNK // max(1, g * c))
    codes, best = [], []
    for block in x.split(rows, dim=1):
        every = torch.baddbmm(norms.expand(-1, block.shape[1], -1), block, centroids.transpose(1, 2), alpha=-2)
        value, index = every.min(-1)
        codes.append(index)
        best.append(value)
    return torch.cat(codes, 1), torch.cat(best, 1)


def initial_positions(n: int, clusters: int, seed: int) -> torch.Tensor:
    """`clusters` distinct positions out of n, uniform without replacement; the same for every group of a request."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:clusters]


def kmeans(x: torch.Tensor, init: torch.Tensor, max_iter: int, tol: float = 1e-4) -> KMeansResult:
    """Lloyd's algorithm on x (G, N, d) from centroids init (G, C, d), each group on its own; at most `max_iter` rounds.

    A group stops when its assignment no longer changes, or when the squared movements of its centroids sum to at most
    tol * mean_d Var(x_d). Empty clusters take the points farthest from their centroids, which leave their old clusters
    (scikit-learn's rule, which the published system runs). Codes always belong to the returned centroids.

    With at least 2 * 160 points per cluster, every round but the last uses evenly spaced points only, at least 160 per cluster.
    For 32,640 points, 64 centroids and 5 rounds, rounds and codes together then read all points 3.3 times instead of 6 times.
    Inertia stays within 0.5 % of exact rounds over all points (scripts/bench_kernels.py).
    """
    x, init = x.float(), init.float()
    points = (_NativePoints if kernels.native(x, init) else _Points)(x)
    stride = x.shape[1] // (_SAMPLE * init.shape[1])
    if stride < 2 or max_iter < 2:
        return _lloyd(points, init, max_iter, tol)
    early = _lloyd(points.every(stride), init, max_iter - 1, tol, last=False)
    result = _lloyd(points, early.centroids, max_iter - early.rounds, tol)
    return result._replace(rounds=early.rounds + result.rounds)


def _lloyd(points: _Points, init: torch.Tensor, max_iter: int, tol: float, last: bool = True) -> KMeansResult:
    """Rounds over all of these points. last=False: the codes may be those of the centroids before the last update."""
    groups, n, device = len(init), points.x.shape[1], points.x.device
    centroids = init - points.middle
    limit = tol * points.variance  # (G,)
    active = torch.arange(groups, device=device)  # groups still moving
    codes = torch.full((groups, n), -1, dtype=torch.int32, device=device)
    # whether a group's codes are those of its centroids before the last update
    stale = torch.ones(groups, dtype=torch.bool, device=device)
    rounds = 0
    for _ in range(max_iter):
        new_codes, partial, sums, counts = points.assign_and_add(active, centroids[active])
        same = (new_codes == codes[active]).all(1)
        codes[active] = new_codes
        stale[active] = ~same
        if bool(same.all()):
            break
        empty = counts == 0
        for i in empty.any(1).nonzero()[:, 0].tolist():
            _reseed(points.centered(int(active[i])), new_codes[i], partial[i], sums[i], counts[i])
        updated = torch.where(counts[..., None] > 0, sums / counts.clamp_min(1)[..., None], centroids[active])
        shift = (updated - centroids[active]).square().sum((1, 2))
        # a group whose labels are stable keeps the centroids those labels belong to
        centroids[active] = torch.where(same[:, None, None], centroids[active], updated)
        rounds += 1
        active = active[~same & (shift > limit[active])]
        if len(active) == 0:
            break
    if last and bool(stale.any()):
        codes = points.codes(centroids)
    return KMeansResult(centroids + points.middle, codes.long(), rounds)


def summed(x: torch.Tensor, codes: torch.Tensor, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums (G, c, d) and sizes (G, c) of clusters: points x (G, N, d), codes (G, N) int64. A cluster without points has 0."""
    (g, _, d), points = x.shape, x.flatten(0, 1)
    flat = (codes + torch.arange(g, device=x.device)[:, None] * c).flatten()
    sums = x.new_zeros(g * c, d)
    if x.is_cuda:  # sorted and then added, so that runs repeat: index_add_ adds in any order there
        sums.index_put_((flat,), points, accumulate=True)
    else:
        sums.index_add_(0, flat, points)
    return sums.view(g, c, d), torch.bincount(flat, minlength=g * c).view(g, c)


class _Points:
    """Points (G, N, d) fp32 less their mean: keys with a bias are far from the origin, where fp32 loses small distances."""

    def __init__(self, x: torch.Tensor) -> None:
        self.middle = x.mean(1, keepdim=True)
        self.x = x - self.middle
        self.variance = self.x.var(1, correction=0).mean(-1)  # (G,)

    def every(self, stride: int) -> _Points:
        """Every stride-th of the points, with the mean and variance of all."""
        sample = copy.copy(self)
        sample.x = self.x[:, ::stride].contiguous()
        return sample

    def centered(self, group: int) -> torch.Tensor:
        return self.x[group]

    def codes(self, centroids: torch.Tensor) -> torch.Tensor:
        return assign(self.x, centroids)[0]

    def assign_and_add(
        self, groups: torch.Tensor, centroids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (A, N) int32 and partial distances (A, N) of the A groups, sums (A, C, d) and sizes (A, C) of their clusters."""
        x = self.x if len(groups) == len(self.x) else self.x[groups]
        codes, partial = assign(x, centroids)
        return codes.int(), partial, *summed(x, codes, centroids.shape[1])


class _NativePoints(_Points):
    """The same by the numba kernel, which subtracts the mean as it reads the points."""

    def __init__(self, x: torch.Tensor) -> None:
        self.kernel = kernels.nearest
        self.x = x
        self.middle, self.variance = kernels.nearest.moments(x)

    def centered(self, group: int) -> torch.Tensor:
        return self.x[group] - self.middle[group]

    def codes(self, centroids: torch.Tensor) -> torch.Tensor:
        return self.kernel.nearest(self.x, centroids, self.middle)[0]

    def assign_and_add(
        self, groups: torch.Tensor, centroids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kernel.nearest(self.x, centroids, self.middle[groups], groups.tolist(), True)


def _reseed(
    x: torch.Tensor, codes: torch.Tensor, partial: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor
) -> None:
    """Give each empty cluster of one group the point farthest from its own centroid; sums and counts change in place."""
    distance = partial + x.square().sum(-1)
    empty = (counts == 0).nonzero()[:, 0]
    if float(distance.max()) <= 0:  # every point equals a centroid: nothing to gain
        return
    farthest = distance.topk(min(len(empty), len(x))).indices
    for cluster, point in zip(empty.tolist(), farthest.tolist(), strict=False):
        old = int(codes[point])
        sums[old] -= x[point]
        counts[old] -= 1
        sums[cluster] = x[point]
        counts[cluster] = 1
