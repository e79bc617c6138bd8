"""Attention of one query token over all tokens, and the probability that each of them received.

A task is a part of the tokens of one KV head, as in dense.py. It leaves its logits behind. The last of a head's tasks to end
joins the parts and turns all logits into probabilities.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.dense import _PART, _TILE, _row_addresses, _tile_logits, _tile_softmax, _tile_values
from pqcache.kernels.registers import LANES, SCALE, exp_scaled, increment
from pqcache.kernels.vectors import FP32, STAMP, head_block

_BACK = np.float32(2.0**-SCALE)


@numba.njit(nogil=True, inline="always")
def _join(parts, lse, kept, g, whole, result, sums):
    """One head: parts (P, g', d), lse (P, 2, g') and logits (g, whole) become the output (g, d) and are added to sums (E, m)."""
    each, m = sums.shape
    added = np.zeros(whole, np.float32)
    for a in range(g):
        high = lse[0, 0, a]
        for p in range(1, parts.shape[0]):
            high = max(high, lse[p, 0, a])
        mass = np.float32(0)
        line = result[a]
        for p in range(parts.shape[0]):
            share = np.exp(lse[p, 0, a] - high)
            mass += share * lse[p, 1, a]
            mine = parts[p, a]
            for j in range(line.shape[0]):
                line[j] += share * mine[j]
        for j in range(line.shape[0]):
            line[j] /= mass
        received = kept[a]
        exp_scaled(received.ctypes.data, whole, high)
        share = np.float32(each) / np.float32(g) / mass
        for i in range(whole):
            added[i] += received[i] * share
        if a + 1 == g or each > 1:
            of_head = sums[a % each]
            for i in range(m):
                of_head[i] += added[i] * _BACK
            added[:] = 0


def _make_attend(stamp: str) -> Any:
    """The compiled kernel. stamp: of the vector code that becomes part of it."""

    @numba.njit(nogil=True, cache=True)
    def attend(first, last, q, k, v, k_steps, v_steps, m, g, block, size, parts, lse, kept, done, result, sums):
        """Task = (row, KV head, part). k, v: addresses; steps: bytes between (rows, KV heads, tokens); size: bytes of a row.

        q (n, h_kv, g', d) scaled; parts (n, h_kv, P, g', d), lse (n, h_kv, P, 2, g'), kept (n, h_kv, g, whole vectors) and
        done (n, h_kv) are scratch, zeros but for kept. Writes result (n, h_kv, g, d), zeros; adds to sums (n, h_kv, E, m).
        """
        stamp  # noqa: B018 - numba's cache on disk looks at what a kernel encloses
        _, heads, many, padded, _ = parts.shape
        whole = kept.shape[3]
        logits, rows = np.zeros((padded, _TILE), np.float32), np.empty(_TILE, np.int64)
        for task in range(first, last):
            part, head, row = task % many, task // many % heads, task // many // heads
            start, end = m * part // many, m * (part + 1) // many
            keys = k + row * k_steps[0] + head * k_steps[1]
            values = v + row * v_steps[0] + head * v_steps[1]
            mine, high, mass = parts[row, head, part], lse[row, head, part, 0], lse[row, head, part, 1]
            high[:] = -np.inf
            while start < end:
                count = min(_TILE, end - start)
                _row_addresses(rows, keys + start * k_steps[2], k_steps[2], count)
                _tile_logits(FP32, q[row, head], rows, count, block, size, logits)
                for a in range(g):  # lines in one piece become vectors, slices of two dimensions do not
                    to, line = kept[row, head, a], logits[a]
                    for i in range(count):
                        to[start + i] = line[i]
                _row_addresses(rows, values + start * v_steps[2], v_steps[2], count)
                _tile_softmax(logits, count, g, high, mass, mine)
                _tile_values(FP32, logits, rows, count, block, size, mine)
                start += count
            if increment(done.ctypes.data + 8 * (row * heads + head)) == many - 1:
                for a in range(g):
                    kept[row, head, a, m:] = -np.inf
                _join(parts[row, head], lse[row, head], kept[row, head], g, whole, result[row, head], sums[row, head])

    return attend


_attend: Any = _make_attend(STAMP)


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
    block, padded = head_block(g)
    query = np.zeros((n, h_kv, padded, d), np.float32)
    np.multiply(q.reshape(n, h_kv, g, d).numpy(), np.float32(scaling), out=query[:, :, :g])
    workers = torch.get_num_threads()
    many = max(1, min(-(-threads.TASKS * workers // (n * h_kv)), m // _PART)) if workers > 1 else 1
    scratch = np.zeros((n, h_kv, many, padded, d), np.float32), np.zeros((n, h_kv, many, 2, padded), np.float32)
    kept = np.empty((n, h_kv, g, -(-m // LANES) * LANES), np.float32)
    result = np.zeros((n, h_kv, g, d), np.float32)
    threads.run(
        _attend, n * h_kv * many, query, k.data_ptr(), v.data_ptr(),
        tuple(4 * step for step in k.stride()[:3]), tuple(4 * step for step in v.stride()[:3]), m, g, block, 4 * d,
        *scratch, kept, np.zeros((n, h_kv), np.int64), result, sums.unflatten(1, (h_kv, -1)).numpy(),
        cost=n * h_kv * m * 8 * d / threads.BYTES_PER_NS,
    )  # fmt: skip
    return torch.from_numpy(result).reshape(n, h, 1, d)
