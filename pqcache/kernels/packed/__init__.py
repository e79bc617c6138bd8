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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
from pqcache.kernels.packed.registers import LANES, floats_at
from pqcache.kernels.packed.tiles import HEADS, READ, TOGETHER
from pqcache.kernels.packed.values import add_codes, add_factors, end_block, result, softmax

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
def _attend_part(q, k, v, row, head, start, end, sums, scratch):
    """Tokens start .. end-1 of a KV head, for a block of its query heads, q (HEADS, d)."""
    read_query(k, q, scratch)
    segment, k_block, v_block = np.int64(-1), np.int64(-1), np.int64(-1)
    while start < end:
        stop = _end_of_tile(k, v, start, end)
        count = stop - start
        segment = score_codes(k, row, head, start, count, segment, scratch)
        if k.length and start // k.length != k_block:
            k_block = start // k.length
            if k.outliers:
                first_outliers(k, row, head, start, scratch)
            if k.rank:
                see_block(k, row, head, start, scratch)
        if k.outliers:
            score_outliers(k, row, head, start, count, scratch)
        if k.rank:
            score_low_rank(k, row, head, start, count, scratch)
        softmax(v, count, sums, scratch)
        if v.rank:
            if start // v.length != v_block and v_block >= 0:
                end_block(v, row, head, v_block, sums, scratch)
            v_block = start // v.length
            add_factors(v, row, head, start, count, sums, scratch)
        add_codes(v, row, head, start, count, sums, scratch)
        start = stop
    if v.rank and v_block >= 0:
        end_block(v, row, head, v_block, sums, scratch)


def _compiled(sources: int) -> Callable[..., None]:
    """The kernel. numba keeps it on disk and compiles it again when this file changes; `sources` stands for the others."""

    @numba.njit(nogil=True, cache=True)
    def attend(first, last, q, k, v, tasks, memory_sizes, sum_sizes, out, high, mass):
        """tasks (t, 6): run, row, KV head, line of q, first and last token. q (lines, HEADS, d), scaled; k, v (runs,) of STREAM.

        Writes of each task the weighted values, out (t, HEADS, d), the largest logit and the sum of weights, (t, HEADS).
        """
        assert sources >= 0  # numba looks at the variables that a function uses
        sizes = np.concatenate((memory_sizes, sum_sizes))
        memory = np.zeros(16 + sizes.sum() + 16 * sizes.shape[0], np.float32)
        s = laid_out((memory.ctypes.data + 63) // 64 * 64, sizes)
        scratch = Scratch(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13])
        sums = Sums(s[14], s[15], s[16], s[17], s[18], s[19], s[20])
        added = floats_at(sums.codes, ((s[21] - s[14]) // 4,))
        lines = floats_at(sums.high, (HEADS,)), floats_at(sums.mass, (HEADS,))
        for task in range(first, last):
            run, row, head, line, start, end = tasks[task]
            added[:] = 0
            lines[0][:] = -np.inf
            _attend_part(q.ctypes.data + line * q.strides[0], k[run], v[run], row, head, start, end, sums, scratch)
            result(v[run], row, head, sums, scratch, out[task])
            high[task], mass[task] = lines

    return attend


_attend = _compiled(zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))))


@numba.njit(nogil=True, cache=True)
def _merge(lines, parts, high, mass, out, lse):
    """Join the tasks of each line of queries: parts (t, HEADS, d), high and mass (t, HEADS) -> out (lines, HEADS, d), lse."""
    lse[:] = -np.inf
    for task in range(lines.shape[0]):
        lse[lines[task]] = np.maximum(lse[lines[task]], high[task])
    total = np.zeros_like(lse)
    for task in range(lines.shape[0]):
        line = lines[task]
        for a in range(lse.shape[1]):
            top = lse[line, a]
            share = np.exp(high[task, a] - (np.float32(0) if np.isinf(top) else top))
            total[line, a] += share * mass[task, a]
            for j in range(out.shape[2]):
                out[line, a, j] += share * parts[task, a, j]
    for line in range(lse.shape[0]):
        for a in range(lse.shape[1]):
            if total[line, a] != 0:
                out[line, a] /= total[line, a]
            lse[line, a] += np.log(total[line, a])


