"""Attention of one query token straight over packed codes (store/layout.py): tokens are never decoded.

Steps and lows fold away. For keys, a channel's step multiplies the query and its low adds q . low, once per segment of tokens; a
token's step and low act on the finished product. For values, a token's step multiplies its probability and its low adds one sum
per query head; a channel's are applied to the result. Where a token has several groups of channels, their steps scale the
codes as they are read. Outliers add what they differ by from the codes in their places; a low-rank part has a product of its own.

The softmax is that of a running maximum, tile by tile. Its plain-torch equal is attention over decoded tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch

from pqcache.kernels import launch
from pqcache.kernels.launch import kernel, run
from pqcache.kernels.loops import compiled
from pqcache.kernels.numeric import PERMUTES, floats, lanes_of, part
from pqcache.kernels.packed.keys import (
    first_outliers,
    read_outliers,
    read_query,
    score_codes,
    score_low_rank,
    score_outliers,
    see_block,
)
from pqcache.kernels.packed.memory import ADDED, HIGH, LOGITS, MASS, STREAM, WINDOW, laid_out, sizes_of
from pqcache.kernels.packed.tiles import LINE, MOST_HEADS, READ, TILE, products, weighted
from pqcache.kernels.packed.values import add_codes, add_factors, add_outliers, end_block, result, softmax

if TYPE_CHECKING:
    from pqcache.store.layout import Codes, Run

CODES_PER_NS = 4  # of keys, and as many of values, for four query heads
_PIECES = 8  # of work per thread, at least: a part's scratch costs more than that of attention over plain rows


@part
def _end_of_tile(k, v, start, end):
    """A tile ends with its blocks."""
    end = min(end, start + TILE)
    if k.length:
        end = min(end, (start // k.length + 1) * k.length)
    if v.length:
        end = min(end, (start // v.length + 1) * v.length)
    return end


@part(inline="always")
def _attend_tile(k, v, row, head, start, stop, window, segment, heads, mem):
    """Tokens start .. stop-1 of one KV head; returns the segment of keys that is folded from now on."""
    count = stop - start
    segment = score_codes(k, v, row, head, start, count, segment, heads, mem)
    if k.outliers:
        score_outliers(start - window, count, heads, mem)
    if k.rank:
        score_low_rank(k, row, head, start, count, heads, mem)
    softmax(v, count, heads, mem)
    if v.rank:
        add_factors(v, row, head, start, count, heads, mem)
    add_codes(v, row, head, start, count, heads, mem)
    return segment


@part
def _attend_part(k, v, row, head, start, end, heads, memory):
    """Tokens start .. end-1 of as many KV heads as `memory` has lines, whose queries `read_query` has read."""
    kv_heads = memory.shape[0]
    segments = np.full(kv_heads, -1, np.int64)
    k_block, v_block, window, ahead = np.int64(-1), np.int64(-1), start, start
    while start < end:
        stop = _end_of_tile(k, v, start, end)
        new_keys, new_values = k.length and start // k.length != k_block, v.rank and start // v.length != v_block
        refill = k.outliers and (new_keys or start == ahead)
        if refill:
            window, ahead = start, min(end, start + WINDOW, (start // k.length + 1) * k.length)
        for h in range(kv_heads):
            mem = memory[h]
            if new_keys and k.outliers:
                first_outliers(k, row, head + h, start, mem)
            if new_keys and k.rank:
                see_block(k, row, head + h, start, mem)
            if refill:
                read_outliers(k, row, head + h, window, ahead - window, mem)
            if new_values and v_block >= 0:
                end_block(v, row, head + h, v_block, heads, mem)
            segments[h] = _attend_tile(k, v, row, head + h, start, stop, window, segments[h], heads, mem)
        if v.outliers:
            add_outliers(v, row, start, stop - start, memory)
        if new_keys:
            k_block = start // k.length
        if new_values:
            v_block = start // v.length
        start = stop
    if v_block >= 0:
        for h in range(kv_heads):
            end_block(v, row, head + h, v_block, heads, memory[h])


@kernel
def _attend(first, last, q, k, v, tasks, sizes, heads, out, high, mass):
    """tasks (t, 9): run, row, KV head, how many of them, line of q, lines to the next head, place, first and last token.

    q (lines, heads, d), scaled; k, v (runs,) of STREAM; sizes: floats of each array, see memory.py. Writes for each
    task and head, from its place on, the weighted values, out (places, heads, d), the largest logit and the sum of weights.
    """
    most = 0
    for task in range(first, last):
        most = max(most, tasks[task, 3])
    space = np.zeros(16 + (sizes.sum() + 16 * sizes.shape[0]) * most, np.float32)
    memory = laid_out((space.ctypes.data + 63) // 64 * 64, sizes, most)
    for task in range(first, last):
        number, row, head, kv_heads, line, apart, place, start, end = tasks[task]
        for h in range(kv_heads):
            mem = memory[h]
            for i in range(ADDED, sizes.shape[0]):
                floats(mem[i], sizes[i])[:] = 0
            floats(mem[HIGH], heads)[:] = -np.inf
            read_query(k[number], q[line + h * apart], heads, mem)
        _attend_part(k[number], v[number], row, head, start, end, heads, memory[:kv_heads])
        for h in range(kv_heads):
            result(v[number], row, head + h, heads, memory[h], out[place + h])
            largest, sums = floats(memory[h, HIGH], heads), floats(memory[h, MASS], heads)
            # not by assigning arrays: numba would compile the text of its errors with it, for 3 seconds
            for a in range(heads):
                high[place + h, a], mass[place + h, a] = largest[a], sums[a]
    space[0] = 0  # numba frees an array behind its last use, and addresses are none


@numba.njit(nogil=True, cache=True)
def _merge(lines, parts, high, mass, out, lse):
    """Join the tasks of each line of queries: parts (t, heads, d), high and mass (t, heads) -> out (lines, heads, d), lse."""
    lse[:] = -np.inf
    for task in range(lines.shape[0]):
        for a in range(lse.shape[1]):
            lse[lines[task], a] = max(lse[lines[task], a], high[task, a])
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
                for j in range(out.shape[2]):
                    out[line, a, j] /= total[line, a]
            lse[line, a] += np.log(total[line, a])


def _read_as(codes: Codes) -> int:
    """Bits of a code as the tiles read it: in place, where steps and lows act on whole bytes, else decoded."""
    groups = 1 if codes.token_step is None else codes.token_step.shape[3]
    lanes, each = lanes_of(codes.d), codes.d // groups
    whole = codes.bits in READ and (each % lanes == 0 or lanes % each == 0)
    if codes.table is not None:
        whole = PERMUTES and codes.bits in (2, 4) and groups == 1
    return codes.bits if whole else 32


def _pair(step: torch.Tensor | None, low: torch.Tensor | None) -> tuple[int, ...]:
    """Addresses, and strides in bytes of the first three dimensions; zeros if there is none."""
    if step is None:
        return (0,) * 5
    size = step.element_size()
    return (
        step.data_ptr(), 0 if low is None else low.data_ptr(),
        step.stride(0) * size, step.stride(1) * size, step.stride(2) * size,
    )  # fmt: skip


def _stream(codes: Codes, loop: Callable[..., Callable[..., None]], heads: int) -> tuple[int, ...]:
    """The description as the numbers of STREAM. The tensors must outlive it. loop, heads: see tiles.py."""
    outliers, low_rank = codes.outliers, codes.low_rank
    sparse: tuple[int, ...] = (0,) * 9
    factors: tuple[int, ...] = (0,) * 9
    length = 0
    if outliers is not None:
        values, positions = outliers.values, outliers.positions
        by_channel, length = int(outliers.length > 0), outliers.length
        strides = [values.stride(i) for i in range(4)] if by_channel else [values.stride(0), 0, 0, values.stride(2)]
        sparse = (
            values.shape[3], int(outliers.alike), values.data_ptr(), positions.data_ptr(), positions.element_size(), *strides,
        )  # fmt: skip
    if low_rank is not None:
        a, b = _pair(low_rank.a, None), _pair(low_rank.b, None)
        factors, length = (low_rank.a.shape[3], a[0], *a[2:], b[0], *b[2:]), low_rank.length
    strides = [stride * codes.codes.element_size() for stride in codes.codes.stride()[:3]]
    groups = 0 if codes.token_step is None else codes.token_step.shape[3]
    read = _read_as(codes)
    listed = int(codes.table is not None and read == codes.bits)
    tile = compiled(loop, read, codes.d, groups if groups > 1 and read == codes.bits else 0, heads, listed)
    return (
        codes.bits, codes.d, read, tile.address, 0 if codes.table is None else codes.table.data_ptr(),
        codes.codes.data_ptr(), *strides,
        groups, *_pair(codes.token_step, codes.token_low),
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
    if codes.table is not None and codes.outliers is not None:
        return False
    groups = 1 if codes.token_step is None else codes.token_step.shape[3]
    return codes.d % 8 == 0 and codes.d % groups == 0 and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in dense)


def reads(q: torch.Tensor, codes: Codes) -> bool:
    """Whether `scores` serves this query and codes."""
    return q.dtype == torch.float32 and codes.outliers is None and codes.low_rank is None and _regular(codes, True)


def serves(q: torch.Tensor, run: Run) -> bool:
    """Whether `attend_codes` reads this run: fp32 queries, K and V of one head dimension, layouts of the usual kind."""
    if run.v.outliers is not None and any(len(set(counts)) > 1 for counts in run.counts):
        return False
    usual = q.dtype == torch.float32 and run.k.d == run.v.d
    return usual and _regular(run.k, True) and _regular(run.v, False)


def _tasks(runs: Sequence[Run], n: int, h_kv: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's tasks (t, 9), and the line of queries that each place in its output belongs to.

    A line's tasks follow another's, so that equal shares of them are equal work. A run is cut into parts where there would be
    fewer tasks than pieces of work for all threads. Where outliers belong to all KV heads, a task has all heads.
    """
    workers = launch.team()
    tasks: list[tuple[int, ...]] = []
    places: list[int] = []
    for number, each in enumerate(runs):
        heads = h_kv if each.v.outliers is not None else 1
        parts = max(1, min(-(-_PIECES * workers * heads // (n * h_kv * blocks)), 8 * workers)) if workers > 1 else 1
        for row, head, block in itertools.product(range(n), range(0, h_kv, heads), range(blocks)):
            line = (row * h_kv + head) * blocks + block
            count = int(each.counts[row][head])
            edges = [min(-(-count // TILE) * part // parts * TILE, count) for part in range(parts + 1)]
            for start, end in itertools.pairwise(edges):
                if start < end:
                    tasks.append((line, number, row, head, heads, line, blocks, len(places), start, end))
                    places += range(line, line + heads * blocks, blocks)
    ordered = np.array(sorted(tasks), np.int64).reshape(-1, 10)
    # contiguous for any number of tasks: numba would compile the kernel again for another layout
    return np.ascontiguousarray(ordered[:, 1:]), np.array(places, np.int64)


def _blocks(q: torch.Tensor, h_kv: int, scaling: float) -> np.ndarray:
    """q (n, h, 1, d), scaled, by blocks of query heads: (n, h_kv, blocks, block, d), zeros behind a group's last head."""
    n, h, _, d = q.shape
    group = h // h_kv
    block = min(MOST_HEADS, 1 << (group - 1).bit_length())
    padded = np.zeros((n, h_kv, -(-group // block) * block, d), np.float32)
    padded[:, :, :group] = (q * scaling).reshape(n, h_kv, group, d).numpy()
    return padded.reshape(n, h_kv, -1, block, d)


@kernel
def _score(first, last, q, k, sizes, heads, out):
    """Task = (row, KV head, block); q (n, h_kv, blocks, heads, d), scaled; k (1,) of STREAM; out (n, h_kv, heads, tokens)."""
    space = np.zeros(16 + sizes.sum() + 16 * sizes.shape[0], np.float32)
    mem = laid_out((space.ctypes.data + 63) // 64 * 64, sizes, 1)[0]
    for task in range(first, last):
        block, pair = task % q.shape[2], task // q.shape[2]
        row, head, segment = pair // q.shape[1], pair % q.shape[1], np.int64(-1)
        read_query(k[0], q[row, head, block], heads, mem)
        for start in range(0, out.shape[3], TILE):
            count = min(TILE, out.shape[3] - start)
            segment = score_codes(k[0], k[0], row, head, start, count, segment, heads, mem)
            for a in range(heads):
                to, line = out[row, head, block * heads + a], floats(mem[LOGITS] + 4 * a * LINE, count)
                for i in range(count):
                    to[start + i] = line[i]
    space[0] = 0  # numba frees an array behind its last use, and addresses are none


def scores(q: torch.Tensor, codes: Codes, scaling: float) -> torch.Tensor:
    """Products of q (n, h, 1, d) with what codes stand for, times scaling, where `reads` says so: (n, h, tokens)."""
    n, h, _, d = q.shape
    queries = _blocks(q, codes.codes.shape[1], scaling)
    _, h_kv, blocks, block, _ = queries.shape
    k = np.array([_stream(codes, products, block)], STREAM)
    out = np.empty((n, h_kv, blocks * block, codes.tokens), np.float32)
    cost = n * h_kv * blocks * codes.tokens * d / CODES_PER_NS / 2
    run(_score, n * h_kv * blocks, queries, k, sizes_of(k, k, d, block), block, out, cost=cost)
    return torch.from_numpy(out)[:, :, : h // h_kv].reshape(n, h, -1)


def _aligned(streams: list[Codes]) -> tuple[list[Codes], torch.Tensor | None]:
    """K or V of all runs under the one rotation that some of them have; exact ones are rotated for it."""
    turn = next((codes.rotation for codes in streams if codes.rotation is not None), None)
    if turn is not None:
        streams = [x if x.rotation is not None else replace(x, codes=x.codes @ turn.mT) for x in streams]
    return streams, turn


def attend_codes(q: torch.Tensor, runs: Sequence[Run], scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token per row, q (n, h, 1, d) fp32, over runs of packed tokens, where `serves` says so of each.

    Returns the normalised output (n, h, 1, d) and the log-sum-exp (n, h, 1); 0 and -inf where a head has no token.
    """
    (keys, turn), (values, back) = _aligned([r.k for r in runs]), _aligned([r.v for r in runs])
    queries = _blocks(q if turn is None else q @ turn.mT, keys[0].codes.shape[1], scaling)
    n, h_kv, blocks, block, d = queries.shape
    k = np.array([_stream(codes, products, block) for codes in keys], STREAM)
    v = np.array([_stream(codes, weighted, block) for codes in values], STREAM)
    tasks, places = _tasks(runs, n, h_kv, blocks)
    queries, h = queries.reshape(-1, block, d), q.shape[1]
    parts = np.empty((len(places), block, d), np.float32)
    high, mass = np.empty((2, len(places), block), np.float32)
    numbers = int((tasks[:, 3] * (tasks[:, 8] - tasks[:, 7])).sum()) * d
    run(
        _attend, len(tasks), queries, k, v, tasks, sizes_of(k, v, d, block), block, parts, high, mass,
        cost=numbers / CODES_PER_NS,
    )  # fmt: skip
    out, lse = np.zeros_like(queries), np.empty(queries.shape[:2], np.float32)
    _merge(places, parts, high, mass, out, lse)
    result = torch.from_numpy(out).view(n, h_kv, -1, d)[:, :, : h // h_kv].reshape(n, h, 1, d)
    sums = torch.from_numpy(lse).view(n, h_kv, -1)[:, :, : h // h_kv].reshape(n, h, 1)
    return result if back is None else result @ back, sums
