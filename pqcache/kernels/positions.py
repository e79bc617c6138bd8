"""Lists of chosen positions: those of whole clusters."""

from collections.abc import Sequence

import numpy as np
import torch

from pqcache.kernels.launch import kernel, run


@kernel
def _clusters(first, last, rank, starts, sizes, order, k, out):
    """Task = (row, head of the choice); rank (n, H, C), starts, sizes (n, h_kv, C), order (n, h_kv, tokens)."""
    heads, shared = rank.shape[1], rank.shape[1] // starts.shape[1]
    for task in range(first, last):
        row, head = task // heads, task % heads
        owner, mine = head // shared, out[row, head]
        filled, i = 0, 0
        while filled < k[row] and i < rank.shape[2]:
            cluster = rank[row, head, i]
            start = starts[row, owner, cluster]
            for j in range(start, start + min(sizes[row, owner, cluster], k[row] - filled)):
                mine[filled] = order[row, owner, j]
                filled += 1
            i += 1


def cluster_tokens(
    rank: torch.Tensor, starts: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor, k: Sequence[int]
) -> torch.Tensor:
    """The first k[r] tokens of row r's clusters in the order of rank, the last cluster cut: (n, H, max(k)) int64, -1 = padding.

    rank (n, H, C) int64: clusters in descending rank; starts, sizes (n, h_kv, C) int64: where each cluster begins in `order`
    (n, h_kv, tokens) int32, and how many tokens it has. H is h_kv or h.
    """
    n, heads, _ = rank.shape
    out = np.full((n, heads, max(k)), -1, np.int64)
    lists = (x.contiguous().numpy() for x in (rank, starts, sizes, order))
    run(_clusters, n * heads, *lists, np.asarray(k, np.int64), out, cost=out.size)
    return torch.from_numpy(out)