def _read_as(codes: Codes) -> tuple[int, int, int, int]:
    """Bits of a code as the tiles read it, whether it is spread for that, channels of a token then, and groups of it."""
    unit, groups = LANES * TOGETHER, 1 if codes.token_step is None else codes.token_step.shape[3]
    width = -(-codes.d // unit) * unit
    if groups > 1 and codes.d // groups % unit:  # tiles cannot apply these steps
        return 32, 1, width, 1
    if codes.bits in READ and width == codes.d:
        return codes.bits, 0, width, groups
    return (32 if codes.bits == 32 else 8), 1, width, groups


def _pair(step: torch.Tensor | None, low: torch.Tensor | None) -> tuple[int, ...]:
    """Addresses, and strides in bytes of the first three dimensions; zeros if there is none."""
    if step is None:
        return (0,) * 5
    size = step.element_size()
    return (
        step.data_ptr(), 0 if low is None else low.data_ptr(),
        step.stride(0) * size, step.stride(1) * size, step.stride(2) * size,
    )  # fmt: skip


def _stream(codes: Codes) -> tuple[int, ...]:
    """The description as the numbers of STREAM. The tensors must outlive it."""
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
    read, spread, width, tile_groups = _read_as(codes)
    strides = [stride * codes.codes.element_size() for stride in codes.codes.stride()[:3]]
    groups = 0 if codes.token_step is None else codes.token_step.shape[3]
    return (
        codes.bits, codes.d, read, spread, width, codes.codes.data_ptr(), *strides,
        groups, tile_groups, *_pair(codes.token_step, codes.token_low),
        codes.span if codes.channel_step is not None else codes.codes.shape[2] + 1, codes.offset,
        *_pair(codes.channel_step, codes.channel_low), *sparse, *factors, length,
    )  # fmt: skip


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


def _tasks(runs: Sequence[Run], n: int, h_kv: int, blocks: int) -> np.ndarray:
    """The kernel's tasks, a line's after another's, so that equal shares of them are equal work.

    A run is cut into parts where there would be fewer tasks than pieces of work for all threads.
    """
    workers, lines = torch.get_num_threads(), n * h_kv * blocks
    parts = max(1, min(-(-2 * workers // lines), 8)) if workers > 1 else 1
    tasks = []
    for line in range(lines):
        row, head = line // (h_kv * blocks), line // blocks % h_kv
        for number, run in enumerate(runs):
            count = int(run.counts[row][head])
            tiles = -(-count // TILE)
            edges = [min(tiles * part // parts * TILE, count) for part in range(parts + 1)]
            tasks += [(number, row, head, line, a, b) for a, b in itertools.pairwise(edges) if a < b]
    return np.array(tasks, np.int64).reshape(-1, 6)


def attend_codes(q: torch.Tensor, runs: Sequence[Run], scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token per row, q (n, h, 1, d) fp32, over runs of packed tokens, where `serves` says so of each.

    Returns the normalised output (n, h, 1, d) and the log-sum-exp (n, h, 1); 0 and -inf where a head has no token.
    """
    n, h, _, d = q.shape
    h_kv = runs[0].k.codes.shape[1]
    group = h // h_kv
    blocks = -(-group // HEADS)
    k, v = (
        np.array([_stream(codes) for codes in of_all], STREAM)
        for of_all in zip(*((r.k, r.v) for r in runs), strict=True)
    )
    tasks = _tasks(runs, n, h_kv, blocks)
    queries = np.zeros((n, h_kv, blocks * HEADS, d), np.float32)
    queries[:, :, :group] = (q * scaling).reshape(n, h_kv, group, d).numpy()
    queries = queries.reshape(-1, HEADS, d)
    parts = np.empty((len(tasks), HEADS, d), np.float32)
    high, mass = np.empty((2, len(tasks), HEADS), np.float32)
    threads.run(_attend, len(tasks), queries, k, v, tasks, scratch_sizes(k, v, d), sums_sizes(v, d), parts, high, mass)
    out, lse = np.zeros_like(queries), np.empty(queries.shape[:2], np.float32)
    _merge(tasks[:, 3], parts, high, mass, out, lse)
    result = torch.from_numpy(out).view(n, h_kv, -1, d)[:, :, :group].reshape(n, h, 1, d)
    return result, torch.from_numpy(lse).view(n, h_kv, -1)[:, :, :group].reshape(n, h, 1)
