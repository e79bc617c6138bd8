"""Attention of one query token over all tokens, and the probability that each of them received.

A task is a part of the tokens of one KV head, as in dense.py. It leaves its weights behind. The last of a head's tasks to end
joins the parts and turns all weights into probabilities.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.dense import _PART, _TILE, _raise_maximum, _row_addresses, _tile_logits, _tile_values
from pqcache.kernels.parts import count_parts, is_last, join, read_query, scratch
from pqcache.kernels.registers import LANES, SCALE, exp_scaled
from pqcache.kernels.vectors import FP32, head_block

_BACK = np.float32(2.0**-SCALE)


@numba.njit(nogil=True, inline="always")
def _weigh(logits, count, g, high, mass, out, kept, tops):
    """As dense._tile_softmax, but weights are scaled, and kept (g, >= count). tops (g): the maxima that they are relative to."""
    for a in range(g):
        row, whole, top = _raise_maximum(logits, a, count, high, mass, out)
        mass[a] += exp_scaled(row, whole, top)
        tops[a] = top
        to, line = kept[a], logits[a]  # lines in one piece become vectors, slices of two dimensions do not
        for i in range(count):
            to[i] = line[i]


@numba.njit(nogil=True, inline="always")
def _add_received(kept, tops, lse, g, sums):
    """One head: scaled weights kept (g, m), relative to tops (g, parts, tiles), are normalised and added to sums (E, m)."""
    each, m = sums.shape
    parts, added = tops.shape[1], np.zeros(m, np.float32)
    for a in range(g):
        high, share = lse[0, 0, a], np.float32(each) / np.float32(g) / (lse[0, 1, a] * _BACK)
        weights = kept[a]
        for part in range(parts):
            start, end = m * part // parts, m * (part + 1) // parts
            tile = 0
            while start < end:
                stop = min(start + _TILE, end)
                # twice the root: the factor alone may be too small for a normal number where its products are not
                root = np.exp((tops[a, part, tile] - high) / 2)
                first, second = root * share, root
                to, line = added[start:stop], weights[start:stop]
                for i in range(line.shape[0]):
                    to[i] += line[i] * first * second
                start, tile = stop, tile + 1
        if a + 1 == g or each > 1:
            of_head = sums[a % each]
            for i in range(m):
                of_head[i] += added[i] * _BACK
            added[:] = 0


@threads.kernel()
def _attend(first, last, q, scaling, k, v, k_steps, v_steps, m, block, size, kept, tops, outs, lse, done, result, sums):
    """Task = (row, KV head, part). k, v: addresses; steps: bytes between (rows, KV heads, tokens); size: bytes of a row.

    q (n, h_kv, g, d); kept (n, h_kv, g, m), tops (n, h_kv, g, parts, tiles of a part): scratch, as outs, lse and done, see
    parts.scratch. Writes result (n, h_kv, g, d); adds to sums (n, h_kv, E, m).
    """
    _, heads, parts, padded, d = outs.shape
    g = q.shape[2]
    query, logits, rows = (
        np.zeros((padded, d), np.float32),
        np.zeros((padded, _TILE), np.float32),
        np.empty(_TILE, np.int64),
    )
    for task in range(first, last):
        part, head, row = task % parts, task // parts % heads, task // parts // heads
        start, end = m * part // parts, m * (part + 1) // parts
        keys = k + row * k_steps[0] + head * k_steps[1]
        values = v + row * v_steps[0] + head * v_steps[1]
        out, high, mass = outs[row, head, part], lse[row, head, part, 0], lse[row, head, part, 1]
        high[:] = -np.inf
        read_query(q[row, head], scaling, query)
        tile = 0
        while start < end:
            count = min(_TILE, end - start)
            _row_addresses(rows, keys + start * k_steps[2], k_steps[2], count)
            _tile_logits(FP32, query, rows, count, block, size, logits)
            _row_addresses(rows, values + start * v_steps[2], v_steps[2], count)
            _weigh(logits, count, g, high, mass, out, kept[row, head, :, start:], tops[row, head, :, part, tile])
            _tile_values(FP32, logits, rows, count, block, size, out)
            start, tile = start + count, tile + 1
        if is_last(done, row, head, parts):
            join(outs[row, head], lse[row, head], result[row, head])
            _add_received(kept[row, head], tops[row, head], lse[row, head], g, sums[row, head])


def serves(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `attend_adding` takes keys and values: fp32, d >= LANES, rows in one piece."""
    return all(x.dtype == torch.float32 and x.shape[-1] >= LANES and x.stride(-1) == 1 for x in (k, v))


def attend_adding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, sums: torch.Tensor
) -> torch.Tensor:
    """Attention over all tokens, (n, h, 1, d), of q (n, h, 1, d) and k, v (n, h_kv, m, d), fp32; see `serves`.

    Adds to sums (n, h, m) the probability that each token got from each head, or to sums (n, h_kv, m) the mean of a group's.
    """
    n, h, _, d = q.shape
    h_kv, m = k.shape[1], k.shape[2]
    g = h // h_kv
    parts = count_parts(n * h_kv, m // _PART)
    tiles = -(-(m // parts + 1) // _TILE)
    result = np.empty((n, h_kv, g, d), np.float32)
    threads.run(
        _attend, n * h_kv * parts, q.reshape(result.shape).numpy(), np.float32(scaling), k.data_ptr(), v.data_ptr(),
        tuple(4 * step for step in k.stride()[:3]), tuple(4 * step for step in v.stride()[:3]), m, head_block(g)[0], 4 * d,
        np.empty((n, h_kv, g, m), np.float32), np.empty((n, h_kv, g, parts, tiles), np.float32),
        *scratch(n, h_kv, parts, g, d), result, sums.unflatten(1, (h_kv, -1)).numpy(),
        cost=n * h_kv * m * 8 * d / threads.BYTES_PER_NS,
    )  # fmt: skip
    return torch.from_numpy(result).view(n, h, 1, d)
