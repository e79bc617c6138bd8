"""The k best of many scores by partial selection, and scores that exist for one KV head at a time only.

A score's bits, taken as an integer, order as the score does. Two histograms of their digits find the k-th largest score, so that
nothing is sorted: one pass counts the first digit, and only scores with the threshold's first digit are looked at again.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from pqcache.kernels.attend import addresses, block
from pqcache.kernels.launch import BYTES_PER_NS, kernel, run
from pqcache.kernels.loops import call
from pqcache.kernels.numeric import FAST, FP32, LEAST, bits_of, exponentials, largest, part
from pqcache.kernels.rows import loop_at, products

_FIRST = 12  # bits of the first digit: 4096 counters stay in the nearest cache
_REST = 32 - _FIRST
_TILE = 1024  # rows whose addresses exist at a time
_NOTHING = 0x007FFFFF  # of -inf: what NaN ranks as


@part(inline="always")
def _ordered(bits):
    """uint32 that order as the floats do whose bits these are: 0 and -0 are equal, NaN ranks as -inf."""
    size = bits & np.uint32(0x7FFFFFFF)
    if size > np.uint32(0x7F800000):
        return np.uint32(_NOTHING)
    if size == 0:
        return np.uint32(0x80000000)
    return ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)


@part(inline="always")
def _kth(counts, k):
    """The digit of the k-th largest of entries counted by digit, and how many of that digit are selected."""
    digit = counts.shape[0] - 1
    while counts[digit] < k:
        k -= counts[digit]
        digit -= 1
    return digit, k


@part
def _level(keys, k):
    """The k-th largest of keys (uint32), and how many entries of that value are selected."""
    m = keys.shape[0]
    counts = np.zeros((4, 1 << _FIRST), np.int32)  # in turn: equal digits in a row would otherwise wait for each other
    for i in range(m // 4):
        for lane in range(4):
            counts[lane, keys[4 * i + lane] >> np.uint32(_REST)] += 1
    for i in range(m - m % 4, m):
        counts[0, keys[i] >> np.uint32(_REST)] += 1
    first, k = _kth(counts[0] + counts[1] + counts[2] + counts[3], k)
    same = np.empty(m + 1, np.uint32)
    filled = 0
    for i in range(m):
        same[filled] = keys[i]
        filled += (keys[i] >> np.uint32(_REST)) == first
    level = np.uint32(first) << np.uint32(_REST)
    for shift, width in ((8, 12), (0, 8)):
        counts[0, : 1 << width] = 0
        for i in range(filled):
            counts[0, (same[i] >> np.uint32(shift)) & np.uint32((1 << width) - 1)] += 1
        digit, k = _kth(counts[0, : 1 << width], k)
        level |= np.uint32(digit) << np.uint32(shift)
        kept = 0
        for i in range(filled):
            same[kept] = same[i]
            kept += (same[i] >> np.uint32(shift)) == (level >> np.uint32(shift))
        filled = kept
    return level, k


@part
def take(weights, k, lo, out):
    """Write to out the k largest of weights as lo + their index, ascending; ties go to the lower index."""
    keys = np.empty(weights.shape[0], np.uint32)
    for i in range(weights.shape[0]):
        keys[i] = _ordered(np.uint32(bits_of(weights[i])))
    level, ties = _level(keys, k)
    filled, i = 0, 0
    while filled < k:
        chosen = keys[i] > level
        if keys[i] == level:
            chosen = ties > 0
            ties -= 1
        out[filled] = lo + i
        filled += chosen
        i += 1


@kernel
def _top(first, last, weights, k, out):
    """Task = (row, head); weights (n, H, m)."""
    heads = weights.shape[1]
    for task in range(first, last):
        row, head = task // heads, task % heads
        if k[row]:
            take(weights[row, head], k[row], 0, out[row, head])


def top_tokens(weights: torch.Tensor, k: Sequence[int]) -> torch.Tensor:
    """The k[r] largest of weights (n, H, m) fp32 in row r, ties to the lower index: (n, H, max(k)), ascending, -1 = padding.

    NaN ranks as -inf.
    """
    n, heads, _ = weights.shape
    out = np.full((n, heads, max(k)), -1, np.int64)
    run(_top, n * heads, weights.contiguous().numpy(), np.asarray(k, np.int64), out, cost=weights.numel())
    return torch.from_numpy(out)


@part(fastmath=FAST)
def _sum_softmax(logits, g, m, first, weights):
    """Sums over g heads of their softmax over the first m columns of logits, for columns `first` and on: weights (count,)."""
    weights[:] = 0
    for a in range(g):
        line = logits[a, :m]  # of a whole row: of a slice of columns numba would not know that numbers are side by side
        share = np.float32(1) / exponentials(line, largest(line), LEAST, 0)  # subnormal numbers rank, too
        ranked = line[first : first + weights.shape[0]]
        for i in range(weights.shape[0]):
            weights[i] += ranked[i] * share


@part
def _logits(products, query, keys, step, lo, hi, rows, logits):
    """logits (g', > hi - lo) of queries (g', r) with keys, `step` bytes apart, at positions lo .. hi-1; rows: scratch."""
    at_query, at_rows = np.int64(query.ctypes.data), np.int64(rows.ctypes.data)
    for start in range(lo, hi, _TILE):
        count = min(_TILE, hi - start)
        for i in range(count):
            rows[i] = keys + (start + i) * step
        out = np.int64(logits.ctypes.data + 4 * (start - lo))
        call(products, (at_query, query.shape[0], query.shape[1], at_rows, count, out, logits.shape[1]))


@kernel
def _rank(first, last, products, q, keys, step, over, lo, hi, k, g, out):
    """Task = (row, KV head); q (n, h_kv, g', r) scaled, keys (n, h_kv): addresses; over (n, 2): the softmax's span."""
    heads = q.shape[1]
    rows = np.empty(_TILE, np.int64)
    for task in range(first, last):
        row, head = task // heads, task % heads
        if k[row] == 0:
            continue
        start, end = over[row]
        logits = np.empty((q.shape[2], end - start + 1), np.float32)
        weights = np.empty(hi[row] - lo, np.float32)
        _logits(products, q[row, head], keys[row, head], step, start, end, rows, logits)
        _sum_softmax(logits, g, end - start, lo - start, weights)
        take(weights, k[row], lo, out[row, head])


@partial(kernel, fastmath=FAST)
def _rank_lines(first, last, q, lines, places, over, lo, hi, k, out):
    """The same of keys stored component by component: lines (n, L, capacity), those of a head at places (n, h_kv, r)."""
    heads, g, r = q.shape[1], q.shape[2], q.shape[3]
    for task in range(first, last):
        row, head = task // heads, task % heads
        if k[row] == 0:
            continue
        start, end = over[row]
        logits = np.zeros((g, end - start), np.float32)
        weights = np.empty(hi[row] - lo, np.float32)
        for j in range(r):
            line = lines[row, places[row, head, j], start:end]
            for a in range(g):
                factor, mine = q[row, head, a, j], logits[a]
                for i in range(line.shape[0]):
                    mine[i] += factor * line[i]
        _sum_softmax(logits, g, end - start, lo - start, weights)
        take(weights, k[row], lo, out[row, head])


def _spans(
    over: Sequence[tuple[int, int]], hi: Sequence[int], k: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.asarray(over, np.int64), np.asarray(hi, np.int64), np.asarray(k, np.int64)


def best_by_products(
    q: torch.Tensor, keys: torch.Tensor, over: Sequence[tuple[int, int]], lo: int, hi: Sequence[int], k: Sequence[int]
) -> torch.Tensor:
    """Per row and KV head the k[r] positions of lo .. hi[r]-1 with the largest group-summed softmax of q . key.

    q (n, h_kv, g, r) fp32, scaled; keys (n, h_kv, capacity, r) fp32, read once for all query heads of a group; the softmax runs
    over positions over[r][0] .. over[r][1]-1, which include the candidates. Returns (n, h_kv, max(k)) int64, ascending, ties to
    the lower position, -1 = padding.
    """
    n, h_kv, g, r = q.shape
    heads, padded = block(g)
    query = np.zeros((n, h_kv, padded, r), np.float32)
    query[:, :, :g] = q.numpy()
    out = np.full((n, h_kv, max(k)), -1, np.int64)
    spans, ends, counts = _spans(over, hi, k)
    cost = h_kv * sum(end - start for start, end in over) * (2 * g + 4 * r / BYTES_PER_NS)
    at, step = addresses(keys, 0, 1), 4 * keys.stride(2)
    run(_rank, n * h_kv, loop_at(products, FP32, r, heads), query, at, step, spans, lo, ends, counts, g, out, cost=cost)
    return torch.from_numpy(out)


def best_by_lines(
    q: torch.Tensor,
    lines: torch.Tensor,
    places: torch.Tensor,
    over: Sequence[tuple[int, int]],
    lo: int,
    hi: Sequence[int],
    k: Sequence[int],
) -> torch.Tensor:
    """The same of keys stored component by component: lines (n, L, capacity) fp32, each head's at places (n, h_kv, r) int64."""
    n, h_kv = q.shape[:2]
    out = np.full((n, h_kv, max(k)), -1, np.int64)
    spans, ends, counts = _spans(over, hi, k)
    cost = h_kv * sum(end - start for start, end in over) * (2 * q.shape[2] + 4 * q.shape[3] / BYTES_PER_NS)
    run(
        _rank_lines,
        n * h_kv,
        q.contiguous().numpy(),
        lines.numpy(),
        places.numpy(),
        spans,
        lo,
        ends,
        counts,
        out,
        cost=cost,
    )
    return torch.from_numpy(out)


@kernel
def _bounds(first, last, products, positive, negative, low, high, steps, start, out):
    """Task = (row, KV head); positive, negative (n, h_kv, g', d), out (n, h_kv, g', pages + 1).

    low, high (n, h_kv): addresses of pages, which are steps[0] and steps[1] bytes apart.
    """
    heads, pages = out.shape[1], out.shape[3] - 1
    rows, other = np.empty(_TILE, np.int64), np.empty(out.shape[2:], np.float32)
    for task in range(first, last):
        row, head = task // heads, task % heads
        _logits(products, positive[row, head], high[row, head], steps[1], start, start + pages, rows, out[row, head])
        _logits(products, negative[row, head], low[row, head], steps[0], start, start + pages, rows, other)
        for a in range(other.shape[0]):
            total, more = out[row, head, a], other[a]
            for i in range(pages):
                total[i] += more[i]


def page_bounds(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Upper bounds sum_c max(q_c low_c, q_c high_c) of q . key over pages first .. last-1: (n, h, last - first) fp32.

    q (n, h, 1, d); low and high (n, h_kv, capacity, d), the least and largest entries of each page's keys. fp32.
    """
    n, h, _, d = q.shape
    h_kv, pages = low.shape[1], last - first
    g = h // h_kv
    heads, padded = block(g)
    positive, negative = np.zeros((2, n, h_kv, padded, d), np.float32)
    grouped = q.reshape(n, h_kv, g, d).numpy()
    np.maximum(grouped, 0, out=positive[:, :, :g])
    np.minimum(grouped, 0, out=negative[:, :, :g])
    out = np.zeros((n, h_kv, padded, pages + 1), np.float32)
    cost = n * h_kv * pages * 8 * d / BYTES_PER_NS
    pages_at, steps = (addresses(low, 0, 1), addresses(high, 0, 1)), (4 * low.stride(2), 4 * high.stride(2))
    loop = loop_at(products, FP32, d, heads)
    run(_bounds, n * h_kv, loop, positive, negative, *pages_at, steps, first, out, cost=cost)
    return torch.from_numpy(out)[:, :, :g, :pages].reshape(n, h, pages)
