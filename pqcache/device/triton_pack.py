"""The oldest exact token of a list becomes codes, as `store.codec.TokenCodec` makes them; the reference is `store.quantizer`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import triton
import triton.language as tl

from pqcache.device.switch import power_of_2, prepared
from pqcache.device.triton_packed import TokenList
from pqcache.store.layout import Codes


@triton.jit
def _pack_oldest(
    exact, codes, step, low, counts, ring, residual, code_row, code_head, code_line, step_row, step_head, step_line,
    HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    GROUPS: tl.constexpr, WORD: tl.constexpr, SIZE: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Program = (row, KV head): if more than `residual` tokens are exact, the oldest of them is coded, as by `quantizer`.

    GROUPS of a token have a step and a low each. WORD codes make SIZE bytes. COLUMN of the counts: 1 for K, 2 for V.
    """
    task = tl.program_id(0).to(tl.int64)
    head, row = task % HEADS, task // HEADS
    own = counts + task * 5
    token = tl.load(own + COLUMN)
    if tl.load(own) - token > residual:
        width: tl.constexpr = D // GROUPS if GROUPS > 1 else DIMS
        top: tl.constexpr = (1 << BITS) - 1
        inside = tl.arange(0, DIMS)
        line = exact + (task * ring + (token + tl.load(own + 2 + COLUMN)) % ring) * D
        x = tl.reshape(tl.load(line + inside, mask=inside < D, other=0.0).to(tl.float32), [DIMS // width, width])
        real = tl.reshape(inside < D, [DIMS // width, width])
        group = tl.arange(0, DIMS // width)
        small = tl.where(group < GROUPS, tl.min(tl.where(real, x, float("inf")), 1), 0.0)
        large = tl.where(group < GROUPS, tl.max(tl.where(real, x, float("-inf")), 1), 0.0)
        small = tl.minimum(tl.maximum(small, -65504.0), 65504.0)
        large = tl.minimum(tl.maximum(large, -65504.0), 65504.0)
        size = tl.div_rn(large - small, tl.zeros_like(small) + top)
        size, small = tl.minimum(size, 65504.0).to(tl.float16), small.to(tl.float16)
        at = row * step_row + head * step_head + token.to(tl.int64) * step_line + group
        tl.store(step + at, size, mask=group < GROUPS)
        tl.store(low + at, small, mask=group < GROUPS)
        size = size.to(tl.float32)[:, None] + tl.zeros_like(x)
        code = tl.div_rn(x - small.to(tl.float32)[:, None], tl.where(size == 0.0, 1.0, size))
        code = tl.minimum(tl.maximum(code, 0.0), top)
        code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, halves to even
        code = tl.where(real & (size != 0.0), code, 0.0).to(tl.int64)
        code = tl.reshape(code, [DIMS // WORD, WORD]) << (tl.arange(0, WORD) * BITS).to(tl.int64)[None]
        word = tl.sum(code, 1)
        at = tl.arange(0, DIMS // WORD) * SIZE
        to = codes + row * code_row + head * code_head + token.to(tl.int64) * code_line
        for j in tl.static_range(SIZE):
            tl.store(to + at + j, ((word >> (8 * j)) & 255).to(tl.uint8), mask=at + j < BYTES)
        tl.store(own + COLUMN, token + 1)


def can_pack(codes: Codes) -> bool:
    """Whether a kernel makes such codes: each token by itself, groups of 2^i channels or one of all, whole words."""
    step = codes.token_step
    if step is None or codes.channel_step is not None or codes.outliers is not None or codes.low_rank is not None:
        return False
    group = codes.d // step.shape[3]
    return codes.d % 8 == 0 and (step.shape[3] == 1 or (group >= 8 and group == power_of_2(group)))


def prepare_pack(target: TokenList, of_values: bool, residual: int) -> Callable[[], None]:
    """A launch by which rows with more than `residual` exact tokens of a stream code the oldest of them, in place."""
    codes, exact = target.v if of_values else target.k, target.exact[of_values]
    assert codes is not None and codes.token_step is not None
    n, h_kv, _, d = exact.shape
    word, size = (8 // codes.bits, 1) if 8 % codes.bits == 0 else (8, codes.bits)
    run = prepared(
        _pack_oldest, (n * h_kv,), HEADS=h_kv, D=d, DIMS=max(16, power_of_2(d)), BITS=codes.bits, BYTES=codes.codes.shape[3],
        GROUPS=codes.token_step.shape[3], WORD=word, SIZE=size, COLUMN=2 if of_values else 1, num_warps=1,
    )  # fmt: skip
    tensors = exact, codes.codes, codes.token_step, codes.token_low, target.counts
    strides = [x.stride(i) for x in (codes.codes, codes.token_step) for i in range(3)]
    return partial(run, *tensors, exact.shape[2], residual, *strides)
