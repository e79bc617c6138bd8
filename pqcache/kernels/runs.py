"""Attention of one query token over runs of consecutive tokens in several buffers, and the share that each token of one got."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.dense import _TILE, _tile_logits, _tile_softmax, _tile_values
from pqcache.kernels.registers import LANES, SCALE, exp_scaled
from pqcache.kernels.vectors import KINDS, head_block

# what a run says: addresses of its rows, how many they are, which query reads them
KEYS, VALUES, TOKENS, QUERY = range(4)
KIND = KINDS[torch.float32]
_BACK = np.float32(2.0**-SCALE)


@numba.njit(nogil=True, inline="always")
def _fill(runs, run, start, keys, values, row_bytes):
    """Addresses of the next rows that fit into a tile, all of one query's runs. Returns (rows, the run and row to go on with)."""
    count, query = 0, runs[run, QUERY]
    while count < _TILE and run < runs.shape[0] and runs[run, QUERY] == query:
        while count < _TILE and start < runs[run, TOKENS]:
            keys[count] = runs[run, KEYS] + start * row_bytes
            values[count] = runs[run, VALUES] + start * row_bytes
            count += 1
            start += 1
        if start == runs[run, TOKENS]:
            run, start = run + 1, 0
    if count:
        for i in range(count, (count + LANES - 1) // LANES * LANES):
            keys[i], values[i] = keys[count - 1], values[count - 1]
    return count, run, start


@threads.kernel()
def _attend(first, last, queries, runs, g, block, out, sums):
    """Task = (row, KV head); queries (n, h_kv, Q, g', d) scaled, runs (n, h_kv, R, 4), out (n, h_kv, g', d), zeros.

    Adds to sums (n, h or h_kv, T) the probabilities of the first run's T tokens, or the mean of a group's.
    """
    heads, padded, d = out.shape[1], out.shape[2], out.shape[3]
    each, window = sums.shape[1] // heads, sums.shape[2]  # each: g, or 1 if a group's heads share their sums
    whole = (window + LANES - 1) // LANES * LANES
    logits, kept = np.zeros((padded, _TILE), np.float32), np.empty((g, whole), np.float32)
    keys, values = np.empty(_TILE, np.int64), np.empty(_TILE, np.int64)
    high, mass = np.empty(padded, np.float32), np.empty(padded, np.float32)
    added = np.zeros(whole, np.float32)
    for task in range(first, last):
        row, head = task // heads, task % heads
        mine, result = runs[row, head], out[row, head]
        high[:], mass[:], kept[:] = -np.inf, 0, -np.inf
        run, start, seen = 0, 0, 0
        while run < mine.shape[0]:
            query = queries[row, head, mine[run, QUERY]]
            count, run, start = _fill(mine, run, start, keys, values, 4 * d)
            if not count:
                continue
            _tile_logits(KIND, query, keys, count, block, 4 * d, logits)
            if seen < window:
                more = min(count, window - seen)
                for a in range(g):  # lines in one piece become vectors, slices of two dimensions do not
                    to, line = kept[a], logits[a]
                    for i in range(more):
                        to[seen + i] = line[i]
                seen += more
            _tile_softmax(logits, count, g, high, mass, result)
            _tile_values(KIND, logits, values, count, block, 4 * d, result)
        for a in range(g):
            share = np.float32(1) / mass[a]
            for j in range(d):
                result[a, j] *= share
            exp_scaled(kept[a].ctypes.data, whole, high[a])
            share *= np.float32(each) / np.float32(g)
            line = kept[a]
            for i in range(whole):
                added[i] += line[i] * share
            if a + 1 == g or each > 1:
                of_head = sums[row, head * each + a % each]
                for i in range(window):
                    of_head[i] += added[i] * _BACK
                added[:] = 0


def serves(*tensors: torch.Tensor) -> bool:
    """Whether `attend_runs` takes rows of these tensors: fp32, d >= LANES, a run's rows side by side."""
    return all(
        x.dtype == torch.float32 and x.shape[-1] >= LANES and x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
        for x in tensors
    )


def addresses(x: torch.Tensor, *dims: int) -> np.ndarray[Any, Any]:
    """Addresses of x[i, j, ...] for every index of these leading dimensions, int64, in their shape."""
    grid = _grid(tuple(x.shape[dim] for dim in dims))
    steps = [index * (x.stride(dim) * x.element_size()) for index, dim in zip(grid, dims, strict=True)]
    return np.asarray(sum(steps, start=np.int64(x.data_ptr())))


@lru_cache(maxsize=64)
def _grid(shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], ...]:
    """Indices along each dimension of a shape, int64, each as long as its dimension and 1 elsewhere."""
    return np.meshgrid(*(np.arange(size, dtype=np.int64) for size in shape), indexing="ij", sparse=True)


def attend_runs(queries: torch.Tensor, runs: np.ndarray[Any, Any], sums: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention over all runs: (n, h, 1, d) fp32.

    queries (Q, n, h, 1, d) fp32; runs (n, h_kv, R, 4) int64, whose columns are KEYS, VALUES, TOKENS, QUERY: rows of d fp32
    numbers side by side, read by that one of the queries. Adds to sums (n, h, T) fp32 the probabilities that the first run's T
    tokens got, to sums (n, h_kv, T) the mean of each group's; T = 0: nothing. The tensors behind the addresses must live until
    this returns.
    """
    many, n, h, _, d = queries.shape
    h_kv = runs.shape[1]
    g = h // h_kv
    block, padded = head_block(g)
    query = np.zeros((n, h_kv, many, padded, d), np.float32)
    grouped = queries.reshape(many, n, h_kv, g, d).permute(1, 2, 0, 3, 4).numpy()
    np.multiply(grouped, np.float32(scaling), out=query[:, :, :, :g])
    out = np.zeros((n, h_kv, padded, d), np.float32)
    cost = float(runs[..., TOKENS].sum()) * 8 * d / threads.BYTES_PER_NS
    threads.run(_attend, n * h_kv, query, runs, g, block, out, sums.numpy(), cost=cost)
    return torch.from_numpy(out)[:, :, :g].reshape(n, h, 1, d)


def attend_parts(
    q: torch.Tensor, parts: Sequence[Sequence[torch.Tensor]], counts: Sequence[int], scaling: float
) -> torch.Tensor:
    """Attention of q (n, h, 1, d) over the first counts[i] tokens of each of the parts, as if they were joined: (n, h, 1, d).

    parts: their keys, and their values, each (n, h_kv, >= counts[i], d) as `serves` says.
    """
    keys, values = parts
    n, h_kv = keys[0].shape[:2]
    runs = np.zeros((n, h_kv, len(counts), 4), np.int64)
    for i, (k, v, count) in enumerate(zip(keys, values, counts, strict=True)):
        runs[:, :, i, KEYS], runs[:, :, i, VALUES], runs[:, :, i, TOKENS] = (
            addresses(k, 0, 1),
            addresses(v, 0, 1),
            count,
        )
    return attend_runs(q[None], runs, q.new_zeros(n, h_kv, 0), scaling)
