"""Attention of one query token straight over packed codes (store/layout.py): tokens are never decoded.

Steps and lows fold away. For keys, a channel's step multiplies the query and its low adds q . low, once per segment of tokens; a
token's step and low act on the finished product. For values, a token's step multiplies its probability and its low adds one sum
per query head; a channel's are applied to the result. Only where a token has several groups of channels do steps and lows meet
the codes. Outliers add what they differ by from the codes in their places; a low-rank part has a product of its own.

The softmax is that of a running maximum, tile by tile. Its plain-torch equal is attention over `layout.decoded`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.packed.keys import (
    first_outliers,
    read_query,
    score_codes,
    score_low_rank,
    score_outliers,
    see_block,
)
from pqcache.kernels.packed.memory import STREAM, TILE, Scratch, Sums, laid_out, scratch_sizes, sums_sizes
from pqcache.kernels.packed.registers import LANES
from pqcache.kernels.packed.tiles import HEADS, TOGETHER
from pqcache.kernels.packed.values import add_codes, add_factors, end_block, softmax

if TYPE_CHECKING:
    from pqcache.store.layout import Codes, Run


@numba.njit(nogil=True)
def _end_of_tile(k, v, start, end):
    """A tile ends with its blocks."""
    end = min(end, start + TILE)
    if k.length:
        end = min(end, (start // k.length + 1) * k.length)
    if v.length:
        end = min(end, (start // v.length + 1) * v.length)
    return end


@numba.njit(nogil=True)
def _attend_part(q, d, k, v, row, head, start, end, sums, scratch):
    """Tokens start .. end-1 of a KV head, for a block of its query heads, q (HEADS, d)."""
    read_query(k, q, d, scratch)
    segment, k_block, v_block = np.int64(-1), np.int64(-1), np.int64(-1)
    while start < end:
        stop = _end_of_tile(k, v, start, end)
        count = stop - start
        segment = score_codes(k, row, head, start, count, d, segment, scratch)
        if k.length and start // k.length != k_block:
            k_block = start // k.length
            if k.outliers:
                first_outliers(k, row, head, start, d, scratch)
            if k.rank:
                see_block(k, row, head, start, d, scratch)
        if k.outliers:
            score_outliers(k, row, head, start, count, d, scratch)
        if k.rank:
            score_low_rank(k, row, head, start, count, scratch)
        softmax(v, count, d, sums, scratch)
        if v.rank:
            if start // v.length != v_block and v_block >= 0:
                end_block(v, row, head, v_block, d, sums, scratch)
            v_block = start // v.length
            add_factors(v, row, head, start, count, sums, scratch)
        add_codes(v, row, head, start, count, d, sums, scratch)
        start = stop
    if v.rank and v_block >= 0:
        end_block(v, row, head, v_block, d, sums, scratch)


def _compiled(sources: int) -> Callable[..., None]:
    """The kernel. numba keeps it on disk and compiles it again when this file changes; `sources` stands for the others."""

    @numba.njit(nogil=True, cache=True)
    def attend(first, last, q, k, v, counts, blocks, parts, memory_sizes, out_sizes, out):
        """Task = (row, KV head, block of query heads, part), counts (n, h_kv) tokens; q (tasks / parts, HEADS, d), scaled.

        Writes Sums, of out_sizes, to each line of out (tasks, floats).
        """
        assert sources >= 0  # numba looks at the variables that a function uses
        d = q.shape[2]
        memory = np.zeros(16 + (memory_sizes.sum() + 16 * memory_sizes.shape[0]), np.float32)
        s = laid_out((memory.ctypes.data + 63) // 64 * 64, memory_sizes)
        scratch = Scratch(
            s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13], s[14], s[15]
        )
        for task in range(first, last):
            part, mine = task % parts, task // parts
            head = mine // blocks % counts.shape[1]
            row = mine // blocks // counts.shape[1]
            tiles = -(-counts[row, head] // TILE)
            start, end = tiles * part // parts * TILE, min(tiles * (part + 1) // parts * TILE, counts[row, head])
            at = laid_out(out.ctypes.data + task * out.strides[0], out_sizes)
            sums = Sums(at[0], at[1], at[2], at[3], at[4], at[5], at[6])
            _attend_part(q.ctypes.data + mine * q.strides[0], d, k, v, row, head, start, end, sums, scratch)

    return attend


_attend = _compiled(zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))))


def _read_as(codes: Codes) -> tuple[int, int, int]:
    """Planes of codes that are read in place, 0 if they are not; the bytes of a token, padded; and bits per code."""
    width, unit = codes.codes.shape[3], LANES * TOGETHER
    groups = 1 if codes.token_step is None else codes.token_step.shape[3]
    planes = 8 // codes.bits if codes.bits in (2, 4, 8) else 0
    if planes and width % unit == 0 and width * planes == codes.d and width % groups == 0:
        return planes, width, codes.bits
    return 0, -(-codes.d // unit) * unit, 8


def _pair(step: torch.Tensor | None, low: torch.Tensor | None) -> tuple[int, ...]:
    """Addresses, and strides in bytes of the first three dimensions; zeros if there is none."""
    if step is None:
        return (0,) * 5
    size = step.element_size()
    return (
        step.data_ptr(), 0 if low is None else low.data_ptr(),
        step.stride(0) * size, step.stride(1) * size, step.stride(2) * size,
    )  # fmt: skip


def _stream(codes: Codes) -> Any:
    """The description as numbers. The tensors must outlive it."""
    outliers, low_rank = codes.outliers, codes.low_rank
    sparse: tuple[int, ...] = (0,) * 8
    factors: tuple[int, ...] = (0,) * 9
    length = 0
    if outliers is not None:
        values, positions = outliers.values, outliers.positions
        by_channel, length = int(outliers.length > 0), outliers.length
        strides = [values.stride(i) for i in range(4)] if by_channel else [values.stride(0), 0, 0, values.stride(2)]
        sparse = (
            values.shape[3], values.data_ptr(), positions.data_ptr(), positions.element_size(), *strides,
        )  # fmt: skip
    if low_rank is not None:
        a, b = _pair(low_rank.a, None), _pair(low_rank.b, None)
        factors, length = (low_rank.a.shape[3], a[0], *a[2:], b[0], *b[2:]), low_rank.length
    groups = 0 if codes.token_step is None else codes.token_step.shape[3]
    numbers = (
        codes.bits, *_read_as(codes), codes.codes.data_ptr(), *codes.codes.stride()[:3],
        groups, *_pair(codes.token_step, codes.token_low),
        codes.span if codes.channel_step is not None else codes.codes.shape[2] + 1, *_pair(codes.channel_step, codes.channel_low),
        *sparse, *factors, length,
    )  # fmt: skip
    return np.array([numbers], STREAM)[0]


def _regular(codes: Codes, keys: bool) -> bool:
    """Whether the kernel reads this layout."""
    dense = [codes.codes]
    for step, low in ((codes.token_step, codes.token_low), (codes.channel_step, codes.channel_low)):
        dense += [x for x in (step, low) if x is not None]
        if step is not None and low is not None and step.stride() != low.stride():
            return False
    if codes.outliers is not None:
        values, positions = codes.outliers.values, codes.outliers.positions
        by_channel = codes.outliers.length > 0
        if by_channel != keys or values.dtype != torch.float32 or values.stride() != positions.stride():
            return False
        if (keys and codes.channel_low is None) or (not keys and codes.token_step is None):
            return False
        dense += [values]
    if codes.low_rank is not None:
        dense += [codes.low_rank.a, codes.low_rank.b]
        if codes.outliers is not None and codes.outliers.length not in (0, codes.low_rank.length):
            return False
    if not keys and codes.channel_step is not None and (codes.channel_step.shape[2] > 1 or codes.outliers is not None):
        return False
    groups = 1 if codes.token_step is None else codes.token_step.shape[3]
    return codes.d % 8 == 0 and codes.d % groups == 0 and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in dense)


def serves(q: torch.Tensor, run: Run) -> bool:
    """Whether `attend_codes` reads this run: fp32 queries, layouts of the usual kind."""
    return q.dtype == torch.float32 and _regular(run.k, True) and _regular(run.v, False)


def attend_codes(q: torch.Tensor, run: Run, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token per row, q (n, h, 1, d) fp32, over a run of packed tokens, where `serves` says so.

    Returns the normalised output (n, h, 1, d) and the log-sum-exp (n, h, 1); 0 and -inf where a head has no token.
    """
    n, h, _, d = q.shape
    h_kv = run.k.codes.shape[1]
    group = h // h_kv
    blocks = -(-group // HEADS)
    k, v = _stream(run.k), _stream(run.v)
    counts = np.asarray(run.counts, np.int64)
    workers = torch.get_num_threads()
    tasks = n * h_kv * blocks
    parts = max(1, min(-(-2 * workers // tasks), -(-int(counts.max()) // TILE), 8)) if workers > 1 else 1
    queries = np.zeros((n, h_kv, blocks * HEADS, d), np.float32)
    queries[:, :, :group] = (q * scaling).reshape(n, h_kv, group, d).numpy()
    sums = sums_sizes(v, d)
    ends = list(
        itertools.accumulate([0, *(-(-int(size) // 16) * 16 for size in sums)])
    )  # each array begins a cache line
    out = np.zeros((tasks * parts, ends[-1]), np.float32)
    out[:, ends[5] : ends[5] + HEADS] = -np.inf
    threads.run(
        _attend, tasks * parts, queries.reshape(tasks, HEADS, d), k, v, counts, blocks, parts, scratch_sizes(k, v, d), sums, out
    )  # fmt: skip
    lines = torch.from_numpy(out).view(n, h_kv, blocks, parts, -1)
    arrays = [lines[..., start : start + int(size)] for start, size in zip(ends, sums, strict=False)]
    result, lse = _joined(arrays, run.v, max(1, int(v["planes"])), group)
    return result.reshape(n, h, 1, d), lse.reshape(n, h, 1)


def _joined(arrays: list[torch.Tensor], v: Codes, planes: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From the arrays of Sums, (n, h_kv, blocks, parts, floats): output (n, h_kv, group, d), log-sum-exp (n, h_kv, group)."""
    codes, dense, sparse, lows, _, high, mass = arrays
    top = high.amax(3, keepdim=True)
    share = torch.exp(high - torch.where(top.isinf(), 0, top))

    def add_parts(x: torch.Tensor) -> torch.Tensor:
        """(n, h_kv, blocks, parts, HEADS, ...) -> (n, h_kv, group, ...)."""
        return (x * share[..., None]).sum(3).flatten(2, 3)[:, :, :group]

    in_planes = add_parts(codes.unflatten(-1, (HEADS, -1))).unflatten(-1, (planes, -1))
    result = in_planes.transpose(-1, -2).flatten(-2)[..., : v.d] + add_parts(lows[..., None])
    if v.low_rank is not None:
        result = result + add_parts(dense.unflatten(-1, (HEADS, -1)))
    if v.outliers is not None:
        result = result + add_parts(sparse.unflatten(-1, (-1, HEADS)).transpose(-1, -2))
    total = add_parts(mass[..., None])
    result = result / torch.where(total == 0, 1, total)
    if v.channel_step is not None:
        result = result * v.channel_step.float()
        if v.channel_low is not None:
            result = result + v.channel_low.float() * (total != 0)
    return result, top.squeeze(3).flatten(2, 3)[:, :, :group] + total[..., 0].log()
