"""Attention of one query token over codes, decoded in registers: no tile of K or V is ever written.

The tokens come in lists. In each, a token's K and V are codes (`store.layout.Codes`), or exact and in a ring; so a body, the
tokens whose V alone is packed, and the tail are one list. A list is split over the whole device (flash decoding) by one launch,
and one launch joins the parts of all lists. How many tokens there are is read on the device, so that a recorded step can be
replayed. The reference is `pqcache.selective.quantization.attend_coded` over `PackedStore.tiles`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from pqcache.device.switch import device_of, power_of_2, prepared
from pqcache.device.triton_attend import _softmax_step, _store_part, splits_for
from pqcache.store.layout import Codes

COLUMNS = 5  # of a list's counts: tokens, those with packed K, with packed V, and what is added to a token to find it in a ring
_TILE = 64  # tokens per visit, half as many in fp32: registers
_ROWS = 16  # rows of the query tile, the least that a matrix instruction takes
_NONE, _OF_TOKEN, _OF_CHANNEL = 0, 1, 2  # how outliers are stored
_NEVER = tl.constexpr(2147483647)


@triton.jit
def _channel_outliers(
    x, values, positions, begin, end, length, count, inside, real,
    D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tokens begin .. end-1, x (TILE, DIMS), with the outliers of each channel in their places.

    values, positions (blocks, count, D) of one head; blocks of `length` tokens, positions ascending from their first tokens on.
    """
    tile = tl.arange(0, TILE)
    for block in range(begin // length, (end - 1) // length + 1):
        start = begin - block * length  # of the tile, in the block
        own = block * count * D + inside
        first, last = tl.zeros_like(inside), tl.zeros_like(inside) + count
        size = count
        while size > 0:  # of each channel: how many outliers lie before the tile
            middle = (first + last) // 2
            open_ = first < last
            here = tl.load(positions + own + middle * D, mask=real & open_, other=0).to(tl.int32)
            before = here < tl.maximum(start, 0)
            first, last = tl.where(open_ & before, middle + 1, first), tl.where(open_ & (before == 0), middle, last)
            size = size // 2
        there = tl.load(positions + own + first * D, mask=real & (first < count), other=0).to(tl.int32)
        there = tl.where(real & (first < count), there, _NEVER)
        while tl.min(there, 0) < start + TILE:
            mine = there < start + TILE
            value = tl.load(values + own + first * D, mask=mine, other=0.0).to(tl.float32)
            x = tl.where(mine[None] & (there[None] - start == tile[:, None]), value[None], x)
            first += mine.to(tl.int32)
            more = real & (first < count)
            there = tl.load(positions + own + first * D, mask=more, other=0).to(tl.int32)
            there = tl.where(more, there, _NEVER)
    return x


@triton.jit
def _decoded(
    codes, token_step, token_low, channel_step, channel_low, values, positions, a, b,
    begin, end, token, mask, inside, real, head,
    code_line, token_line, channel_line, span, value_line, count, block, rank_block,
    D: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr,
    OUTLIERS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Tokens (TILE,) from `begin` on, those that `mask` names, by the formula of `store.layout`: (TILE, DIMS) fp32.

    Pointers are at the head's first entry; outliers by token at the row's. A code is BITS bits of a line from bit BITS * channel
    on. GROUPS: of token_step, 0 = none. CHANNEL: 0 no channel_step, 1 it alone, 2 with channel_low; 3, 4: one segment.
    """
    both = mask[:, None] & real[None]
    bit = inside * BITS
    at = codes + token.to(tl.int64)[:, None] * code_line + (bit // 8)[None]
    word = tl.load(at, mask=both, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may lie across two bytes
        across = (bit % 8 + BITS > 8)[None]
        word = word | (tl.load(at + 1, mask=both & across, other=0).to(tl.int32) << 8)
    x = ((word >> (bit % 8)[None]) & ((1 << BITS) - 1)).to(tl.float32)
    if GROUPS == 1:
        at = token.to(tl.int64)[:, None] * token_line
        step = tl.load(token_step + at, mask=mask[:, None], other=0.0).to(tl.float32)
        x = x * step + tl.load(token_low + at, mask=mask[:, None], other=0.0).to(tl.float32)
    elif GROUPS > 1:
        at = token.to(tl.int64)[:, None] * token_line + (inside // (D // GROUPS))[None]
        step = tl.load(token_step + at, mask=both, other=0.0).to(tl.float32)
        x = x * step + tl.load(token_low + at, mask=both, other=0.0).to(tl.float32)
    if CHANNEL > 2:
        step = tl.load(channel_step + inside, mask=real, other=0.0).to(tl.float32)[None]
        x = x * step
        if CHANNEL == 4:
            x = x + tl.load(channel_low + inside, mask=real, other=0.0).to(tl.float32)[None]
    elif CHANNEL > 0:
        at = (token // span).to(tl.int64)[:, None] * channel_line + inside[None]
        x = x * tl.load(channel_step + at, mask=both, other=0.0).to(tl.float32)
        if CHANNEL == 2:
            x = x + tl.load(channel_low + at, mask=both, other=0.0).to(tl.float32)
    if OUTLIERS == 1:
        for i in range(count):
            spot = token.to(tl.int64) * value_line + i
            place = tl.load(positions + spot, mask=mask, other=-1).to(tl.int32) - head * D
            value = tl.load(values + spot, mask=mask, other=0.0).to(tl.float32)
            x = tl.where(place[:, None] == inside[None], value[:, None], x)
    if OUTLIERS == 2:
        x = _channel_outliers(x, values, positions, begin, end, block, count, inside, real, D, TILE)
    if RANK > 0:
        which = (token // rank_block).to(tl.int64) * RANK * D
        for i in tl.static_range(RANK):
            left = tl.load(a + token.to(tl.int64) * RANK + i, mask=mask, other=0.0).to(tl.float32)
            right = tl.load(b + (which + i * D)[:, None] + inside[None], mask=both, other=0.0).to(tl.float32)
            x += left[:, None] * right
    if HALF:  # see quantizer.finite
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return tl.where(both, x, 0.0)


@triton.jit
def _tokens(
    codes, token_step, token_low, channel_step, channel_low, values, positions, a, b, exact,
    begin, end, inside, real, row, head, packed, shift, ring,
    code_row, code_head, code_line, token_row, token_head, token_line, channel_row, channel_head, channel_line, span,
    value_row, value_head, value_line, count, block, a_row, a_head, b_row, b_head, rank_block,
    HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    CHANNEL: tl.constexpr, OUTLIERS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Tokens begin .. end-1 of a list, the first `packed` of them codes, the others at entry (token + shift) % ring of `exact`.

    Returns (TILE, DIMS), in the type of `exact` (n, HEADS, ring, D), zero past the end.
    """
    token = begin + tl.arange(0, TILE)
    beyond = (token < end) & (token >= packed)
    entry = (row * HEADS + head) * ring + (token + shift) % ring
    x = tl.load(exact + entry[:, None] * D + inside[None], mask=beyond[:, None] & real[None], other=0.0)
    if BITS > 0:  # noqa: SIM102 - known when it is compiled
        if begin < packed:
            mine = token < tl.minimum(end, packed)
            decoded = _decoded(
                codes + row * code_row + head * code_head,
                token_step + row * token_row + head * token_head, token_low + row * token_row + head * token_head,
                channel_step + row * channel_row + head * channel_head,
                channel_low + row * channel_row + head * channel_head,
                values + row * value_row + head * value_head, positions + row * value_row + head * value_head,
                a + row * a_row + head * a_head, b + row * b_row + head * b_head,
                begin, tl.minimum(end, packed), token, mine, inside, real, head.to(tl.int32),
                code_line, token_line, channel_line, span, value_line, count, block, rank_block,
                D, TILE, BITS, GROUPS, CHANNEL, OUTLIERS, RANK, HALF,
            )  # fmt: skip
            x = tl.where(mine[:, None], decoded.to(x.dtype), x)
    return x


@triton.jit
def _attend_packed(
    q, counts, parts, lse, scaling, all_splits, splits, base,
    k_codes, k_token_step, k_token_low, k_channel_step, k_channel_low, k_values, k_positions, k_a, k_b, k_exact,
    k_code_row, k_code_head, k_code_line, k_token_row, k_token_head, k_token_line,
    k_channel_row, k_channel_head, k_channel_line, k_span, k_value_row, k_value_head, k_value_line, k_count, k_block,
    k_a_row, k_a_head, k_b_row, k_b_head, k_rank_block, k_ring,
    v_codes, v_token_step, v_token_low, v_channel_step, v_channel_low, v_values, v_positions, v_a, v_b, v_exact,
    v_code_row, v_code_head, v_code_line, v_token_row, v_token_head, v_token_line,
    v_channel_row, v_channel_head, v_channel_line, v_span, v_value_row, v_value_head, v_value_line, v_count, v_block,
    v_a_row, v_a_head, v_b_row, v_b_head, v_rank_block, v_ring,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, HALF: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_CHANNEL: tl.constexpr, K_OUTLIERS: tl.constexpr, K_RANK: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_CHANNEL: tl.constexpr, V_OUTLIERS: tl.constexpr, V_RANK: tl.constexpr,
):  # fmt: skip
    """Program = (row and KV head, split): its share of one list.

    Writes parts (n, HEADS, all_splits, G, D) and lse (n, HEADS, all_splits, G) fp32 from split `base` on. counts (n, HEADS, 5):
    see COLUMNS.
    """
    task, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, row = task % HEADS, task // HEADS
    own = counts + task * 5
    total, k_packed, v_packed = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    k_shift, v_shift = tl.load(own + 3), tl.load(own + 4)
    share = tl.cdiv(tl.cdiv(total, splits), TILE) * TILE
    start = split * share
    end = tl.minimum(start + share, total)
    group, inside = tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = inside < D
    lines = (group < G)[:, None] & real[None]
    query = tl.load(q + (task * G + group)[:, None] * D + inside[None], mask=lines, other=0.0)
    high, mass = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIMS], tl.float32)
    for begin in range(start, end, TILE):
        key = _tokens(
            k_codes, k_token_step, k_token_low, k_channel_step, k_channel_low, k_values, k_positions, k_a, k_b, k_exact,
            begin, end, inside, real, row, head, k_packed, k_shift, k_ring,
            k_code_row, k_code_head, k_code_line, k_token_row, k_token_head, k_token_line,
            k_channel_row, k_channel_head, k_channel_line, k_span, k_value_row, k_value_head, k_value_line, k_count,
            k_block, k_a_row, k_a_head, k_b_row, k_b_head, k_rank_block,
            HEADS, D, TILE, K_BITS, K_GROUPS, K_CHANNEL, K_OUTLIERS, K_RANK, HALF,
        )  # fmt: skip
        value = _tokens(
            v_codes, v_token_step, v_token_low, v_channel_step, v_channel_low, v_values, v_positions, v_a, v_b, v_exact,
            begin, end, inside, real, row, head, v_packed, v_shift, v_ring,
            v_code_row, v_code_head, v_code_line, v_token_row, v_token_head, v_token_line,
            v_channel_row, v_channel_head, v_channel_line, v_span, v_value_row, v_value_head, v_value_line, v_count,
            v_block, v_a_row, v_a_head, v_b_row, v_b_head, v_rank_block,
            HEADS, D, TILE, V_BITS, V_GROUPS, V_CHANNEL, V_OUTLIERS, V_RANK, HALF,
        )  # fmt: skip
        there = begin + tl.arange(0, TILE) < end
        high, mass, result = _softmax_step(query, key, value, there, high, mass, result, scaling, WIDE)
    to = (task * all_splits + base + split) * G + group
    _store_part(parts, lse, to, high, mass, result, group < G, lines, inside, D)


