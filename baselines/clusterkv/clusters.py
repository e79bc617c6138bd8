"""K-Means under a chosen distance, as ClusterKV groups keys (arXiv 2412.03213, section III-B): no re-seeding, no tolerance."""

from typing import Literal

import torch
import torch.nn.functional as F

from pqcache import kernels
from pqcache.pq.kmeans import FEW, assign, initial_positions, summed

Distance = Literal["cosine", "l2", "ip"]


def initial(x: torch.Tensor, c: int, how: str, seed: int, distance: str = "cosine") -> torch.Tensor:
    """The keys that clustering starts from: x (G, N, d) -> (G, c, d).

    random: c different keys, the same positions in every group (section III-B). repeated: the same, but a key may come twice.
    plusplus: each key is drawn with a probability proportional to its distance to the nearest one drawn before it (k-means++).
    """
    groups, n, d = x.shape
    if how == "plusplus":
        at = _plusplus(x.float(), c, seed, distance)
        return x.gather(1, at[..., None].expand(-1, -1, d))
    if how == "repeated":
        return x[:, torch.randint(n, (c,), generator=torch.Generator().manual_seed(seed)).to(x.device)]
    return x[:, initial_positions(n, c, seed).to(x.device)]


def _plusplus(x: torch.Tensor, c: int, seed: int, distance: str) -> torch.Tensor:
    """Positions (G, c) of k-means++; the distance is 1 - cosine, or the squared one."""
    groups, n, d = x.shape
    draw = torch.rand(c, groups, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x.device)
    if distance == "cosine":
        x = x / (x.norm(dim=-1, keepdim=True) + 1e-8)
    at = (draw[0] * n).long()
    chosen = [at]
    nearest_yet = torch.full((groups, n), torch.inf, dtype=torch.float64, device=x.device)
    for u in draw[1:]:
        last = x.gather(1, at[..., None].expand(-1, -1, d))
        apart = 1 - (x @ last.mT)[..., 0] if distance == "cosine" else (x - last).square().sum(-1)
        nearest_yet = nearest_yet.minimum(apart.double().clamp_min(0))
        total = nearest_yet.cumsum(-1)
        at = torch.searchsorted(total, u * total[:, -1:], right=True).clamp_max(n - 1)
        chosen.append(at)
    return torch.cat(chosen, 1)


class _Points:
    """Keys x (G, N, d) fp32, brought once into the form in which a round compares them with its centroids."""

    def __init__(self, x: torch.Tensor, distance: str) -> None:
        self.keys, self.distance = x, distance
        self.middle = x.mean(1, keepdim=True) if distance == "l2" else None
        if distance == "cosine":  # on the unit sphere the nearest is the one of highest cosine
            self.x = _unit(x)
        elif self.middle is not None:
            self.x = x - self.middle
        else:  # one more coordinate makes all centroids equally long: the nearest has the largest product
            self.x = F.pad(x, (0, 1))

    def codes(self, centroids: torch.Tensor) -> torch.Tensor:
        """The cluster of each key (G, N), by centroids (G, C, d); ties to the lowest."""
        if self.distance == "cosine":
            centroids = _unit(centroids)
        elif self.middle is not None:
            centroids = centroids - self.middle
        else:
            squares = centroids.square().sum(-1, keepdim=True)
            centroids = torch.cat([centroids, (squares.amax(1, keepdim=True) - squares).clamp_min(0).sqrt()], -1)
        return assign(self.x, centroids)[0]

    def round(self, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, (G, N), and each cluster's mean (G, C, d) and size (G, C). The mean of an empty cluster has no meaning."""
        codes = self.codes(centroids)
        sums, counts = summed(self.keys, codes, centroids.shape[1])
        return codes, sums / counts.clamp_min(1)[..., None], counts


class _NativePoints(_Points):
    """The same by a CPU kernel, which reads the keys as they are and once per round.

    The nearest by cosine has the largest product with a centroid of length one, whatever the key's length.
    """

    def __init__(self, x: torch.Tensor, distance: str) -> None:
        self.keys, self.distance = x, distance
        self.origin = x.mean(1, keepdim=True) if distance == "l2" else torch.zeros_like(x[:, :1])  # (G, 1, d)

    def _pass(self, centroids: torch.Tensor, add: bool) -> tuple[torch.Tensor, ...]:
        if self.distance == "cosine":
            centroids = _unit(centroids)
        product = self.distance != "l2"
        return kernels.nearest.nearest(self.keys, centroids - self.origin, self.origin, add=add, product=product)

    def codes(self, centroids: torch.Tensor) -> torch.Tensor:
        return self._pass(centroids, add=False)[0].long()

    def round(self, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, _, sums, counts = self._pass(centroids, add=True)
        return codes.long(), sums / counts.clamp_min(1)[..., None] + self.origin, counts


def cluster_points(x: torch.Tensor, distance: str) -> _Points:
    """Keys x (G, N, d) ready for rounds."""
    native = x.shape[1] >= FEW and x.dtype == torch.float32 and kernels.native(x)
    return (_NativePoints if native else _Points)(x, distance)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


def cluster(
    x: torch.Tensor, init: torch.Tensor, max_iter: int, distance: str = "cosine"
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K-Means of x (G, N, d) from init (G, C, d): centroids (G, C, d) fp32, codes (G, N), rounds done.

    A centroid is the plain mean of its cluster's keys, whatever the distance; an empty cluster keeps its last centroid.
    Ends when no key changes its cluster, or after max_iter rounds. Codes are always those of the returned centroids: after
    max_iter rounds keys are assigned once more, as the released code does.
    """
    x, centroids = x.float(), init.float()
    points = cluster_points(x, distance)
    codes = torch.full(x.shape[:2], -1, device=x.device)
    for done in range(max_iter):
        new, means, counts = points.round(centroids)
        if torch.equal(new, codes):
            return centroids, new, done
        codes = new
        centroids = torch.where(counts[..., None] > 0, means, centroids)
    return centroids, points.codes(centroids), max_iter
