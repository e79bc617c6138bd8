"""The block cache's decode step on a CUDA device: look-up and read, policy, refill. The host is asked for nothing.

Tables and rules are those of `pqcache.store.block_cache`. One kernel copies the chosen tokens, each from its block's slot, or
from pinned memory where the block is not cached. One program per row decides which blocks come in; few programs copy them, so
that the model's own kernels keep the device meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pqcache.device.switch import cdiv, launch, power_of_2

# columns of a tally (n, 3) int64: look-ups and hits in tokens, blocks that came in
LOOKUPS, HITS, REFILLS = 0, 1, 2
_PARTS = 16  # programs per row that copy blocks: bytes enough under way for a link
_LAST = (1 << 63) - 1


@triton.jit
def _read(
    cache_k, cache_v, host_k, host_v, indices, slot, counts, tally, cursor, plan, out_k, out_v,
    n_sink, widest, block, columns, cache_row, cache_head, cache_line, host_row, host_head, host_line,
    HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, HITS: tl.constexpr,
):  # fmt: skip
    """Program = (tile of chosen tokens, row and KV head)."""
    task = tl.program_id(1).to(tl.int64)
    head, row = task % HEADS, task // HEADS
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = entry < tl.load(plan + row * 4 + 1)
    spot = tl.load(indices + task * widest + entry, mask=mask, other=0).to(tl.int64) - n_sink
    number = spot // block
    into = tl.load(slot + row * columns + number, mask=mask, other=-1)
    hit = mask & (into >= 0)
    inside = tl.arange(0, DIMS)
    real = (inside < D)[None]
    near = row * cache_row + head * cache_head + (into * block + spot % block)[:, None] * cache_line + inside[None]
    far = row * host_row + head * host_head + spot[:, None] * host_line + inside[None]
    near_mask, far_mask = hit[:, None] & real, (mask & (into < 0))[:, None] & real
    to = (task * widest + entry)[:, None] * D + inside[None]
    key = tl.where(
        near_mask, tl.load(cache_k + near, mask=near_mask, other=0.0), tl.load(host_k + far, mask=far_mask, other=0.0)
    )
    value = tl.where(
        near_mask, tl.load(cache_v + near, mask=near_mask, other=0.0), tl.load(host_v + far, mask=far_mask, other=0.0)
    )
    tl.store(out_k + to, key, mask=mask[:, None] & real)
    tl.store(out_v + to, value, mask=mask[:, None] & real)
    complete = (tl.load(cursor + row).to(tl.int64) + 1 - n_sink) // block
    tl.atomic_add(counts + row * columns + number, 1, mask=mask & (number < complete), sem="relaxed")
    tl.atomic_add(tally + row * 3 + HITS, tl.sum(hit.to(tl.int64), 0), sem="relaxed")


@triton.jit
def _count_lookups(
    row, length, content, tally, chance, plan, n_sink, block,
    HEADS: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """Add a row's look-ups, and the hits that as many tokens chosen at random would have had; content: its slots, -1 = free."""
    lookups = tl.load(plan + row * 4 + 1).to(tl.int64) * HEADS
    candidates = tl.maximum(length - 1 - tl.load(plan + row * 4 + 2) - n_sink, 1)
    share = (tl.sum((content >= 0).to(tl.int64), 0) * block).to(tl.float64) / candidates.to(tl.float64)
    tl.store(chance + row, tl.load(chance + row) + lookups.to(tl.float64) * tl.minimum(share, 1.0))
    tl.store(tally + row * 3 + LOOKUPS, tl.load(tally + row * 3 + LOOKUPS) + lookups)


