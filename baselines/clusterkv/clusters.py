"""K-Means under a chosen distance, as ClusterKV groups keys (arXiv 2412.03213, section III-B): no re-seeding, no tolerance."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pqcache.pq.kmeans import assign

DISTANCES = ("cosine", "l2", "ip")


def nearest(x: torch.Tensor, centroids: torch.Tensor, distance: str) -> torch.Tensor:
    """Each key's cluster, ties to the lowest: x (G, N, d), centroids (G, C, d) -> (G, N)."""
    if distance == "cosine":  # on the unit sphere the nearest is the one of highest cosine
        x, centroids = (y / (y.norm(dim=-1, keepdim=True) + 1e-8) for y in (x, centroids))
    elif distance == "ip":  # one more coordinate makes all centroids equally long: the nearest has the largest product
        squares = centroids.square().sum(-1, keepdim=True)
        x = F.pad(x, (0, 1))
        centroids = torch.cat([centroids, (squares.amax(1, keepdim=True) - squares).clamp_min(0).sqrt()], -1)
    else:
        middle = x.mean(1, keepdim=True)
        x, centroids = x - middle, centroids - middle
    return assign(x, centroids)[0]


def cluster(
    x: torch.Tensor, init: torch.Tensor, max_iter: int, distance: str = "cosine"
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K-Means of x (G, N, d) from init (G, C, d): centroids (G, C, d) fp32, codes (G, N), rounds done.

    A centroid is the plain mean of its cluster's keys, whatever the distance; an empty cluster keeps its last centroid.
    Ends when no key changes its cluster, or after max_iter rounds.
    """
    x, centroids = x.float(), init.float()
    c = centroids.shape[1]
    codes = torch.full(x.shape[:2], -1, device=x.device)
    for done in range(max_iter):
        new = nearest(x, centroids, distance)
        if torch.equal(new, codes):
            return centroids, codes, done
        codes = new
        flat = (codes + torch.arange(len(x), device=x.device)[:, None] * c).reshape(-1)
        sums = torch.zeros_like(centroids).flatten(0, 1).index_add_(0, flat, x.flatten(0, 1)).view_as(centroids)
        counts = torch.bincount(flat, minlength=len(x) * c).view(len(x), c)
        centroids = torch.where(counts[..., None] > 0, sums / counts.clamp_min(1)[..., None], centroids)
    return centroids, codes, max_iter
