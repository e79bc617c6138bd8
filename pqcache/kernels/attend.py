"""Attention of one query token over rows of K and V where they are stored: nothing is gathered first.

What a KV head attends is a list of segments: rows side by side from an address on, or chosen ones among them. A task is a part of
a head's tokens, read once for all query heads of its group, in tiles: logits, running maximum and exponentials, weighted
values. Rows of 16 bits are widened as they are read. The task that ends a head's last part joins all.

Where every query head chooses its own tokens, or weighs them, the rows that any head of a group chose are read once, in the
order of their positions, with a bit per head that says which heads attend them.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numba
import numpy as np
import torch

from pqcache.kernels import launch
from pqcache.kernels.launch import BYTES_PER_NS, PIECES, kernel, run
from pqcache.kernels.loops import call
from pqcache.kernels.numeric import FAST, FP32, KINDS, at, fetch, increment, part
from pqcache.kernels.rows import AHEAD, add_probabilities, add_rows, join, loop_at, products, softmax
from pqcache.kernels.scaling import Scaling

Array = np.ndarray[Any, Any]
Attended = tuple[torch.Tensor, torch.Tensor]  # out (n, h, 1, d) and the logits' log-sum-exp (n, h, 1), fp32

# columns of a segment: addresses of its first rows, how many they are, which query reads them, and the address of the chosen
# positions, int64, counted from these first rows; -1 = nothing. 0: the rows as they follow.
KEYS, VALUES, TOKENS, QUERY, CHOSEN = range(5)
COLUMNS = 5

_TILE = 1024  # tokens between two updates of the running maximum: the first rows of a tile are not there yet
_PART = 1024  # tokens of a part at least, of those that are read side by side
_MOST_PARTS = 8  # of a KV head, of scattered tokens


@part
def _fill(mine, start, end, marks, k_step, v_step, keys, values, places):
    """Addresses of the next rows, from entry `start` of a head's segments on, that fit into a tile, all of one query.

    marks: where it has entries, only rows that some head attends. places: the positions of the rows. Returns how many there are,
    the entry to go on with, and the query.
    """
    count, query, begin = 0, -1, 0
    for segment in range(mine.shape[0]):
        stop = begin + mine[segment, TOKENS]
        if start < stop and start < end:
            if count == _TILE or (query >= 0 and query != mine[segment, QUERY]):
                break
            query = mine[segment, QUERY]
            k, v = mine[segment, KEYS], mine[segment, VALUES]
            some = min(stop, end) - start  # of its entries, at most
            if mine[segment, CHOSEN]:
                chosen, i = at(mine[segment, CHOSEN], mine[segment, TOKENS], np.int64(0)), start - begin
                while some and count < _TILE:
                    keys[count], values[count] = k + chosen[i] * k_step, v + chosen[i] * v_step
                    count += chosen[i] >= 0
                    i, some = i + 1, some - 1
                start = begin + i
            elif marks.shape[0]:
                i = start
                while some and count < _TILE:
                    keys[count], values[count], places[count] = k + i * k_step, v + i * v_step, i
                    mark = marks[i, 0]
                    for byte in range(1, marks.shape[1]):
                        mark |= marks[i, byte]
                    count += mark != 0
                    i, some = i + 1, some - 1
                start = i
            else:
                some = min(some, _TILE - count)
                k, v = k + (start - begin) * k_step, v + (start - begin) * v_step
                for i in range(some):
                    keys[count + i], values[count + i] = k + i * k_step, v + i * v_step
                count, start = count + some, start + some
        begin = stop
    return count, start, query


@partial(kernel, fastmath=FAST)
def _attend(
    first, last, products, add_rows, size, q, scaling, segments, steps, marks, bias, kept, outs, lse, done, result, sums
):  # fmt: skip
    """Task = (row, KV head, part); q (Q, n, h_kv, g, d), segments (n, h_kv, R, COLUMNS).

    steps: bytes from row to row of K, and of V; size: of a row. products, add_rows: addresses of loops, see rows.py.

    marks (n, h_kv, length, bytes): bits of the heads that attend a position, or no entries. bias (n, h_kv, g, length): added to
    their logits, or no entries. kept (n, h_kv, g, T): logits of the first T tokens, scratch, as outs (n, h_kv, parts, g', d), lse
    (n, h_kv, parts, 2, g) and done (n, h_kv). Writes result (n, h_kv, g, d). Adds to sums (n, h_kv, E, T): an address, E, and
    the bytes from row to row, head to head, and entry to entry of E.
    """
    _, heads, parts, padded, d = outs.shape
    g, window = q.shape[3], kept.shape[3]
    keys, values, places = np.empty(_TILE + 3, np.int64), np.empty(_TILE + 3, np.int64), np.empty(_TILE + 3, np.int64)
    query, logits = np.zeros((padded, d), np.float32), np.zeros((padded, _TILE + 3), np.float32)
    at_keys, at_values = np.int64(keys.ctypes.data), np.int64(values.ctypes.data)
    at_query, at_logits = np.int64(query.ctypes.data), np.int64(logits.ctypes.data)
    for task in range(first, last):
        part, head, row = task % parts, task // parts % heads, task // parts // heads
        mine, out = segments[row, head], outs[row, head, part]
        high, mass = lse[row, head, part, 0], lse[row, head, part, 1]
        high[:] = -np.inf
        total = mine[:, TOKENS].sum()
        start, end = total * part // parts, total * (part + 1) // parts
        marked = marks[row, head] if marks.shape[2] else marks[0, 0]
        while start < end:
            entry = start
            count, start, of = _fill(mine, start, end, marked, steps[0], steps[1], keys, values, places)
            if count == 0:
                continue
            for a in range(g):
                for j in range(d):
                    query[a, j] = q[of, row, head, a, j] * scaling
            call(products, (at_query, padded, d, at_keys, count, at_logits, _TILE + 3))
            for i in range(min(AHEAD, count)):  # these rows arrive while the exponentials are computed
                fetch(values[i], size)
            for a in range(g):
                line = logits[a]
                if marked.shape[0]:
                    for i in range(count):
                        if marked[places[i], a >> 3] >> (a & 7) & 1 == 0:
                            line[i] = -np.inf
                        elif bias.shape[3]:
                            line[i] += bias[row, head, a, places[i]]
                if entry < window:
                    to = kept[row, head, a]
                    for i in range(min(count, window - entry)):
                        to[entry + i] = line[i]
            softmax(logits, count, high, mass, out)
            call(add_rows, (at_logits, _TILE + 3, padded, d, at_values, count, np.int64(out.ctypes.data)))
        if increment(done.ctypes.data + 8 * (row * heads + head)) + 1 == parts:
            join(outs[row, head], lse[row, head], result[row, head])
            if window:
                of_head = sums[0] + row * sums[2] + head * sums[3]
                add_probabilities(kept[row, head], lse[row, head, 0], of_head, sums[1], sums[4])
    keys[0] = values[0] = 0  # numba frees an array behind its last use, and addresses are none
    query[0, 0] = logits[0, 0] = 0


@kernel
def _mark(first, last, indices, weights, sinks, local, length, marks, bias):
    """Task = (row, KV head). marks (n, h_kv, length, bytes): bit a where a group's head a attends; indices (n, H, chosen).

    bias (n, h_kv, g, length) takes weights (n, h, chosen), where it has entries.
    """
    _, heads, g, _ = bias.shape
    for task in range(first, last):
        row, head = task // heads, task % heads
        mine = marks[row, head]
        for a in range(g):
            byte, bit = a >> 3, np.uint8(1 << (a & 7))
            chosen = indices[row, (head * g + a) * indices.shape[1] // (heads * g)]
            for i in range(chosen.shape[0]):
                if chosen[i] >= 0:
                    mine[chosen[i], byte] |= bit
                    if bias.shape[3]:
                        bias[row, head, a, chosen[i]] = weights[row, head * g + a, i]
            for i in range(sinks):
                mine[i, byte] |= bit
            for i in range(length - local, length):
                mine[i, byte] |= bit


_NO_MARKS, _NO_BIAS = np.zeros((1, 1, 0, 1), np.uint8), np.zeros((1, 1, 1, 0), np.float32)
_NO_CHOICE = (0, 0, 0, 0)


def block(g: int) -> tuple[int, int]:
    """How many query heads loops take at a time, 1, 2 or 4, and g rounded up to a multiple of that number."""
    size = min(4, 1 << (g - 1).bit_length())
    return size, -(-g // size) * size


def _partial(
    queries: torch.Tensor,
    segments: Array,
    steps: tuple[int, int],
    scaling: float,
    tokens: float,
    parts: int = _MOST_PARTS,
    sums: torch.Tensor | None = None,
    marks: Array = _NO_MARKS,
    bias: Array = _NO_BIAS,
    kind: str = FP32,
) -> Attended:
    """Attention of queries (Q, n, h, 1, d) over segments (n, h_kv, R, COLUMNS).

    tokens: of all rows and heads, roughly. parts: of a head, at most. sums (n, h or h_kv, T) fp32, tokens side by side: grow by
    the probabilities of the first segment's T tokens. Neither sinks nor a cap of a `Scaling` are served.
    """
    many, n, h, _, d = queries.shape
    h_kv = segments.shape[1]
    g, workers = h // h_kv, launch.team()
    heads, padded = block(g)
    parts = max(1, min(-(-PIECES * workers // (n * h_kv)), parts)) if workers > 1 else 1
    added, window = (0,) * 5, 0
    if sums is not None and sums.numel():
        each, (row, head, _), window = sums.shape[1] // h_kv, sums.stride(), sums.shape[2]
        added = (sums.data_ptr(), each, 4 * row, 4 * head * each, 4 * head)
    result, lse = np.empty((n, h_kv, g, d), np.float32), np.zeros((n, h_kv, parts, 2, g), np.float32)
    run(
        _attend, n * h_kv * parts, loop_at(products, kind, d, heads), loop_at(add_rows, kind, d, heads),
        d * np.dtype(kind).itemsize, queries.reshape(many, n, h_kv, g, d).float().numpy(), np.float32(scaling),
        segments, steps, marks, bias, np.empty((n, h_kv, g, window), np.float32),
        np.zeros((n, h_kv, parts, padded, d), np.float32), lse,
        np.zeros((n, h_kv), np.int64), result, added, cost=tokens * (steps[0] + steps[1]) / BYTES_PER_NS,
    )  # fmt: skip
    # what `join` left: maximum and sum over all parts
    high, mass = torch.from_numpy(lse[:, :, 0]).unbind(2)
    return torch.from_numpy(result).view(n, h, 1, d), (high + mass.log()).view(n, h, 1)


def _run(
    queries: torch.Tensor, segments: Array, steps: tuple[int, int], scaling: float, *args: Any, **options: Any
) -> torch.Tensor:
    """`_partial` where the sinks of a `Scaling` take their share of the result, not of the sums: (n, 1, h, d) fp32."""
    out, lse = _partial(queries, segments, steps, scaling, *args, **options)
    if isinstance(scaling, Scaling) and (sinks := scaling.sinks) is not None:
        out *= torch.sigmoid(lse - sinks.detach().float()[:, None])[..., None]
    return out.transpose(1, 2)


@numba.njit(nogil=True, cache=True)
def _segments(h_kv, k, v, first, chosen, local, length):
    """Segments (n, h_kv, 3, COLUMNS) of the first first[row] rows, the chosen ones, and the last `local` of `length`.

    k, v: an address, bytes from row of the batch to row, head to head, and token to token. chosen: an address, entries of a list,
    bytes from list to list of the batch, and of the heads.
    """
    out = np.zeros((first.shape[0], h_kv, 3, COLUMNS), np.int64)
    for row in range(first.shape[0]):
        for head in range(h_kv):
            mine = out[row, head]
            mine[:, KEYS] = k[0] + row * k[1] + head * k[2]
            mine[:, VALUES] = v[0] + row * v[1] + head * v[2]
            mine[0, TOKENS], mine[1, TOKENS], mine[2, TOKENS] = first[row], chosen[1], local
            mine[1, CHOSEN] = chosen[0] + row * chosen[2] + head * chosen[3]
            mine[2, KEYS] += (length - local) * k[3]
            mine[2, VALUES] += (length - local) * v[3]
    return out


def _place(x: torch.Tensor) -> tuple[int, int, int, int]:
    size, (row, head, token, _) = x.element_size(), x.stride()
    return x.data_ptr(), size * row, size * head, size * token


def addresses(x: torch.Tensor, *dims: int) -> Array:
    """Addresses of x[i, j, ...] for every index of these leading dimensions, int64, in their shape."""
    grid = _grid(tuple(x.shape[dim] for dim in dims))
    steps = [index * (x.stride(dim) * x.element_size()) for index, dim in zip(grid, dims, strict=True)]
    return np.asarray(sum(steps, start=np.int64(x.data_ptr())))


@lru_cache(maxsize=64)
def _grid(shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Indices along each dimension of a shape, int64, each as long as its dimension and 1 elsewhere."""
    return np.meshgrid(*(np.arange(size, dtype=np.int64) for size in shape), indexing="ij", sparse=True)


def serves(q: torch.Tensor, *rows: torch.Tensor) -> bool:
    """Whether these kernels attend q (n, h, 1, d) to such rows: of one dtype of KINDS and d, each in one piece."""
    return q.dtype in KINDS and all(
        x.dtype == q.dtype and x.shape[-1] == q.shape[-1] and x.stride(-1) == 1 for x in rows
    )


def attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scaling: float
) -> torch.Tensor:
    """Attention of row r's query over the first lengths[r] >= 1 tokens: (n, 1, h, d), of q's dtype; sums are in fp32.

    q (n, h, 1, d); k, v (n, h_kv, >= max(lengths), d); see `serves`.
    """
    at_k, at_v, h_kv = _place(k), _place(v), k.shape[1]
    segments = _segments(h_kv, at_k, at_v, np.array(lengths, np.int64), _NO_CHOICE, 0, 0)
    steps, parts = (at_k[3], at_v[3]), max(lengths) // _PART
    return _run(q[None], segments, steps, scaling, sum(lengths) * h_kv, parts, kind=KINDS[k.dtype]).to(q.dtype)


