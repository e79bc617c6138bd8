"""How much attention each key received, on a CUDA device: two kernels for a whole block of queries, whatever its length.

`_row_lse` computes each query's log-sum-exp, `_column_sums` the probabilities again from it, a tile of keys per program. No
program adds to another's sums, so runs repeat. The rules are those of `pqcache.selective.column_sums`, the reference.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pqcache.device.switch import cdiv, launch, power_of_2
from pqcache.store.transfer import send

_TILE = 64  # queries, and keys, per visit


@triton.jit
def _logits(query, key, scaling, WIDE: tl.constexpr):
    """Scaled products (queries, keys) in fp32."""
    if WIDE:
        return tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee") * scaling
    return tl.dot(query, tl.trans(key)) * scaling


@triton.jit
def _row_lse(
    q, k, stored, counts, lse, scaling, t, q_row, q_head, q_line, k_row, k_head, k_line,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program = (tile of a row's real queries, row and query head): their log-sum-exp, lse (n, HEADS, t) fp32."""
    task = tl.program_id(1).to(tl.int64)
    head, row = task % HEADS, task // HEADS
    length, count = tl.load(stored + row), tl.load(counts + row)
    first = tl.program_id(0) * TILE
    if first < count:
        query = first + tl.arange(0, TILE)
        mask = query < count
        column, position = t - count + query, length - count + query
        inside = tl.arange(0, DIMS)
        real = (inside < D)[None]
        where = column.to(tl.int64)[:, None] * q_line + inside[None]
        own = tl.load(q + row * q_row + head * q_head + where, mask=mask[:, None] & real, other=0.0)
        keys = k + row * k_row + head // G * k_head
        high, mass = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32)
        end = tl.minimum(length - count + first + TILE, length)
        for start in range(0, end, TILE):
            token = start + tl.arange(0, TILE)
            there = token < end
            where = token.to(tl.int64)[:, None] * k_line + inside[None]
            key = tl.load(keys + where, mask=there[:, None] & real, other=0.0)
            logits = _logits(own, key, scaling, WIDE)
            logits = tl.where(there[None] & (token[None] <= position[:, None]), logits, float("-inf"))
            top = tl.maximum(high, tl.max(logits, 1))  # finite from the first tile on: every query sees key 0
            mass = mass * tl.exp(high - top) + tl.sum(tl.exp(logits - top[:, None]), 1)
            high = top
        tl.store(lse + task * t + column, high + tl.log(mass), mask=mask)


@triton.jit
def _column_sums(
    q, k, stored, counts, windows, lse, sums, scaling, t, q_row, q_head, q_line, k_row, k_head, k_line, sum_row, sum_head,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program = (tile of keys, row and query head): sums (n, HEADS, ...) += the probabilities from queries that see them."""
    task = tl.program_id(1).to(tl.int64)
    head, row = task % HEADS, task // HEADS
    length, count = tl.load(stored + row), tl.load(counts + row)
    start = tl.program_id(0) * TILE
    if start < length:
        token = start + tl.arange(0, TILE)
        there = token < length
        inside = tl.arange(0, DIMS)
        real = (inside < D)[None]
        where = token.to(tl.int64)[:, None] * k_line + inside[None]
        key = tl.load(k + row * k_row + head // G * k_head + where, mask=there[:, None] & real, other=0.0)
        queries, before = q + row * q_row + head * q_head, length - count
        total = tl.zeros([TILE], tl.float32)
        end = count
        window = length
        if WINDOW:
            window = tl.load(windows + row)
            end = tl.minimum(count, start + TILE - 1 + window - before)
        for first in range(tl.maximum(start - before, 0), end, TILE):
            query = first + tl.arange(0, TILE)
            mask = query < end
            column, position = t - count + query, before + query
            where = column.to(tl.int64)[:, None] * q_line + inside[None]
            own = tl.load(queries + where, mask=mask[:, None] & real, other=0.0)
            mass = tl.load(lse + task * t + column, mask=mask, other=0.0)
            logits = _logits(own, key, scaling, WIDE)
            back = position[:, None] - token[None]
            seen = mask[:, None] & there[None] & (back >= 0)
            if WINDOW:
                seen = seen & (back < window)
            total += tl.sum(tl.where(seen, tl.exp(logits - mass[:, None]), 0.0), 0)
        to = sums + row * sum_row + head * sum_head + token
        tl.store(to, tl.load(to, mask=there, other=0.0) + total, mask=there)


def add(
    sums: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    stored: Sequence[int],
    counts: Sequence[int],
    scaling: float,
    *,
    windows: Sequence[int] | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """As `column_sums.add_column_sums`: sums (n, h, >= max(stored)) fp32; q (n, h, t, d), k (n, h_kv, ..., d)."""
    n, h, t, d = q.shape
    if max(counts) == 0:
        return
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    rows = send([list(stored), list(counts), list(windows or counts)], torch.int32, q.device)
    lines = [x.stride(i) for x in (q, k) for i in range(3)]
    # matrix units take 16-bit operands as they are; the interpreter knows no bf16 arithmetic
    wide = q.dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1"
    sizes = {
        "HEADS": h, "G": h // k.shape[1], "D": d, "DIMS": max(16, power_of_2(d)), "TILE": _TILE, "WIDE": wide,
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip
    if lse is None:
        lse = torch.empty((n, h, t), dtype=torch.float32, device=q.device)
        launch(_row_lse, (cdiv(max(counts), _TILE), n * h), q)(q, k, rows[0], rows[1], lse, scaling, t, *lines, **sizes)
    launch(_column_sums, (cdiv(max(stored), _TILE), n * h), q)(
        q, k, rows[0], rows[1], rows[2], lse.float().contiguous(), sums, scaling, t, *lines, sums.stride(0), sums.stride(1),
        WINDOW=windows is not None, **sizes,
    )  # fmt: skip