@triton.jit
def _admit(
    blocks, counts, slot, content, uses, stamp, clock, incoming, tally, chance, cursor, plan,
    n, n_sink, block, columns, min_columns, limit, topk, slots,
    HEADS: tl.constexpr, LFU: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, TOPK: tl.constexpr,
    LOOKUPS: tl.constexpr, REFILLS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Program = row: BlockCacheStore.admit, of the first `limit` of its blocks (n, columns) that have a count."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TOPK)
    number = tl.load(blocks + row * columns + i, mask=i < limit, other=0)
    read = tl.load(counts + row * columns + i, mask=i < limit, other=0) > 0
    at = tl.load(slot + row * columns + number, mask=read, other=-1)
    cached = read & (at >= 0)
    new = read & (at < 0)
    touched, news = tl.sum(cached.to(tl.int64), 0), tl.sum(new.to(tl.int64), 0)
    place = tl.cumsum(new.to(tl.int64), 0)  # from 1

    length = tl.load(cursor + row).to(tl.int64)
    s = tl.arange(0, SLOTS)
    held = tl.load(content + row * slots + s, mask=s < slots, other=-1)
    _count_lookups(row, length, held, tally, chance, plan, n_sink, block, HEADS, LOOKUPS)
    now = tl.load(clock + row)
    each = tl.arange(0, ROWS)
    longest = tl.max(tl.load(cursor + each, mask=each < n, other=0), 0).to(tl.int64)
    width = tl.maximum(tl.cdiv(tl.maximum(longest - n_sink, 1), block), min_columns)

    # cached blocks are touched; seen by all threads before any reads on
    mine = row * slots + at
    tl.store(uses + mine, tl.load(uses + mine, mask=cached, other=0) + 1, mask=cached)
    tl.store(stamp + mine, now + tl.cumsum(cached.to(tl.int64), 0), mask=cached)
    tl.debug_barrier()
    use = tl.load(uses + row * slots + s, mask=s < slots, other=0)
    order = tl.load(stamp + row * slots + s, mask=s < slots, other=0)
    room = tl.full([], 0, tl.int64) + slots
    if LFU:
        order += use << 40
        room = tl.maximum(tl.sum(((use <= 1) & (s < slots)).to(tl.int64), 0), 1)
    order = tl.where(s < slots, order, LAST)

    # the last `room` new ones stay, each in the next slot of the policy's order
    skipped = tl.maximum(news - room, 0)
    stays = new & (place > skipped)
    tl.store(incoming + (row * topk + place - 1 - skipped) * 2, number, mask=stays)
    tl.store(incoming + (row * topk + i) * 2, tl.full([TOPK], -1, tl.int64), mask=(i >= news - skipped) & (i < topk))
    tl.debug_barrier()
    turn = tl.full([SLOTS], -1, tl.int64)
    for j in range(news - skipped):
        victim = tl.argmin(order, 0)
        turn = tl.where(s == victim, j, turn)
        order = tl.where(s == victim, LAST, order)
    filled = turn >= 0
    entering = tl.load(incoming + (row * topk + turn) * 2, mask=filled, other=-1)
    tl.store(incoming + (row * topk + turn) * 2 + 1, s.to(tl.int64), mask=filled)
    tl.store(slot + row * columns + held, tl.full([SLOTS], -1, tl.int64), mask=filled & (held >= 0))
    tl.store(slot + row * columns + entering, s.to(tl.int64), mask=filled)
    tl.store(content + row * slots + s, entering, mask=filled)
    tl.store(uses + row * slots + s, tl.full([SLOTS], 1, tl.int64), mask=filled)
    tl.store(stamp + row * slots + s, now + touched + skipped + turn + 1, mask=filled)
    tl.store(clock + row, now + tl.minimum(width, topk))  # last: all threads have read it
    tl.store(tally + row * 3 + REFILLS, tl.load(tally + row * 3 + REFILLS) + news - skipped)


@triton.jit
def _refill(
    cache_k, cache_v, host_k, host_v, incoming, topk, size, cache_row, host_row,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program = (part, row): its part of each block that comes in. A block is one run of `size` numbers on both sides."""
    row = tl.program_id(1).to(tl.int64)
    share = tl.cdiv(tl.cdiv(size, PARTS), TILE) * TILE
    start = tl.program_id(0) * share
    end = tl.minimum(start + share, size)
    for i in range(topk):
        number = tl.load(incoming + (row * topk + i) * 2)
        if number >= 0:
            source = row * host_row + number * size
            to = row * cache_row + tl.load(incoming + (row * topk + i) * 2 + 1) * size
            for first in range(start, end, TILE):
                at = first + tl.arange(0, TILE)
                tl.store(cache_k + to + at, tl.load(host_k + source + at, mask=at < end), mask=at < end)
                tl.store(cache_v + to + at, tl.load(host_v + source + at, mask=at < end), mask=at < end)


def read(
    cache: tuple[torch.Tensor, torch.Tensor],
    host: tuple[torch.Tensor, torch.Tensor],
    indices: torch.Tensor,
    slot: torch.Tensor,
    counts: torch.Tensor,
    tally: torch.Tensor,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    n_sink: int,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions indices (n, h_kv, k) int32, row r's first plan[r][1]: two (n, h_kv, k, d) on the device.

    From the cache (n, h_kv, slots * block, d) where slot (n, columns) has the block, else from host rows (n, h_kv,
    capacity, d), which are the positions after `n_sink`. counts (n, columns) int32 += the chosen tokens of each complete
    block; tally: hits. The current token is at position cursor[r], and stored.
    """
    n, h_kv, widest = indices.shape
    d = host[0].shape[-1]
    out = [torch.empty((n, h_kv, widest, d), dtype=host[0].dtype, device=indices.device) for _ in range(2)]
    strides = [x.stride(i) for x in (cache[0], host[0]) for i in range(3)]
    tile = 32
    launch(_read, (cdiv(widest, tile), n * h_kv), indices)(
        *cache, *host, indices, slot, counts, tally, cursor, plan, *out, n_sink, widest, block, slot.shape[1], *strides,
        HEADS=h_kv, D=d, DIMS=power_of_2(d), TILE=tile, HITS=HITS,
    )  # fmt: skip
    return out[0], out[1]


def admit(
    counts: torch.Tensor,
    slot: torch.Tensor,
    content: torch.Tensor,
    uses: torch.Tensor,
    stamp: torch.Tensor,
    clock: torch.Tensor,
    incoming: torch.Tensor,
    tally: torch.Tensor,
    chance: torch.Tensor,
    cursor: torch.Tensor,
    plan: torch.Tensor,
    *,
    heads: int,
    n_sink: int,
    block: int,
    min_columns: int,
    lfu: bool,
) -> None:
    """Let the policy see this step's counts (n, columns), which are zero again afterwards; cursor (n,): tokens stored now.

    slot (n, columns), content, uses, stamp (n, slots) and clock (n,), int64, as in BlockCacheStore. incoming (n, topk, 2): block
    and slot of each block that came in and stays, -1 and anything after the last. tally: look-ups and refills. chance (n,)
    float64: the hits that as many tokens at random would have had. min_columns: the fewest columns by which the clock counts.
    """
    n, columns = slot.shape
    slots, topk = content.shape[1], incoming.shape[1]
    order = counts.sort(dim=1, descending=True, stable=True)
    counts.zero_()
    sizes = [power_of_2(x) for x in (n, slots, topk)]
    launch(_admit, (n,), content)(
        order.indices, order.values, slot, content, uses, stamp, clock, incoming, tally, chance, cursor, plan,
        n, n_sink, block, columns, min_columns, min(topk, columns), topk, slots,
        HEADS=heads, LFU=lfu, ROWS=sizes[0], SLOTS=sizes[1], TOPK=sizes[2], LOOKUPS=LOOKUPS, REFILLS=REFILLS, LAST=_LAST,
        num_warps=min(16, max(1, max(sizes) // 128)),
    )  # fmt: skip


def refill(
    cache: tuple[torch.Tensor, torch.Tensor],
    host: tuple[torch.Tensor, torch.Tensor],
    incoming: torch.Tensor,
    block: int,
) -> None:
    """Copy blocks incoming[..., 0] of host rows into slots incoming[..., 1]; both are token-major, (n, capacity, h_kv, d)."""
    (n, _, h_kv, d), topk = host[0].shape, incoming.shape[1]
    launch(_refill, (_PARTS, n), incoming)(
        *cache, *host, incoming, topk, block * h_kv * d, cache[0].stride(0), host[0].stride(0), PARTS=_PARTS, TILE=2048
    )
