"""Top-k tokens by product-quantized score, group softmax included, without a score per token and query head.

A softmax over codes factorises: exp(sum_j table[j, c_j]) is a product of one exponential per sub-space and centroid, so no
exponential is taken per token. If all m codes of a token fit a joint table (2 x 6 bits: 4096 entries), every token is
described by its joint code: one histogram of the codes gives the softmax's denominators, one small table the group-summed
weight of each code, and the k-th largest weight is searched in that table. Each token is read twice, two bytes at a time.
"""

from collections.abc import Sequence
from functools import partial

import numba
import numpy as np
import torch

from pqcache.kernels.launch import kernel, run
from pqcache.kernels.numeric import FAST, bits_of, part
from pqcache.kernels.rank import take

_JOINT = 4096  # entries of a joint table that stays in the nearest caches
_RADIX = ((20, 0xFFF), (8, 0xFFF), (0, 0xFF))  # digits of a float's bits; non-negative floats order as their bits do
# nats from the product of the tables' maxima down to the best token; with a larger gap precision is lost
_MAX_GAP = 40.0


@part
def _threshold(bits, amount, k):
    """The k-th largest of `bits` (uint32), entry i counted amount[i] times, and how many entries of that value are selected."""
    prefix, mask = np.uint32(0), np.uint32(0)
    same, filled = np.empty(bits.shape[0] + 1, np.int32), 0  # entries whose higher digits are those of the k-th largest
    for i in range(bits.shape[0]):
        same[filled] = i
        filled += amount[i] > 0
    histogram = np.empty(4096, np.int32)
    for shift, width in _RADIX:
        histogram[: width + 1] = 0
        kept = 0
        for j in range(filled):
            i = same[j]
            same[kept] = i
            if (bits[i] & mask) == prefix:
                histogram[(bits[i] >> np.uint32(shift)) & np.uint32(width)] += amount[i]
                kept += 1
        filled = kept
        digit = width
        while histogram[digit] < k:
            k -= histogram[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        mask |= np.uint32(width) << np.uint32(shift)
    return prefix, k


@part
def _candidates(codes, lo, hi, shortlist):
    """Codes (m, tokens) of one head's candidates: of the shortlist (tokens, -1 at its end), or without one of lo .. hi-1."""
    m = codes.shape[0]
    if shortlist.shape[0] == 0:
        mine = np.empty((m, hi - lo), codes.dtype)
        for j in range(m):
            for i in range(lo, hi):
                mine[j, i - lo] = codes[j, i]
        return mine
    count = shortlist.shape[0]
    while count and shortlist[count - 1] < 0:
        count -= 1
    mine = np.empty((m, count), codes.dtype)
    for j in range(m):
        for i in range(count):
            mine[j, i] = codes[j, shortlist[i]]
    return mine


@part(inline="always")
def _to_positions(out, filled, lo, shortlist):
    """Turn candidates 0, 1, ... into the positions that they have."""
    for i in range(filled):
        out[i] = shortlist[out[i]] if shortlist.shape[0] else out[i] + lo


@part(inline="always")
def _count_codes(mine, c, joint, size):
    """Write to `joint` the joint codes of a head's candidates, mine (m, tokens); how often each of `size` codes occurs."""
    tokens = joint.shape[0]
    first = mine[0]
    for i in range(tokens):
        joint[i] = first[i]
    for j in range(1, mine.shape[0]):
        line = mine[j]
        for i in range(tokens):
            joint[i] = joint[i] * np.uint16(c) + np.uint16(line[i])
    # four histograms in turn: equal codes in a row would otherwise wait for each other
    amount4 = np.zeros((4, size), np.int32)
    for i in range(tokens // 4):
        for lane in range(4):
            amount4[lane, joint[4 * i + lane]] += 1
    for i in range(tokens - tokens % 4, tokens):
        amount4[0, joint[i]] += 1
    amount = amount4[0]
    for code in range(size):
        amount[code] += amount4[1, code] + amount4[2, code] + amount4[3, code]
    return amount


@part(inline="always")
def _powers(logits, out):
    """The exponentials of one head's logits of a sub-space's centroids, relative to the largest."""
    highest = logits[0]
    for i in range(1, logits.shape[0]):
        highest = max(highest, logits[i])
    for i in range(logits.shape[0]):
        out[i] = np.exp(logits[i] - highest)


@part(inline="always")
def _multiply_out(power, product):
    """Write to product (c^m,) for every joint code the product of its entries of power (m, c), one per sub-space."""
    m, c = power.shape
    filled = 1
    product[0] = 1
    for j in range(m):
        # product[a * c + b] = product[a] * power[j, b], from the back so that nothing is overwritten
        for a in range(filled - 1, -1, -1):
            value = product[a]
            for b in range(c):
                product[a * c + b] = value * power[j, b]
        filled *= c


@partial(kernel, fastmath={"reassoc", "contract", "arcp"})
def _joint(first, last, codes, tables, lo, hi, shortlist, k, out, status):
    """Task = (row, KV head); tables (rows * heads, m, C, g) logits; status 1 where the tables are too steep.

    shortlist (n, H, tokens): the candidates, where it has any entries.
    """
    m, c, g = tables.shape[1], tables.shape[2], tables.shape[3]
    size = c**m
    for task in range(first, last):
        row, head = task // (out.shape[1]), task % out.shape[1]
        if k[row] == 0:
            continue
        among = shortlist[row, head if shortlist.shape[1] > 1 else 0]
        mine = _candidates(codes[row, head], lo, hi[row], among)
        tokens = mine.shape[1]
        count = min(k[row], tokens)
        if count == 0:
            continue
        joint = np.empty(tokens, np.uint16)
        amount = _count_codes(mine, c, joint, size)
        weights = np.zeros(size, np.float32)
        power = np.empty((m, c), np.float32)
        product = np.empty(size, np.float32)
        for head_of_group in range(g):
            for j in range(m):
                _powers(tables[task, j, :, head_of_group], power[j])
            _multiply_out(power, product)
            total, best = np.float32(0), np.float32(0)
            for i in range(size):
                total += product[i] * amount[i]
            for i in range(size):
                best = max(best, product[i] * min(amount[i], 1))
            if not best > np.exp(np.float32(-_MAX_GAP)):
                status[task] = 1
                break
            for i in range(size):
                weights[i] += product[i] / total
        if status[task]:
            continue
        bits = np.empty(size, np.uint32)
        for i in range(size):
            bits[i] = bits_of(weights[i])
        level, ties = _threshold(bits, amount, count)
        kind = np.zeros(size, np.uint8)  # 2: chosen, 1: chosen while ties are left
        for i in range(size):
            kind[i] = 2 if bits[i] > level else (1 if bits[i] == level else 0)
        mine_out, filled, i = out[row, head], 0, 0
        while filled < count:
            take = kind[joint[i]]
            if take == 1:
                take = 2 if ties > 0 else 0
                ties -= 1
            mine_out[filled] = i
            filled += take == 2
            i += 1
        _to_positions(mine_out, count, lo, among)


@partial(kernel, fastmath={"contract", "arcp"})
def _wide(first, last, codes, tables, lo, hi, shortlist, k, out, status):
    """The same with a weight per token, for codes too many to enumerate."""
    m, c, g = tables.shape[1], tables.shape[2], tables.shape[3]
    for task in range(first, last):
        row, head = task // (out.shape[1]), task % out.shape[1]
        if k[row] == 0:
            continue
        among = shortlist[row, head if shortlist.shape[1] > 1 else 0]
        mine = _candidates(codes[row, head], lo, hi[row], among)
        tokens = mine.shape[1]
        count = min(k[row], tokens)
        if count == 0:
            continue
        power = np.empty((m, c, g), np.float32)
        for j in range(m):
            for a in range(g):
                _powers(tables[task, j, :, a], power[j, :, a])
        product = np.empty((tokens, g), np.float32)
        total, best = np.zeros(g, np.float64), np.zeros(g, np.float32)
        for i in range(tokens):
            for a in range(g):
                product[i, a] = power[0, mine[0, i], a]
            for j in range(1, m):
                code = mine[j, i]
                for a in range(g):
                    product[i, a] *= power[j, code, a]
            for a in range(g):
                total[a] += product[i, a]
                best[a] = max(best[a], product[i, a])
        for a in range(g):
            if not best[a] > np.exp(np.float32(-_MAX_GAP)):
                status[task] = 1
        if status[task]:
            continue
        share = (1 / total).astype(np.float32)
        weights = np.empty(tokens, np.float32)
        for i in range(tokens):
            value = np.float32(0)
            for a in range(g):
                value += product[i, a] * share[a]
            weights[i] = value
        take(weights, count, 0, out[row, head])
        _to_positions(out[row, head], count, lo, among)


def top_tokens(
    tables: torch.Tensor,
    codes: torch.Tensor,
    lo: int,
    hi: Sequence[int],
    k: Sequence[int],
    shortlist: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Per row and KV head the k[r] tokens of lo .. hi[r]-1 with the largest group-summed softmax weight.

    tables (n, h_kv, m, C, g) fp32: scaled products of each query head with each centroid; codes (n, h_kv, m, >= max(hi)).
    The softmax runs over the row's candidates, ties go to the lower position: (n, h_kv, max(k)) int64, ascending, -1 =
    padding. shortlist (n, 1 or h_kv, tokens) int64, ascending, -1 = padding at its end: the candidates, in place of
    lo .. hi[r]-1; a head with fewer than k[r] of them selects all. None if one query head's tables are so steep that the
    factorised softmax would lose precision.
    """
    n, h_kv, m, c, g = tables.shape
    flat = tables.reshape(n * h_kv, m, c, g).contiguous()
    out = np.full((n, h_kv, max(k)), -1, np.int64)
    status = np.zeros(n * h_kv, np.uint8)
    small = c**m <= _JOINT
    among = codes.shape[3] if shortlist is None else shortlist.shape[2]
    run(
        _joint if small else _wide,
        n * h_kv,
        codes.numpy(),
        flat.numpy(),
        lo,
        np.asarray(hi, np.int64),
        np.empty((n, 1, 0), np.int64) if shortlist is None else shortlist.numpy(),
        np.asarray(k, np.int64),
        out,
        status,
        cost=n * h_kv * (5 * among + g * c**m) if small else n * h_kv * among * (5 + 2 * g),
    )
    return None if status.any() else torch.from_numpy(out)


@part(inline="always")
def _agreeing(tables, mine, line):
    """How many codes are equal; `tables` may be a constant, as MagicPIG's default is: no loop has an end of its own then."""
    count = np.int16(0)
    for j in range(tables):
        count = np.int16(count + np.int16(mine[j] == line[j]))
    return count


@kernel
def _equal(first, last, query, codes, lo, hi, least, out, counts):
    """Task = (row, KV head); query (n, h_kv, g, L), codes (n, h_kv, capacity, L), out (n, h_kv, g, > candidates)."""
    heads = counts.shape[1]
    for task in range(first, last):
        row, head = task // heads, task % heads
        for i in range(lo, hi[row]):
            line = codes[row, head, i]
            for a in range(counts.shape[2]):
                mine, filled = query[row, head, a], counts[row, head, a]
                equal = _agreeing(150, mine, line) if line.shape[0] == 150 else _agreeing(line.shape[0], mine, line)
                out[row, head, a, filled] = i
                counts[row, head, a] = filled + (equal >= least[row])


def often_equal(
    query: torch.Tensor, codes: torch.Tensor, lo: int, hi: Sequence[int], least: Sequence[int]
) -> torch.Tensor:
    """Positions of lo .. hi[r]-1 whose codes of L tables equal the query's in least[r] of these or more: (n, h, most) int64.

    query (n, h_kv, g, L), codes (n, h_kv, capacity, L) int16. Ascending, -1 = padding.
    """
    n, h_kv, g, tables = query.shape
    out, counts = np.empty((n, h_kv, g, max(hi) - lo + 1), np.int32), np.zeros((n, h_kv, g), np.int64)
    given = query.contiguous().numpy(), codes.numpy(), lo, np.asarray(hi, np.int64), np.asarray(least, np.int64)
    run(_equal, n * h_kv, *given, out, counts, cost=out.size * tables / 8)
    slot = np.arange(max(1, counts.max()))
    chosen = np.where(slot < counts[..., None], out[..., : len(slot)], -1).astype(np.int64)
    return torch.from_numpy(chosen).flatten(1, 2)


@numba.njit(nogil=True, cache=True, fastmath=FAST)
def _nearest_of_one(x, centroids, out):
    """x (n, h_kv, m, sub), centroids (n, h_kv, m, C, sub), out (n, h_kv, m)."""
    n, heads, m, c, sub = centroids.shape
    for row in range(n):
        for head in range(heads):
            for j in range(m):
                least = np.float32(np.inf)
                for i in range(c):
                    distance = np.float32(0)
                    for e in range(sub):
                        apart = x[row, head, j, e] - centroids[row, head, j, i, e]
                        distance += apart * apart
                    if distance < least:
                        least = distance
                        out[row, head, j] = i


def encode_one(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Codes of one key per row, x (n, h_kv, 1, d), under centroids (n, h_kv, m, C, d / m), both fp32: (n, h_kv, m, 1) int64.

    The nearest centroid by L2, ties to the lowest index.
    """
    n, h_kv, m, _, sub = centroids.shape
    out = np.zeros((n, h_kv, m), np.int64)
    _nearest_of_one(x.reshape(n, h_kv, m, sub).numpy(), centroids.numpy(), out)
    return torch.from_numpy(out)[..., None]


@numba.njit(nogil=True, cache=True, fastmath=FAST)
def _tables(q, centroids, out):
    """q (n, h_kv, g, m, sub), centroids (n, h_kv, m, C, sub), out (n, h_kv, m, C, g)."""
    n, heads, m, c, sub = centroids.shape
    for row in range(n):
        for head in range(heads):
            for j in range(m):
                for i in range(c):
                    for a in range(q.shape[2]):
                        value = np.float32(0)
                        for e in range(sub):
                            value += q[row, head, a, j, e] * centroids[row, head, j, i, e]
                        out[row, head, j, i, a] = value


def tables(q: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Products of q (n, h, 1, d) with every centroid (n, h_kv, m, C, d / m), both fp32: (n, h_kv, m, C, g)."""
    n, h_kv, m, c, sub = centroids.shape
    g = q.shape[1] // h_kv
    out = np.empty((n, h_kv, m, c, g), np.float32)
    _tables(q.reshape(n, h_kv, g, m, sub).numpy(), centroids.numpy(), out)
    return torch.from_numpy(out)
