"""Attention of one query token over [sinks | chosen | local] tokens on a CUDA device, read where they are stored.

The tokens are split, so that the whole device works on one query (flash decoding); the program that ends last joins the parts
by their log-sum-exp. The query heads of a group share one read of K and V. Chosen tokens are read through their indices, also
from pinned host memory: only chosen tokens cross, each once, and no host thread waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from pqcache.device.switch import cdiv, device_of, multiprocessors, power_of_2, prepared

_TILE = 64  # tokens per visit, at most
_ROWS = 16  # rows of the query tile, the least that a matrix instruction takes; a group is padded to it
# how a source stores its tokens: in order, by a list of entries, in a ring
_IN_ORDER, _PICKED, _RING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _softmax_step(q, key, value, mask, high, mass, result, scaling, WIDE: tl.constexpr):
    """A tile of tokens joins the running softmax: q (rows, D), key and value (TILE, D), mask (TILE,) says which there are."""
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
def _store_part(parts, lse, to, high, mass, result, mine, both, inside, D: tl.constexpr):
    """A program's softmax as a part, one line per query head: its mean of V and its log-sum-exp."""
    tl.store(lse + to, tl.where(mass == 0.0, float("-inf"), high + tl.log(mass)), mask=mine)
    tl.store(parts + to[:, None] * D + inside[None], result / tl.where(mass == 0.0, 1.0, mass)[:, None], mask=both)


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
    return _softmax_step(q, key, value, mask, high, mass, result, scaling, WIDE)


