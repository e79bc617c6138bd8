"""Attention of one query token over lists of tokens, read where and as they are stored: all of them, chosen ones, packed ones.

A token's K and V are codes (`store.layout.Codes`), decoded in registers, or exact numbers at an entry of a buffer. The tokens of
a list are split, so that the whole device works on one query (flash decoding); the query heads of a group share one read. One
launch per list writes parts, one joins the parts of all lists by their log-sum-exp. How many tokens there are is read on the
device, so that a recorded step can be replayed. Reference: `selective.attention.attend_one`, and the formula of `store.layout`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pqcache.device.launch import device_of, interpreted, power_of_2, processors
from pqcache.store.layout import Codes

COLUMNS = 5  # of a list's counts: tokens, those with packed K, with packed V, and what is added to a token for its K's, V's entry
_TILE = 64  # tokens per visit; fewer in fp32 and with wide heads: registers
_ROWS = 16  # rows of the query tile, the least that a matrix instruction takes; a group is padded to it


@triton.jit
def _decoded(
    codes, token_step, token_low, channel_step, channel_low, token, both, inside,
    code_line, token_line, channel_line, span,
    D: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Tokens (TILE,) by the formula of `store.layout`: (TILE, DIMS) fp32. Pointers are at the head's first entry.

    A code is BITS bits of a line from bit BITS * channel on. GROUPS: of token_step, 0 = none. CHANNEL: 0 no channel_step, 1 it
    alone, 2 with channel_low.
    """
    bit = inside * BITS
    at = codes + token.to(tl.int64)[:, None] * code_line + (bit // 8)[None]
    word = tl.load(at, mask=both, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may lie across two bytes
        across = (bit % 8 + BITS > 8)[None]
        word = word | (tl.load(at + 1, mask=both & across, other=0).to(tl.int32) << 8)
    x = ((word >> (bit % 8)[None]) & ((1 << BITS) - 1)).to(tl.float32)
    if GROUPS > 0:
        at = token.to(tl.int64)[:, None] * token_line + (inside // (D // GROUPS))[None]
        step = tl.load(token_step + at, mask=both, other=0.0).to(tl.float32)
        x = x * step + tl.load(token_low + at, mask=both, other=0.0).to(tl.float32)
    if CHANNEL > 0:
        at = (token // span).to(tl.int64)[:, None] * channel_line + inside[None]
        x = x * tl.load(channel_step + at, mask=both, other=0.0).to(tl.float32)
        if CHANNEL == 2:
            x = x + tl.load(channel_low + at, mask=both, other=0.0).to(tl.float32)
    if HALF:  # see quantizer.finite
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x


@triton.jit
def _tokens(
    codes, token_step, token_low, channel_step, channel_low, exact, token, entry, there, packed, inside, real, row, head,
    code_row, code_head, code_line, token_row, token_head, token_line, channel_row, channel_head, channel_line, span,
    exact_row, exact_head, exact_line, ring,
    D: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, CHANNEL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """K or V of a tile of tokens: (TILE, DIMS), in the type of `exact`. Those from `packed` on are at entry % ring of `exact`."""
    beyond = (there & (token >= packed))[:, None] & real[None]
    at = row * exact_row + head * exact_head + (entry % ring).to(tl.int64) * exact_line
    x = tl.load(exact + at[:, None] + inside[None], mask=beyond, other=0.0)
    if BITS > 0:
        both = (there & (token < packed))[:, None] & real[None]
        decoded = _decoded(
            codes + row * code_row + head * code_head,
            token_step + row * token_row + head * token_head, token_low + row * token_row + head * token_head,
            channel_step + row * channel_row + head * channel_head, channel_low + row * channel_row + head * channel_head,
            token, both, inside, code_line, token_line, channel_line, span, D, BITS, GROUPS, CHANNEL, HALF,
        )  # fmt: skip
        x = tl.where(both, decoded.to(x.dtype), x)
    return x


@triton.jit
def _attend(
    q, counts, picks, parts, lse, scaling, all_splits, splits, base, widest,
    k_codes, k_token_step, k_token_low, k_channel_step, k_channel_low, k_exact,
    k_code_row, k_code_head, k_code_line, k_token_row, k_token_head, k_token_line,
    k_channel_row, k_channel_head, k_channel_line, k_span, k_exact_row, k_exact_head, k_exact_line, k_ring,
    v_codes, v_token_step, v_token_low, v_channel_step, v_channel_low, v_exact,
    v_code_row, v_code_head, v_code_line, v_token_row, v_token_head, v_token_line,
    v_channel_row, v_channel_head, v_channel_line, v_span, v_exact_row, v_exact_head, v_exact_line, v_ring,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PICKED: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_CHANNEL: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Program = (row and KV head, split): its share of one list.

    Writes parts (n, HEADS, all_splits, G, D) and lse (n, HEADS, all_splits, G) fp32 from split `base` on. counts (n, HEADS,
    COLUMNS). PICKED: token i is at entry picks[row, head, i] (n, HEADS, widest), -1 is none; else at token + shift.
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
    real, mine = inside < D, group < G
    lines = mine[:, None] & real[None]
    query = tl.load(q + (task * G + group)[:, None] * D + inside[None], mask=lines, other=0.0)
    high, mass = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIMS], tl.float32)
    for begin in range(start, end, TILE):
        token = begin + tl.arange(0, TILE)
        there = token < end
        k_entry, v_entry = token + k_shift, token + v_shift
        if PICKED:
            k_entry = tl.load(picks + task * widest + token, mask=there, other=-1)
            there = there & (k_entry >= 0)
            k_entry = tl.maximum(k_entry, 0)
            v_entry = k_entry
        key = _tokens(
            k_codes, k_token_step, k_token_low, k_channel_step, k_channel_low, k_exact, token, k_entry, there, k_packed,
            inside, real, row, head, k_code_row, k_code_head, k_code_line, k_token_row, k_token_head, k_token_line,
            k_channel_row, k_channel_head, k_channel_line, k_span, k_exact_row, k_exact_head, k_exact_line, k_ring,
            D, K_BITS, K_GROUPS, K_CHANNEL, HALF,
        )  # fmt: skip
        value = _tokens(
            v_codes, v_token_step, v_token_low, v_channel_step, v_channel_low, v_exact, token, v_entry, there, v_packed,
            inside, real, row, head, v_code_row, v_code_head, v_code_line, v_token_row, v_token_head, v_token_line,
            v_channel_row, v_channel_head, v_channel_line, v_span, v_exact_row, v_exact_head, v_exact_line, v_ring,
            D, V_BITS, V_GROUPS, V_CHANNEL, HALF,
        )  # fmt: skip
        if WIDE:
            logits = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee") * scaling
        else:
            logits = tl.dot(query, tl.trans(key)) * scaling
        logits = tl.where(there[None], logits, float("-inf"))
        top = tl.maximum(high, tl.max(logits, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        shrink, weights = tl.exp(high - safe), tl.exp(logits - safe[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        if WIDE:
            added = tl.dot(weights.to(value.dtype).to(tl.float32), value.to(tl.float32), input_precision="ieee")
        else:
            added = tl.dot(weights.to(value.dtype), value)
        high, result = top, result * shrink[:, None] + added
    to = (task * all_splits + base + split) * G + group
    some = tl.where(mass == 0.0, 1.0, mass)
    tl.store(lse + to, tl.where(mass == 0.0, float("-inf"), high + tl.log(some)), mask=mine)
    tl.store(parts + to[:, None] * D + inside[None], result / some[:, None], mask=lines)


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


@dataclass(frozen=True)
class TokenList:
    """One list of tokens.

    exact: K and V (n, h_kv, entries, d), d dense. counts (n, h_kv, COLUMNS) int32. tokens: about how many there will be; it sets
    the number of splits. k, v: the codes, None where all tokens are exact. picks (n, h_kv, tokens) int32: the entry of each.
    """

    exact: tuple[torch.Tensor, torch.Tensor]
    counts: torch.Tensor
    tokens: int
    k: Codes | None = None
    v: Codes | None = None
    picks: torch.Tensor | None = None

    def splits(self) -> int:
        """Parts per row and KV head: at most two programs per multiprocessor, about two tiles each or more."""
        tasks = self.counts.shape[0] * self.counts.shape[1]
        return max(1, min(2 * processors(self.counts.device) // tasks, -(-self.tokens // (2 * _TILE))))


def _described(codes: Codes | None, exact: torch.Tensor) -> tuple[list[Any], dict[str, int]]:
    """Tensors and strides of K or V for `_attend`, and what it is compiled for; `exact` stands for what there is not."""
    tensors: list[Any] = [exact] * 5
    strides, span, sizes = [0] * 9, 1, {"BITS": 0, "GROUPS": 0, "CHANNEL": 0}
    if codes is not None:
        found = [codes.codes, codes.token_step, codes.token_low, codes.channel_step, codes.channel_low]
        tensors = [exact if x is None else x for x in found]
        lines = [found[0], found[1], found[3]]
        strides, span = [0 if x is None else x.stride(i) for x in lines for i in range(3)], codes.span
        sizes = {
            "BITS": codes.bits,
            "GROUPS": 0 if codes.token_step is None else codes.token_step.shape[3],
            "CHANNEL": 0 if codes.channel_step is None else 1 if codes.channel_low is None else 2,
        }
    return [*tensors, exact, *strides, span, *exact.stride()[:3], exact.shape[2]], sizes


def attend(q: torch.Tensor, lists: list[TokenList], scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (n, h, 1, d) over all tokens of all lists: out (n, 1, h, d), and lse (n, h, 1) fp32."""
    n, h, _, d = q.shape
    h_kv, fp32, device = lists[0].counts.shape[1], torch.float32, q.device
    g, splits = h // h_kv, [each.splits() for each in lists]
    size = (n, h_kv, sum(splits), g)
    parts, lse = torch.empty((*size, d), dtype=fp32, device=device), torch.empty(size, dtype=fp32, device=device)
    out, joined = q.new_empty((n, 1, h, d)), torch.empty((n, h, 1), dtype=fp32, device=device)
    dims = max(16, power_of_2(d))
    # matrix units take 16-bit operands as they are
    wide = q.dtype == fp32 or interpreted()
    tile = max(16, min(_TILE, 16_384 // dims // q.element_size()))
    q, base = q.contiguous(), 0
    with device_of(q):
        for each, own in zip(lists, splits, strict=True):
            k, k_sizes = _described(each.k, each.exact[0])
            v, v_sizes = _described(each.v, each.exact[1])
            _attend[(n * h_kv, own)](
                q, each.counts, each.counts if each.picks is None else each.picks, parts, lse, scaling, size[2], own, base,
                0 if each.picks is None else each.picks.shape[2], *k, *v, HEADS=h_kv, G=g, D=d, DIMS=dims,
                ROWS=max(_ROWS, power_of_2(g)), TILE=tile, PICKED=each.picks is not None, WIDE=wide,
                HALF=q.dtype == torch.float16, **{f"K_{x}": y for x, y in k_sizes.items()},
                **{f"V_{x}": y for x, y in v_sizes.items()}, num_warps=4, num_stages=2,
            )  # fmt: skip
            base += own
        _join[(n * h,)](parts, lse, out, joined, size[2], G=g, D=d, DIMS=power_of_2(d), SPLITS=power_of_2(size[2]))
    return out, joined