@triton.jit
def _join(
    parts, lse, out, joined, splits,
    G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program = query head of a row: its parts as one: out (n, h, D), and the log-sum-exp over all of them, joined (n, h)."""
    task = tl.program_id(0).to(tl.int64)
    a, group = task % G, task // G
    each, inside = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    line = (group * splits + each) * G + a
    mass = tl.load(lse + line, mask=each < splits, other=float("-inf"))
    top = tl.max(mass, 0)
    share = tl.exp(mass - top)
    both = (each < splits)[:, None] & (inside < D)[None]
    part = tl.load(parts + line[:, None] * D + inside[None], mask=both, other=0.0)
    total = tl.sum(share, 0)
    result = tl.sum(part * share[:, None], 0) / total
    tl.store(out + task * D + inside, result.to(out.dtype.element_ty), mask=inside < D)
    tl.store(joined + task, top + tl.log(total))


@triton.jit
def _add_exact(
    k, v, counts, exact_k, exact_v, ring_k, ring_v,
    D: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Program = (row, KV head): the new token's K and V, exact, at the end of the list; the count goes up by one."""
    task = tl.program_id(0).to(tl.int64)
    own = counts + task * 5
    token = tl.load(own)
    inside = tl.arange(0, DIMS)
    real = inside < D
    entry_k, entry_v = (token + tl.load(own + 3)) % ring_k, (token + tl.load(own + 4)) % ring_v
    key = tl.load(k + task * D + inside, mask=real, other=0.0)
    value = tl.load(v + task * D + inside, mask=real, other=0.0)
    tl.store(exact_k + (task * ring_k + entry_k) * D + inside, key, mask=real)
    tl.store(exact_v + (task * ring_v + entry_v) * D + inside, value, mask=real)
    tl.store(own, token + 1)


class TokenList:
    """One list on the device: what a launch over it needs beside the query, made once and used until a tensor moves.

    k, v: the codes, or None where all tokens of the list are exact. exact: K and V (n, h_kv, ring, d), dense. counts (n, h_kv, 5)
    int32, see COLUMNS. tokens: about how many there will be; it sets the number of splits.
    """

    def __init__(
        self,
        k: Codes | None,
        v: Codes | None,
        exact: tuple[torch.Tensor, torch.Tensor],
        counts: torch.Tensor,
        tokens: int,
    ) -> None:
        self.k, self.v, self.exact, self.counts = k, v, exact, counts
        n, h_kv = counts.shape[:2]
        self.splits = splits_for(counts.device, n * h_kv, tokens)
        self.arguments: list[Any] = []
        self.sizes: dict[str, int] = {}
        for name, codes, ring in zip("KV", (k, v), exact, strict=True):
            self.arguments += [*_tensors(codes, ring), *_strides(codes), ring.shape[2]]
            self.sizes |= {f"{name}_{key}": value for key, value in _sizes(codes).items()}


def _tensors(codes: Codes | None, ring: torch.Tensor) -> list[torch.Tensor]:
    """Pointers of K or V for `_attend_packed`; `ring` stands for what there is not."""
    if codes is None:
        return [ring] * 10
    found = [codes.codes, codes.token_step, codes.token_low, codes.channel_step, codes.channel_low]
    sparse, rank = codes.outliers, codes.low_rank
    found += [None, None] if sparse is None else [sparse.values, sparse.positions]
    found += [None, None] if rank is None else [rank.a, rank.b]
    return [*(ring if x is None else x for x in found), ring]


def _strides(codes: Codes | None) -> list[int]:
    """The numbers beside them: strides of rows, heads and lines, and what is covered by one entry."""
    if codes is None:
        return [0] * 9 + [1] + [0] * 4 + [1] + [0] * 4 + [1]
    out = []
    for x in (codes.codes, codes.token_step, codes.channel_step):
        out += [0, 0, 0] if x is None else [x.stride(i) for i in range(3)]
    sparse, rank = codes.outliers, codes.low_rank
    out.append(codes.span)
    if sparse is None:
        out += [0, 0, 0, 0, 1]
    elif sparse.length == 0:
        out += [sparse.values.stride(0), 0, sparse.values.stride(2), sparse.values.shape[3], 1]
    else:
        out += [sparse.values.stride(0), sparse.values.stride(1), 0, sparse.values.shape[3], sparse.length]
    pair = [] if rank is None else [rank.a, rank.b]
    return [
        *out,
        *([0] * 4 if rank is None else [x.stride(i) for x in pair for i in range(2)]),
        rank.length if rank else 1,
    ]


def _sizes(codes: Codes | None) -> dict[str, int]:
    """What a kernel is compiled for."""
    if codes is None:
        return {"BITS": 0, "GROUPS": 0, "CHANNEL": 0, "OUTLIERS": _NONE, "RANK": 0}
    channel = 0
    if codes.channel_step is not None:
        channel = (1 if codes.channel_low is None else 2) + (2 if codes.channel_step.shape[2] == 1 else 0)
    sparse = codes.outliers
    return {
        "BITS": codes.bits,
        "GROUPS": 0 if codes.token_step is None else codes.token_step.shape[3],
        "CHANNEL": channel,
        "OUTLIERS": _NONE if sparse is None else _OF_CHANNEL if sparse.length else _OF_TOKEN,
        "RANK": 0 if codes.low_rank is None else codes.low_rank.a.shape[3],
    }


def attend(q: torch.Tensor, lists: list[TokenList], scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (n, h, 1, d) over all tokens of all lists: out (n, 1, h, d), and lse (n, h, 1) fp32."""
    with device_of(q):
        return prepare_attend(q, lists, scaling)(q)


def prepare_attend(
    q: torch.Tensor, lists: list[TokenList], scaling: float
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`attend` as a function of queries like q, for as long as no tensor of the lists moves."""
    n, h, _, d = q.shape
    h_kv = lists[0].counts.shape[1]
    g, splits = h // h_kv, sum(each.splits for each in lists)
    # matrix units take 16-bit operands as they are; the interpreter knows no bf16 arithmetic
    wide = q.dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1"
    launches, base = [], 0
    for each in lists:
        run = prepared(
            _attend_packed, (n * h_kv, each.splits), HEADS=h_kv, G=g, D=d, DIMS=max(16, power_of_2(d)),
            ROWS=max(_ROWS, power_of_2(g)), TILE=_TILE * 2 // q.dtype.itemsize, WIDE=wide, HALF=q.dtype == torch.float16,
            **each.sizes, num_warps=4, num_stages=2,
        )  # fmt: skip
        launches.append((run, each.counts, (scaling, splits, each.splits, base, *each.arguments)))
        base += each.splits
    join = prepared(_join, (n * h,), G=g, D=d, DIMS=power_of_2(d), SPLITS=power_of_2(splits))
    size, fp32, dtype, device = (n, h_kv, splits, g, d), torch.float32, q.dtype, q.device

    def attend(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts, lse = torch.empty(size, dtype=fp32, device=device), torch.empty(size[:4], dtype=fp32, device=device)
        out = torch.empty((n, 1, h, d), dtype=dtype, device=device)
        joined = torch.empty((n, h, 1), dtype=fp32, device=device)
        q = q.contiguous()
        for run, counts, rest in launches:
            run(q, counts, parts, lse, *rest)
        join(parts, lse, out, joined, splits)
        return out, joined

    return attend


def prepare_add(target: TokenList) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function that puts one token per row, k and v (n, h_kv, 1, d), exact, at the end of a list."""
    counts, (exact_k, exact_v) = target.counts, target.exact
    n, h_kv, ring, d = exact_k.shape
    run = prepared(_add_exact, (n * h_kv,), D=d, DIMS=power_of_2(d))
    rest = counts, exact_k, exact_v, ring, exact_v.shape[2]

    def add(k: torch.Tensor, v: torch.Tensor) -> None:
        run(k.contiguous(), v.contiguous(), *rest)

    return add
