"""Attention of one query token over [sinks | chosen | recent] tokens on a CUDA device, wherever they lie.

Split over the tokens so that the whole device works on one token (flash decoding), the parts joined by their log-sum-exp; the
query heads of a group share one read of K and V. Chosen rows are read through their indices, or from a buffer into which
`gather` has brought them, which reads pinned host memory directly: only the chosen rows cross, and no host thread waits.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

_TILE = 64  # tokens per visit
_ROWS = 16  # rows of the query tile: what a matrix instruction takes; a group is padded to it


@triton.jit
def _tile(
    q, keys, values, offset, mask, high, mass, result, inside, real, scaling,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of tokens joins the running softmax: offset (TILE,) of their rows, q (_ROWS, D)."""
    where = offset[:, None] + inside[None]
    both = mask[:, None] & real[None]
    key = tl.load(keys + where, mask=both, other=0.0)
    value = tl.load(values + where, mask=both, other=0.0)
    if WIDE:
        logits = tl.dot(q.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee") * scaling
    else:
        logits = tl.dot(q, tl.trans(key)) * scaling
    logits = tl.where(mask[None], logits, float("-inf"))
    top = tl.maximum(high, tl.max(logits, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp(high - base)
    weights = tl.exp(logits - base[:, None])
    mass = mass * shrink + tl.sum(weights, 1)
    if WIDE:
        added = tl.dot(weights.to(value.dtype).to(tl.float32), value.to(tl.float32), input_precision="ieee")
    else:
        added = tl.dot(weights.to(value.dtype), value)
    return top, mass, result * shrink[:, None] + added


@triton.jit
def _attend(
    q, sink_k, sink_v, chosen_k, chosen_v, recent_k, recent_v, indices, cursor, plan, parts, lse,
    scaling, ring, origin, widest, splits,
    sink_row, sink_head, sink_line, chosen_row, chosen_head, chosen_line, recent_row, recent_head, recent_line,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CHOSEN: tl.constexpr, INDEXED: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program = (row and KV head, split); parts (n, HEADS, splits, G, D) and lse (n, HEADS, splits, G) fp32.

    ONE: the three sources are one buffer, position p at entry p.
    """
    task = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head, row = task % HEADS, task // HEADS
    length = tl.load(cursor + row).to(tl.int32) + 1
    sinks = tl.load(plan + row * 4)
    count = tl.load(plan + row * 4 + 1)
    recent = tl.load(plan + row * 4 + 2) + 1
    if tl.load(plan + row * 4 + 3) != 0:  # everything
        sinks, count, recent = 0, 0, length
    total = sinks + count + recent
    share = tl.cdiv(tl.cdiv(total, splits), TILE) * TILE
    start = split * share
    end = tl.minimum(start + share, total)
    line = tl.arange(0, ROWS)
    inside = tl.arange(0, DIMS)
    real = inside < D
    query = tl.load(q + (task * G + line)[:, None] * D + inside[None], mask=(line < G)[:, None] & real[None], other=0.0)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIMS], tl.float32)
    column = tl.arange(0, TILE)
    mine = indices + task * widest
    sink_k += row * sink_row + head * sink_head
    sink_v += row * sink_row + head * sink_head
    if ONE:
        for first in range(start, end, TILE):
            entry = first + column
            mask = entry < end
            spot = tl.where(entry < sinks, entry, length - recent + (entry - sinks - count))
            if CHOSEN:
                picked = (entry >= sinks) & (entry < sinks + count)
                spot = tl.where(picked, tl.load(mine + entry - sinks, mask=picked & mask, other=0), spot)
            high, mass, result = _tile(
                query,
                sink_k,
                sink_v,
                spot.to(tl.int64) * sink_line,
                mask,
                high,
                mass,
                result,
                inside,
                real,
                scaling,
                WIDE,
            )
    else:
        for first in range(start, tl.minimum(end, sinks), TILE):
            entry = first + column
            mask = entry < tl.minimum(end, sinks)
            high, mass, result = _tile(
                query,
                sink_k,
                sink_v,
                entry.to(tl.int64) * sink_line,
                mask,
                high,
                mass,
                result,
                inside,
                real,
                scaling,
                WIDE,
            )
        if CHOSEN:
            chosen_k += row * chosen_row + head * chosen_head
            chosen_v += row * chosen_row + head * chosen_head
            for first in range(tl.maximum(start, sinks), tl.minimum(end, sinks + count), TILE):
                entry = first + column
                mask = entry < tl.minimum(end, sinks + count)
                spot = entry - sinks
                if INDEXED:
                    spot = tl.load(mine + spot, mask=mask, other=0) - origin
                high, mass, result = _tile(
                    query, chosen_k, chosen_v, spot.to(tl.int64) * chosen_line, mask, high, mass, result, inside, real,
                    scaling, WIDE,
                )  # fmt: skip
        recent_k += row * recent_row + head * recent_head
        recent_v += row * recent_row + head * recent_head
        for first in range(tl.maximum(start, sinks + count), end, TILE):
            entry = first + column
            mask = entry < end
            spot = (length - recent + (entry - sinks - count)) % ring
            high, mass, result = _tile(
                query, recent_k, recent_v, spot.to(tl.int64) * recent_line, mask, high, mass, result, inside, real, scaling,
                WIDE,
            )  # fmt: skip
    result = result / tl.where(mass == 0.0, 1.0, mass)[:, None]
    to = (task * splits + split) * G + line
    tl.store(lse + to, tl.where(mass == 0.0, float("-inf"), high + tl.log(mass)), mask=line < G)
    tl.store(parts + to[:, None] * D + inside[None], result, mask=(line < G)[:, None] & real[None])


@triton.jit
def _merge(
    parts, lse, out, cursor, splits,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """Program = query head of a row: its parts joined; the row's first program moves the cursor on."""
    task = tl.program_id(0).to(tl.int64)
    a, group = task % G, task // G
    each = tl.arange(0, SPLITS)
    inside = tl.arange(0, DIMS)
    line = (group * splits + each) * G + a
    mass = tl.load(lse + line, mask=each < splits, other=float("-inf"))
    share = tl.exp(mass - tl.max(mass, 0))
    both = (each < splits)[:, None] & (inside < D)[None]
    part = tl.load(parts + line[:, None] * D + inside[None], mask=both, other=0.0)
    joined = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + task * D + inside, joined.to(out.dtype.element_ty), mask=inside < D)
    if ADVANCE:
        row = group // HEADS
        tl.store(cursor + row, tl.load(cursor + row) + 1, mask=task == row * HEADS * G)


@triton.jit
def _gather(
    host_k, host_v, indices, plan, out_k, out_v, origin, widest, host_row, host_head, host_line,
    HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program = (tile of chosen rows, row and KV head)."""
    task = tl.program_id(1).to(tl.int64)
    head, row = task % HEADS, task // HEADS
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = entry < tl.load(plan + row * 4 + 1)
    inside = tl.arange(0, DIMS)
    both = mask[:, None] & (inside < D)[None]
    spot = tl.load(indices + task * widest + entry, mask=mask, other=0).to(tl.int64) - origin
    source = row * host_row + head * host_head + spot[:, None] * host_line + inside[None]
    to = (task * widest + entry)[:, None] * D + inside[None]
    key = tl.load(host_k + source, mask=both, other=0.0)
    value = tl.load(host_v + source, mask=both, other=0.0)
    tl.store(out_k + to, key, mask=both)
    tl.store(out_v + to, value, mask=both)


def gather(
    k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, plan: torch.Tensor, origin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows indices - origin of k, v (n, h_kv, capacity, d) in pinned memory, onto the device of indices (n, h_kv, k) int32.

    Row r takes plan[r][1] of them; what stands behind them means nothing. Returns two (n, h_kv, k, d).
    """
    n, h_kv, widest = indices.shape
    d = k.shape[-1]
    out = [torch.empty((n, h_kv, widest, d), dtype=k.dtype, device=indices.device) for _ in range(2)]
    tile = 32
    _gather[(triton.cdiv(widest, tile), n * h_kv)](
        k, v, indices, plan, *out, origin, widest, k.stride(0), k.stride(1), k.stride(2),
        HEADS=h_kv, D=d, DIMS=triton.next_power_of_2(d), TILE=tile,
    )  # fmt: skip
    return out[0], out[1]


def splits_for(device: torch.device, tasks: int, tokens: int) -> int:
    """Parts per row and KV head: two programs per multiprocessor, none with less than a few tiles."""
    if device.type != "cuda":
        return max(1, min(3, tokens // _TILE))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // tasks, triton.cdiv(tokens, 2 * _TILE)))


def attend(
    q: torch.Tensor,
    sinks: tuple[torch.Tensor, torch.Tensor],
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
    recent: tuple[torch.Tensor, torch.Tensor],
    indices: torch.Tensor | None,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    *,
    ring: int,
    tokens: int,
    scaling: float,
    origin: int = 0,
    one: bool = False,
    advance: bool = False,
) -> torch.Tensor:
    """Attention of q (n, h, 1, d) over [plan[r][0] sinks | plan[r][1] chosen | plan[r][2] + 1 recent] tokens: (n, 1, h, d).

    The newest token is at position cursor[r]; plan[r][3] = 1 attends everything up to it instead. Sources are pairs of K and V
    (n, h_kv, entries, d), alike in strides: sinks by position, chosen by indices (n, h_kv, k) - origin, or in order where
    indices is None, recent by position modulo `ring`. one: all three are the same buffer, by position. tokens: about how many are
    attended, which decides the number of splits. advance: cursor += 1 afterwards.
    """
    n, h, _, d = q.shape
    h_kv = sinks[0].shape[1]
    g = h // h_kv
    splits = splits_for(q.device, n * h_kv, tokens)
    parts = torch.empty((n, h_kv, splits, g, d), dtype=torch.float32, device=q.device)
    lse = torch.empty((n, h_kv, splits, g), dtype=torch.float32, device=q.device)
    out = torch.empty((n, 1, h, d), dtype=q.dtype, device=q.device)
    dims = max(16, triton.next_power_of_2(d))
    middle = sinks if chosen is None else chosen
    strides = [x.stride(i) for x in (sinks[0], middle[0], recent[0]) for i in range(3)]
    # matrix units take 16-bit operands as they are; the interpreter knows no bf16 arithmetic
    wide = q.dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1"
    _attend[(n * h_kv, splits)](
        q.contiguous(), *sinks, *middle, *recent, cursor if indices is None else indices, cursor, plan, parts, lse,
        scaling, ring, origin, 0 if indices is None else indices.shape[2], splits, *strides,
        HEADS=h_kv, G=g, D=d, DIMS=dims, ROWS=max(_ROWS, triton.next_power_of_2(g)), TILE=_TILE,
        CHOSEN=chosen is not None, INDEXED=indices is not None, ONE=one, WIDE=wide,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _merge[(n * h,)](
        parts, lse, out, cursor, splits,
        HEADS=h_kv, G=g, D=d, DIMS=triton.next_power_of_2(d), SPLITS=triton.next_power_of_2(splits), ADVANCE=advance,
    )  # fmt: skip
    return out
