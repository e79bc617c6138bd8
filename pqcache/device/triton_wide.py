"""The weight of each token, where there are more joint codes than one program holds: see `triton_codes`, step 2.

Softmax sums per block, then weights; the k-th largest weight is found digit by digit from histograms, by the whole device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from pqcache.device.switch import power_of_2, prepared

BLOCK = 4096  # tokens per program


@triton.jit
def _candidates(cursor, plan, n_sink, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Of program (block, row and KV head): the pair's number, row, head, block, its BLOCK tokens, and which are candidates."""
    task = tl.program_id(1).to(tl.int64)
    head, row = task % HEADS, task // HEADS
    tokens = (tl.load(cursor + row) - tl.load(plan + row * 4 + 2) - n_sink).to(tl.int32)
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    return task, row, head, block, token, token < tokens


@triton.jit
def _wide_logits(codes, table, token, mask, code_line, M: tl.constexpr, C: tl.constexpr):
    """Scaled logits of one query head for tokens of its KV head; `table` points at its (M, C) products."""
    total = tl.load(table + tl.load(codes + token, mask=mask, other=0).to(tl.int32), mask=mask, other=float("-inf"))
    for j in tl.static_range(1, M):
        code = tl.load(codes + j * code_line + token, mask=mask, other=0).to(tl.int32)
        total += tl.load(table + j * C + code, mask=mask, other=0.0)
    return total


@triton.jit
def _wide_sums(
    codes, cursor, plan, tables, sums, n_sink, code_row, code_line, blocks,
    HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program = (block, row and KV head): maximum and sum of exponentials per query head, sums (n, HEADS, G, blocks, 2)."""
    task, row, head, block, token, mask = _candidates(cursor, plan, n_sink, HEADS, BLOCK)
    mine = codes + row * code_row + head * M * code_line
    for a in range(G):
        logits = _wide_logits(mine, tables + (task * G + a) * M * C, token, mask, code_line, M, C)
        top = tl.max(logits, 0)
        mass = tl.sum(tl.where(mask, tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)), 0.0), 0)
        to = sums + ((task * G + a) * blocks + block) * 2
        tl.store(to, top)
        tl.store(to + 1, mass)


@triton.jit
def _wide_weigh(
    codes, cursor, plan, tables, sums, bits, n_sink, code_row, code_line, blocks, width,
    HEADS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program = (block, row and KV head): the group's softmax weight of each token, as integers: bits (n, HEADS, width)."""
    task, row, head, _, token, mask = _candidates(cursor, plan, n_sink, HEADS, BLOCK)
    mine = codes + row * code_row + head * M * code_line
    each = tl.arange(0, BLOCKS)
    weights = tl.zeros([BLOCK], tl.float32)
    for a in range(G):
        at = sums + ((task * G + a) * blocks + each) * 2
        tops = tl.load(at, mask=each < blocks, other=float("-inf"))
        masses = tl.load(at + 1, mask=each < blocks, other=0.0)
        top = tl.max(tops, 0)
        total = tl.sum(masses * tl.exp(tops - top), 0)
        logits = _wide_logits(mine, tables + (task * G + a) * M * C, token, mask, code_line, M, C)
        weights += tl.exp(logits - top) / total
    tl.store(bits + task * width + token, weights.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _wide_prefix(counts, left, DIGITS: tl.constexpr):
    """First DIGITS digits of the k-th largest weight, 8 bits each, and how many of the k = `left` tokens share them.

    counts (4, 256): tokens by their next digit, of those that share all digits before it.
    """
    digit = tl.arange(0, 256)
    kth = tl.full([], 0, tl.int32)
    for i in tl.static_range(DIGITS):
        own = tl.load(counts + i * 256 + digit)
        up_to = tl.sum(own, 0) - tl.cumsum(own, 0) + own  # tokens of this digit or a larger one
        level = tl.max(tl.where(up_to >= left, digit, 0), 0)
        left -= tl.sum(tl.where(digit > level, own, 0), 0)
        kth = kth | (level << (24 - 8 * i))
    return kth, left


@triton.jit
def _wide_digits(
    bits, cursor, plan, counts, n_sink, width,
    HEADS: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program = (block, row and KV head): its share of counts[..., DIGIT, :], see `_wide_prefix`; counts (n, HEADS, 4, 256)."""
    task, row, _, _, token, mask = _candidates(cursor, plan, n_sink, HEADS, BLOCK)
    own = tl.load(bits + task * width + token, mask=mask, other=0)
    mine = counts + task * 1024
    if DIGIT > 0:
        kth, left = _wide_prefix(mine, tl.load(plan + row * 4 + 1), DIGIT)
        mask = mask & ((own >> (32 - 8 * DIGIT)) == (kth >> (32 - 8 * DIGIT)))
    amount = tl.histogram((own >> (24 - 8 * DIGIT)) & 255, 256, mask=mask)
    tl.atomic_add(mine + DIGIT * 256 + tl.arange(0, 256), amount, mask=amount > 0, sem="relaxed")


@triton.jit
def _wide_level(counts, plan, level, HEADS: tl.constexpr):
    """Program = (row, KV head): the k-th largest weight, and how many tokens of just that weight belong to the k."""
    task = tl.program_id(0).to(tl.int64)
    kth, left = _wide_prefix(counts + task * 1024, tl.load(plan + task // HEADS * 4 + 1), 4)
    tl.store(level + task * 2, kth)
    tl.store(level + task * 2 + 1, left)


def prepare_wide(
    n: int, h_kv: int, g: int, m: int, c: int, codes: torch.Tensor, cursor: torch.Tensor, plan: torch.Tensor,
    n_sink: int, blocks: int,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:  # fmt: skip
    """The part of `select` before its last two kernels, with more joint codes than `_JOINT`: each token has a weight."""
    grid, width, device = (blocks, n * h_kv), blocks * BLOCK, codes.device
    line = (n_sink, codes.stride(0), codes.stride(1))
    sizes = {"HEADS": h_kv, "M": m, "C": c, "G": g}
    block = {"BLOCK": BLOCK, "num_warps": 8}
    wide_sums = prepared(_wide_sums, grid, **sizes, **block)
    wide_weigh = prepared(_wide_weigh, grid, **sizes, BLOCKS=power_of_2(blocks), **block)
    # digit by digit, each by the whole device: one program per head would be the slowest part of a long step
    wide_digits = [prepared(_wide_digits, grid, HEADS=h_kv, DIGIT=digit, **block) for digit in range(4)]
    wide_level = prepared(_wide_level, (n * h_kv,), HEADS=h_kv, num_warps=4)

    def weigh(tables: torch.Tensor, bits: torch.Tensor, level: torch.Tensor) -> None:
        sums = torch.empty((n, h_kv, g, blocks, 2), dtype=torch.float32, device=device)
        wide_sums(codes, cursor, plan, tables, sums, *line, blocks)
        wide_weigh(codes, cursor, plan, tables, sums, bits, *line, blocks, width)
        digits = torch.zeros((n, h_kv, 4, 256), dtype=torch.int32, device=device)
        for one in wide_digits:
            one(bits, cursor, plan, digits, n_sink, width)
        wide_level(digits, plan, level)

    return weigh
