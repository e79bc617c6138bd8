"""Lists of chosen positions: of whole clusters, in ascending order."""

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


@kernel
def _ascend(first, last, positions, length, out):
    """Task = (row, head); positions and out (n, H, m)."""
    heads, m = positions.shape[1], positions.shape[2]
    marks = np.zeros(length, np.uint8)
    for task in range(first, last):
        given, mine = positions[task // heads, task % heads], out[task // heads, task % heads]
        count = 0
        for i in range(m):
            if given[i] >= 0:
                marks[given[i]] = 1
                count += 1
        filled, i = 0, 0
        while filled < count:
            mine[filled] = i
            filled += marks[i]
            marks[i] = 0
            i += 1


def ascending(positions: torch.Tensor, length: int) -> torch.Tensor:
    """positions (n, H, m) int64 below `length` in ascending order, padding (-1) at the end; none comes twice in a head."""
    out = np.full(positions.shape, -1, np.int64)
    rows = positions.shape[0] * positions.shape[1]
    cost = rows * (length + positions.shape[2])
    run(_ascend, rows, positions.contiguous().numpy(), length, out, cost=cost)
    return torch.from_numpy(out)