def attend_adding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, sums: torch.Tensor
) -> torch.Tensor:
    """Attention over all tokens, (n, 1, h, d), of q (n, h, 1, d) and k, v (n, h_kv, m, d), fp32; see `serves`.

    Adds to sums (n, h, m) the probability that each token got from each head, or to sums (n, h_kv, m) the mean of a group's.
    """
    at_k, at_v, (n, h_kv, m, _) = _place(k), _place(v), k.shape
    segments = _segments(h_kv, at_k, at_v, np.full(n, m, np.int64), _NO_CHOICE, 0, 0)
    return _run(q[None], segments, (at_k[3], at_v[3]), scaling, n * h_kv * m, m // _PART, sums)


def attend_runs(queries: torch.Tensor, segments: Array, sums: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention over all segments (n, h_kv, R, COLUMNS) of rows of d fp32 numbers side by side: (n, 1, h, d).

    queries (Q, n, h, 1, d) fp32. Adds to sums (n, h, T) fp32 the probabilities that the first segment's T tokens got, to sums
    (n, h_kv, T) the mean of each group's. The tensors behind the addresses must live until this returns.
    """
    size = 4 * queries.shape[4]
    return _run(queries, segments, (size, size), scaling, float(segments[..., TOKENS].sum()), sums=sums)


def side_by_side(*rows: torch.Tensor) -> bool:
    """Whether rows of these tensors follow each other as `attend_runs` takes them."""
    return all(x.dtype == torch.float32 and x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] for x in rows)


def attend_parts(
    q: torch.Tensor, parts: Sequence[Sequence[torch.Tensor]], counts: Sequence[int], scaling: float
) -> Attended:
    """Attention of q (n, h, 1, d) over the first counts[i] tokens of each of the parts, as if they were joined; without sinks.

    parts: their keys, and their values, each (n, h_kv, >= counts[i], d), rows `side_by_side`.
    """
    n, h_kv, _, d = parts[0][0].shape
    segments = np.zeros((n, h_kv, len(counts), COLUMNS), np.int64)
    for i, (k, v, count) in enumerate(zip(*parts, counts, strict=True)):
        segments[:, :, i, KEYS], segments[:, :, i, VALUES] = addresses(k, 0, 1), addresses(v, 0, 1)
        segments[:, :, i, TOKENS] = count
    return _partial(q[None], segments, (4 * d, 4 * d), scaling, sum(counts) * n * h_kv)


def attend_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attention of row r's query over counts[r] tokens from starts[r] on, and over the row's newer ones: (n, 1, g, d).

    q (n, g, 1, d); k, v (entries, d), rows one after the other; new_k, new_v (n, 1, newer, d), rows `side_by_side`; see `serves`.
    """
    n, _, newer, d = new_k.shape
    segments, size = np.zeros((n, 1, 2, COLUMNS), np.int64), d * k.element_size()
    first = np.array(starts, np.int64) * size
    segments[:, 0, 0, KEYS], segments[:, 0, 0, VALUES] = k.data_ptr() + first, v.data_ptr() + first
    segments[:, :, 1, KEYS], segments[:, :, 1, VALUES] = addresses(new_k, 0, 1), addresses(new_v, 0, 1)
    segments[:, 0, 0, TOKENS], segments[:, 0, 1, TOKENS] = counts, newer
    parts = (max(counts) + newer) // _PART
    tokens = sum(counts) + n * newer
    return _run(q[None], segments, (size, size), scaling, tokens, parts, kind=KINDS[k.dtype]).to(q.dtype)


def attend_chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sinks: int,
    local: int,
    length: int,
    scaling: float,
    log_weight: torch.Tensor | None = None,
) -> Attended | None:
    """Attention over [first `sinks` | `indices` | last `local` of `length`] tokens, without a model's sinks.

    q (n, h, 1, d); k, v (n, h_kv, capacity, d), see `serves`; indices (n, 1, h_kv or h, chosen) int64, -1 = nothing; log_weight
    (n, h, chosen) fp32: added to the logits of these. None: not served.
    """
    (n, h), h_kv, (_, heads, chosen) = q.shape[:2], k.shape[1], indices.shape
    each = heads not in (1, h_kv) or log_weight is not None  # whether a group's query heads differ
    if not serves(q, k, v) or (each and heads not in (1, h_kv, h)):
        return None
    indices = indices.contiguous()
    at_k, at_v = _place(k), _place(v)
    steps = at_k[3], at_v[3]
    if each:
        marks = np.zeros((n, h_kv, length, -(-h // h_kv // 8)), np.uint8)
        bias = np.zeros((n, h_kv, h // h_kv, 0 if log_weight is None else length), np.float32)
        weights = _NO_BIAS[0] if log_weight is None else log_weight.contiguous().numpy()
        run(_mark, n * h_kv, indices.numpy(), weights, sinks, local, length, marks, bias, cost=n * h * chosen)
        segments = _segments(h_kv, at_k, at_v, np.full(n, length), _NO_CHOICE, 0, 0)
        return _partial(
            q[None], segments, steps, scaling, n * h_kv * length, marks=marks, bias=bias, kind=KINDS[k.dtype]
        )
    row, head = 8 * indices.stride(0), 8 * indices.stride(1) if heads > 1 else 0
    choice = indices.data_ptr(), chosen, row, head
    segments = _segments(h_kv, at_k, at_v, np.full(n, sinks), choice, local, length)
    return _partial(q[None], segments, steps, scaling, n * h_kv * (sinks + chosen + local), kind=KINDS[k.dtype])
