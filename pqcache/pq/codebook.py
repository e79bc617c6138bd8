"""Product quantization of keys: fit centroids, encode keys, score a query by table look-up.

A key of d dimensions is cut into m contiguous sub-vectors of d / m; each is stored as the index (code) of one of 2^b centroids
of its own sub-space (PQCache, section 3.2). Scores are inner products with the decoded keys, never computed key by key.
"""

import torch
import torch.nn.functional as F

from pqcache import kernels
from pqcache.pq.kmeans import assign


def split(x: torch.Tensor, m: int) -> torch.Tensor:
    """x (n, h_kv, t, d) -> sub-vectors (n * h_kv * m, t, d / m) fp32."""
    n, h_kv, t, d = x.shape
    return x.float().view(n, h_kv, t, m, d // m).transpose(2, 3).reshape(n * h_kv * m, t, d // m)


def encode(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Codes of keys x (n, h_kv, t, d) under centroids (n, h_kv, m, C, d / m): (n, h_kv, m, t) int64, nearest by L2."""
    n, h_kv, m, c, sub = centroids.shape
    flat = centroids.float().reshape(-1, c, sub)
    middle = flat.mean(1, keepdim=True)  # distances do not change, but far from the origin fp32 would lose them
    codes, _ = assign(split(x, m) - middle, flat - middle)
    return codes.view(n, h_kv, m, -1)


def tables(q: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Products of q (n, h, 1, d) with every centroid (n, h_kv, m, C, d / m): (n, h_kv, m, C, g) fp32."""
    n, h_kv, m, _, sub = centroids.shape
    if q.dtype == centroids.dtype == torch.float32 and kernels.native(q, centroids):
        return kernels.codes.tables(q, centroids)
    return torch.einsum("nkgms,nkmcs->nkmcg", q.float().view(n, h_kv, -1, m, sub), centroids.float())


def score(q: torch.Tensor, codes: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """q . decode(codes) by look-up: q (n, h, 1, d), codes (n, h_kv, m, t) uint8 or int16 -> (n, h, t) fp32.

    One table of g entries per centroid, so that a code fetches the products of all query heads of its group at once.
    """
    n, h_kv, m, c, _ = centroids.shape
    g = q.shape[1] // h_kv
    table = tables(q, centroids)
    offset = torch.arange(n * h_kv * m, device=q.device, dtype=torch.int32).view(n, h_kv, m, 1) * c
    index = codes.to(torch.int32) + offset
    total = F.embedding_bag(index.transpose(2, 3).reshape(-1, m), table.reshape(-1, g), mode="sum")  # (n * h_kv * t, g)
    return total.view(n, h_kv, -1, g).transpose(2, 3).reshape(n, h_kv * g, -1)
