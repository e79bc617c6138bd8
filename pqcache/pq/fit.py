"""Build the index of one layer: K-Means of its keys, and their codes. A function of its inputs alone, so it may run anywhere."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pqcache.pq import codebook
from pqcache.pq.kmeans import initial_positions, kmeans


@dataclass(frozen=True)
class Clustering:
    """How a layer's keys are clustered and coded; PQCache's hyper-parameters."""

    m: int  # sub-spaces per key
    b: int  # bits per code
    rounds: Callable[[int], int]  # maximum K-Means rounds for so many keys
    tol: float = 1e-4
    seed: int = 4321
    device: str = "cpu"  # cpu | cuda | auto (where the keys are)

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.uint8 if self.b <= 8 else torch.int16


class Fitted(NamedTuple):
    """centroids (n, h_kv, m, 2^b, d / m) as they are stored; codes (n, h_kv * m, t), each key's nearest stored centroid."""

    centroids: torch.Tensor
    codes: torch.Tensor
    rounds: int  # K-Means updates really done, of the slowest group
    seconds: float


def fit(keys: torch.Tensor, centroids: torch.Tensor, counts: list[int], due: list[int], how: Clustering) -> Fitted:
    """Index keys (n, h_kv, t, d), counts[r] of them in row r. Rows `due` are clustered, the others keep their centroids.

    centroids (n, h_kv, m, 2^b, d / m): the present ones, on any device. Everything is computed on the
    keys' device. A row's result never depends on its neighbours.
    """
    start = time.perf_counter()
    n, h_kv, m, c, sub = centroids.shape
    centroids = centroids.to(keys.device, copy=True)
    done = 0
    for count in sorted({counts[r] for r in due}):  # rows of one length are clustered together
        rows = [r for r in due if counts[r] == count]
        points = codebook.split(keys[rows, :, :count], m)
        init = points[:, initial_positions(count, c, how.seed).to(keys.device)]
        result = kmeans(points, init, how.rounds(count), how.tol)
        centroids[rows] = result.centroids.view(len(rows), h_kv, m, c, sub).to(centroids.dtype)
        done = max(done, result.rounds)
    codes = codebook.encode(keys[:, :, : max(counts)], centroids).flatten(1, 2).to(how.code_dtype)
    return Fitted(centroids, codes, done, time.perf_counter() - start)