@triton.jit
def _segment(
    query, keys, values, line, start, end, shift, ring, picks, n_sink, high, mass, result, inside, real, scaling,
    TILE: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Tokens start .. end-1 of the list join the running softmax; token e is at entry e + shift of keys and values.

    KIND _PICKED: at entry picks[e + shift] - n_sink. _RING: at entry (e + shift) % ring. line: numbers between two entries.
    """
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        mask = token < end
        entry = token + shift
        if KIND == _PICKED:
            entry = tl.load(picks + entry, mask=mask, other=0) - n_sink
        if KIND == _RING:
            entry = entry % ring
        high, mass, result = _tile(
            query, keys, values, entry.to(tl.int64) * line, mask, high, mass, result, inside, real, scaling, WIDE
        )
    return high, mass, result


@triton.jit
def _one_buffer(
    query, keys, values, line, start, end, sinks, count, shift, picks, high, mass, result, inside, real, scaling,
    TILE: tl.constexpr, CHOSEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same where one buffer holds tokens of all kinds, position p at entry p. Local token e is at position e + shift."""
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        mask = token < end
        entry = tl.where(token < sinks, token, token + shift)
        if CHOSEN:
            picked = (token >= sinks) & (token < sinks + count)
            entry = tl.where(picked, tl.load(picks + token - sinks, mask=picked & mask, other=0), entry)
        high, mass, result = _tile(
            query, keys, values, entry.to(tl.int64) * line, mask, high, mass, result, inside, real, scaling, WIDE
        )
    return high, mass, result


@triton.jit
def _join_parts(
    parts, lse, out, task, splits,
    G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, HEADS_PAD: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The parts of one KV head's queries, joined by their log-sum-exp. Other programs wrote them: read past the L1 cache."""
    each, a, inside = tl.arange(0, SPLITS), tl.arange(0, HEADS_PAD), tl.arange(0, DIMS)
    real, mine = inside < D, a < G
    line = (task * splits + each)[:, None] * G + a[None]
    mass = tl.load(lse + line, mask=(each < splits)[:, None] & mine[None], other=float("-inf"), cache_modifier=".cg")
    top = tl.where(mine, tl.max(mass, 0), 0.0)
    joined = tl.zeros([HEADS_PAD, DIMS], tl.float32)
    for first in tl.range(0, splits, CHUNK, num_stages=1):
        some = first + tl.arange(0, CHUNK)
        there = (some < splits)[:, None] & mine[None]
        at = (task * splits + some)[:, None] * G + a[None]
        share = tl.exp(tl.load(lse + at, mask=there, other=float("-inf"), cache_modifier=".cg") - top[None])
        part = tl.load(
            parts + at[:, :, None] * D + inside[None, None], mask=there[:, :, None] & real[None, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        joined += tl.sum(part * share[:, :, None], 0)
    total = tl.sum(tl.exp(mass - top[None]), 0)
    joined = joined / tl.where(mine, total, 1.0)[:, None]
    to = (task * G + a)[:, None] * D + inside[None]
    tl.store(out + to, joined.to(out.dtype.element_ty), mask=mine[:, None] & real[None])


@triton.jit
def _attend(
    q, sink_k, sink_v, chosen_k, chosen_v, local_k, local_v, indices, cursor, plan, parts, lse, out, arrived,
    scaling, ring, n_sink, widest, splits,
    sink_row, sink_head, sink_line, chosen_row, chosen_head, chosen_line, local_row, local_head, local_line,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CHOSEN: tl.constexpr, CHOSEN_KIND: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr,
    SPLITS: tl.constexpr, HEADS_PAD: tl.constexpr, CHUNK: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """Program = (row and KV head, split): its share of the list [sinks | chosen | local].

    Writes parts (n, HEADS, splits, G, D) and lse (n, HEADS, splits, G) fp32. ONE: the three sources are one buffer, position p
    at entry p. The last program of a row and KV head to end joins the parts, the last of a row moves its cursor on: `arrived`
    (n, HEADS, then n) counts them, zero between launches.
    """
    task, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, row = task % HEADS, task // HEADS
    length = tl.load(cursor + row).to(tl.int32) + 1
    sinks, count = tl.load(plan + row * 4), tl.load(plan + row * 4 + 1)
    local = tl.load(plan + row * 4 + 2) + 1
    if tl.load(plan + row * 4 + 3) != 0:  # everything
        sinks, count, local = 0, 0, length
    total = sinks + count + local
    share = tl.cdiv(tl.cdiv(total, splits), TILE) * TILE
    start = split * share
    end = tl.minimum(start + share, total)
    group, inside = tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = inside < D
    both = (group < G)[:, None] & real[None]
    query = tl.load(q + (task * G + group)[:, None] * D + inside[None], mask=both, other=0.0)
    high, mass = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIMS], tl.float32)
    picks, to_local = indices + task * widest, length - local - sinks - count
    sink_k += row * sink_row + head * sink_head
    sink_v += row * sink_row + head * sink_head
    if ONE:
        high, mass, result = _one_buffer(
            query, sink_k, sink_v, sink_line, start, end, sinks, count, to_local, picks, high, mass, result, inside,
            real, scaling, TILE, CHOSEN, WIDE,
        )  # fmt: skip
    else:
        high, mass, result = _segment(
            query, sink_k, sink_v, sink_line, start, tl.minimum(end, sinks), 0, ring, picks, 0, high, mass, result,
            inside, real, scaling, TILE, _IN_ORDER, WIDE,
        )  # fmt: skip
        if CHOSEN:
            chosen_k += row * chosen_row + head * chosen_head
            chosen_v += row * chosen_row + head * chosen_head
            high, mass, result = _segment(
                query, chosen_k, chosen_v, chosen_line, tl.maximum(start, sinks), tl.minimum(end, sinks + count), -sinks,
                ring, picks, n_sink, high, mass, result, inside, real, scaling, TILE, CHOSEN_KIND, WIDE,
            )  # fmt: skip
        local_k += row * local_row + head * local_head
        local_v += row * local_row + head * local_head
        high, mass, result = _segment(
            query, local_k, local_v, local_line, tl.maximum(start, sinks + count), end, to_local, ring, picks, 0, high,
            mass, result, inside, real, scaling, TILE, _RING, WIDE,
        )  # fmt: skip
    to = (task * splits + split) * G + group
    _store_part(parts, lse, to, high, mass, result, group < G, both, inside, D)
    tl.debug_barrier()  # all threads have stored before one counts the program
    if tl.atomic_add(arrived + task, 1) == splits - 1:
        tl.store(arrived + task, 0)
        _join_parts(parts, lse, out, task, splits, G, D, DIMS, HEADS_PAD, SPLITS, CHUNK)
        if ADVANCE:
            rows = arrived + tl.num_programs(0)
            if tl.atomic_add(rows + row, 1) == HEADS - 1:  # every program of the row has read its cursor
                tl.store(rows + row, 0)
                tl.store(cursor + row, tl.load(cursor + row) + 1)


Attend = Callable[[torch.Tensor, "torch.Tensor | None", "tuple[torch.Tensor, torch.Tensor] | None"], torch.Tensor]


def splits_for(device: torch.device, tasks: int, tokens: int) -> int:
    """Parts per row and KV head: at most two programs per multiprocessor, about two tiles each or more."""
    processors = multiprocessors(device)
    if not processors:
        return max(1, min(3, tokens // _TILE))
    return max(1, min(2 * processors // tasks, cdiv(tokens, 2 * _TILE)))


def counters(n: int, h_kv: int, device: torch.device) -> torch.Tensor:
    """Of the programs of `attend` that have ended, per KV head and per row: (n * h_kv + n,) int32, zero between launches."""
    return torch.zeros(n * h_kv + n, dtype=torch.int32, device=device)


def attend(
    q: torch.Tensor,
    sinks: tuple[torch.Tensor, torch.Tensor],
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
    local: tuple[torch.Tensor, torch.Tensor],
    indices: torch.Tensor | None,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    *,
    ring: int,
    tokens: int,
    scaling: float,
    n_sink: int = 0,
    one: bool = False,
    advance: bool = False,
) -> torch.Tensor:
    """Attention of q (n, h, 1, d) over [plan[r][0] sinks | plan[r][1] chosen | plan[r][2] + 1 local] tokens: (n, 1, h, d).

    The newest token is at position cursor[r]; plan[r][3] = 1 attends everything up to it instead. Sources are pairs of K and V
    (n, h_kv, entries, d), alike in strides:

        sinks    by position
        chosen   by indices (n, h_kv, k) - n_sink, or in order where indices is None
        local    by position modulo `ring`

    one: all three are the same buffer, by position. tokens: estimated number of attended tokens; it sets the number of splits.
    advance: cursor += 1 afterwards.
    """
    widest = 0 if indices is None else indices.shape[2]
    with device_of(q):
        return prepare_attend(
            q, sinks, chosen, local, cursor, plan, ring=ring, tokens=tokens, scaling=scaling, widest=widest, n_sink=n_sink,
            one=one, advance=advance,
        )(q, indices, chosen)  # fmt: skip


def prepare_attend(
    q: torch.Tensor,
    sinks: tuple[torch.Tensor, torch.Tensor],
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
    local: tuple[torch.Tensor, torch.Tensor],
    cursor: torch.Tensor,
    plan: torch.Tensor,
    *,
    ring: int,
    tokens: int,
    scaling: float,
    widest: int,
    n_sink: int = 0,
    one: bool = False,
    advance: bool = False,
    arrived: torch.Tensor | None = None,
) -> Attend:
    """`attend` as a function of q, indices (n, h_kv, widest) or None (widest = 0), and the chosen tokens.

    q and chosen here are like those of the steps in shape, strides and dtype. arrived: `counters` of its own.
    """
    n, h, _, d = q.shape
    h_kv = sinks[0].shape[1]
    g = h // h_kv
    splits = splits_for(q.device, n * h_kv, tokens)
    dims = max(16, power_of_2(d))
    middle = sinks if chosen is None else chosen
    strides = [x.stride(i) for x in (sinks[0], middle[0], local[0]) for i in range(3)]
    # matrix units take 16-bit operands as they are; the interpreter knows no bf16 arithmetic
    wide = q.dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1"
    # where K and V of one buffer are read through indices, the compiler spends two stages on the indices: only with five does
    # a tile of K and V arrive while the one before is multiplied
    stages = 5 if one and chosen is not None and q.dtype.itemsize == 2 else 3
    # two programs, with two tiles each under way, fit a multiprocessor; fp32 without matrix units needs its registers
    tile = _TILE if dims <= 128 else max(16, (8192 if q.dtype.itemsize == 2 else 4096) // dims)
    run = prepared(
        _attend, (n * h_kv, splits), HEADS=h_kv, G=g, D=d, DIMS=dims, ROWS=max(_ROWS, power_of_2(g)), TILE=tile,
        CHOSEN=chosen is not None, CHOSEN_KIND=_PICKED if widest else _IN_ORDER, ONE=one, WIDE=wide,
        SPLITS=power_of_2(splits), HEADS_PAD=power_of_2(g), CHUNK=max(1, min(8, 4096 // (power_of_2(g) * dims))),
        ADVANCE=advance, num_warps=4, num_stages=stages,
    )  # fmt: skip
    arrived = counters(n, h_kv, q.device) if arrived is None else arrived
    size, numbers = (n, h_kv, splits, g, d), (scaling, ring, n_sink, widest, splits, *strides)
    fp32, dtype, device = torch.float32, q.dtype, q.device

    def attend(
        q: torch.Tensor, indices: torch.Tensor | None, chosen: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        parts, lse = torch.empty(size, dtype=fp32, device=device), torch.empty(size[:4], dtype=fp32, device=device)
        out = torch.empty((n, 1, h, d), dtype=dtype, device=device)
        middle, picks = sinks if chosen is None else chosen, cursor if indices is None else indices
        run(q.contiguous(), *sinks, *middle, *local, picks, cursor, plan, parts, lse, out, arrived, *numbers)
        return out

    return attend
