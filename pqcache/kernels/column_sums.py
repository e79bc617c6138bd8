"""Column sums of a prompt's attention, and the attention itself, in one pass: products, softmax and sums.

A task takes the queries of one KV head block by block, and a block its keys tile by tile. While a tile's logits are in the cache,
they become weights relative to the largest logit so far and are multiplied with the values. A block's weights are kept. After
its last tile each row's total is known; divided by it, the weights are probabilities and are added to the sums.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from pqcache.kernels import threads
from pqcache.kernels.matrix import STRIP, WIDE, add_product, add_scaled, in_panels, product, transposed
from pqcache.kernels.registers import LANES, exp_scaled, floats_at, largest

_ROWS = 16 * STRIP  # of logits in a block: packing the keys and values once per block costs little then
_FLOATS = 1 << 22  # of a block's logits: long prompts have blocks of fewer rows
_FEWEST = 4 * STRIP  # rows of a block, whatever the length
_TILE = 16 * WIDE  # keys of a tile: its weights and values fit the second-level cache
_FLOPS_PER_NS = 80  # of one thread


@numba.njit(nogil=True)
def _read_queries(q, head, first, count, g, d, scaling, out):
    """Scaled queries of a block, (count * g, d), the heads of a query side by side."""
    for i in range(count):
        for a in range(g):
            row = floats_at(q[0] + (head * g + a) * q[1] + (first + i) * q[2], (d,))
            to = floats_at(out + 4 * d * (i * g + a), (d,))
            for j in range(d):
                to[j] = row[j] * scaling


@numba.njit(nogil=True)
def _first_row(seen, first, count, g, key):
    """The first row of a block, at the start of a strip, with a query that sees more than `key` keys."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if seen[first + middle] > key:
            high = middle
        else:
            low = middle + 1
    return low * g // STRIP * STRIP


@numba.njit(nogil=True)
def _score(k, k_step, start, stop, d, seen, first, count, g, queries, panel, logits, width):
    """Logits of a block over keys start .. stop-1."""
    rows = count * g
    for key in range(start, stop, WIDE):
        transposed(k + key * k_step, k_step, min(WIDE, stop - key), d, panel)
        for row in range(_first_row(seen, first, count, g, key), rows, STRIP):
            product(
                queries + 4 * d * row, 4 * d, min(STRIP, rows - row), panel, 4 * WIDE,
                logits + 4 * (row * width + key), 4 * width, d,
            )  # fmt: skip


@numba.njit(nogil=True)
def _weigh(logits, width, start, stop, seen, first, rows, g, tile, outs, channels, highs, masses):
    """A tile's logits of a block become weights relative to the largest logit so far, highs[row, tile].

    They are 0 behind what a query sees. If the largest logit grows, what was added up before is scaled down to it.
    """
    end = start + (stop - start + WIDE - 1) // WIDE * WIDE
    for row in range(rows):
        sees = min(seen[first + row // g], stop)
        at, line = logits + 4 * (row * width + start), floats_at(logits + 4 * row * width, (end,))
        before = highs[row, tile - 1] if tile else np.float32(-np.inf)
        if sees <= start:
            highs[row, tile] = before
            line[start:] = 0
            continue
        whole = start + (sees - start + LANES - 1) // LANES * LANES
        line[sees:whole] = -np.inf
        line[whole:] = 0
        high = max(before, largest(at, whole - start))
        if high > before:
            factor = np.exp(before - high)
            masses[row] *= factor
            added = floats_at(outs + 4 * row * channels, (channels,))
            for j in range(channels):
                added[j] *= factor
        masses[row] += exp_scaled(at, whole - start, high)
        highs[row, tile] = high


@numba.njit(nogil=True)
def _add_sums(logits, width, seen, window, first, count, g, tiles, highs, masses, added):
    """added (g, width) += the probabilities that a block's queries gave to the keys in their windows."""
    for i in range(count):
        sees = seen[first + i]
        for a in range(g):
            row = i * g + a
            for tile in range(max(0, sees - window) // _TILE, tiles):
                low, stop = max(tile * _TILE, sees - window), min((tile + 1) * _TILE, sees)
                if low < stop:
                    share = np.exp(highs[row, tile] - highs[row, tiles - 1]) / masses[row]
                    add_scaled(added + 4 * (a * width + low), logits + 4 * (row * width + low), share, stop - low)


@threads.kernel()
def _kernel(first, last, q, k, v, out, seen, window, block, g, m, d, d_v, scaling, sums):
    """Task = (part, KV head): sums (parts, h, m) += probabilities from every parts-th block of queries.

    q, k, v, out: an address, bytes from head to head and from token to token; v[0] = 0: no attention is written. Query i
    sees the first seen[i] of m keys, seen ascends; only the last `window` of these get sums.
    """
    parts, h, _ = sums.shape
    h_kv, queries = h // g, seen.shape[0]
    blocks = (queries + block - 1) // block
    # a vector more than whole panels: rows that are a power of two apart would share their place in the cache
    width = (m + WIDE - 1) // WIDE * WIDE + LANES
    channels = (d_v + WIDE - 1) // WIDE * WIDE
    logits, own = np.empty((block * g, width), np.float32), np.empty((block * g, d), np.float32)
    panel, values = np.empty((d, WIDE), np.float32), np.empty((channels, _TILE), np.float32)
    outs, added = np.empty((block * g, channels), np.float32), np.empty((g, width), np.float32)
    highs, masses = np.empty((block * g, (m + _TILE - 1) // _TILE), np.float32), np.empty(block * g, np.float32)
    at, own_at, panel_at, values_at = logits.ctypes.data, own.ctypes.data, panel.ctypes.data, values.ctypes.data
    outs_at, added_at = outs.ctypes.data, added.ctypes.data
    for task in range(first, last):
        part, head = task // h_kv, task % h_kv
        keys, tokens = k[0] + head * k[1], v[0] + head * v[1]
        for number in range(part, blocks, parts):
            begin = number * block
            count = min(block, queries - begin)
            rows, sees = count * g, seen[begin + count - 1]
            tiles = (sees + _TILE - 1) // _TILE
            _read_queries(q, head, begin, count, g, d, scaling, own_at)
            outs[:rows] = 0
            masses[:] = 0
            for tile in range(tiles):
                start, stop = tile * _TILE, min((tile + 1) * _TILE, sees)
                _score(keys, k[2], start, stop, d, seen, begin, count, g, own_at, panel_at, at, width)
                _weigh(at, width, start, stop, seen, begin, rows, g, tile, outs_at, channels, highs, masses)
                if v[0]:
                    in_panels(tokens + start * v[2], v[2], stop - start, d_v, _TILE, values_at)
                    for row in range(_first_row(seen, begin, count, g, start), rows, STRIP):
                        for channel in range(0, channels, WIDE):
                            add_product(
                                at + 4 * (row * width + start), 4 * width, min(STRIP, rows - row),
                                values_at + 4 * channel * _TILE, 4 * WIDE,
                                outs_at + 4 * (row * channels + channel), 4 * channels, stop - start,
                            )  # fmt: skip
            added[:, :sees] = 0
            _add_sums(at, width, seen, window, begin, count, g, tiles, highs, masses, added_at)
            for a in range(g):
                total, new = sums[part, head * g + a], added[a]
                for j in range(sees):
                    total[j] += new[j]
            if v[0]:
                for row in range(rows):
                    line, share = outs[row], 1 / masses[row]
                    place = out[0] + (head * g + row % g) * out[1] + (begin + row // g) * out[2]
                    to = floats_at(place, (d_v,))
                    for j in range(d_v):
                        to[j] = line[j] * share
    # numba frees an array behind its last use, and addresses are none
    logits[0, 0] = own[0, 0] = panel[0, 0] = values[0, 0] = outs[0, 0] = added[0, 0] = 0


def serves(*tensors: torch.Tensor) -> bool:
    """Whether `add_sums` takes these queries, keys, values or outputs: fp32, rows in one piece."""
    return all(x.dtype == torch.float32 and x.stride(-1) == 1 for x in tensors)


def _place(x: torch.Tensor | None) -> tuple[int, int, int]:
    """Address of x (heads, tokens, d), and its bytes from head to head and from token to token; zeros for None."""
    return (0, 0, 0) if x is None else (x.data_ptr(), x.element_size() * x.stride(0), x.element_size() * x.stride(1))


def add_sums(
    sums: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    window: int | None = None,
    attended: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """sums (h, m) += the probability that each key gets from queries q (h, t, d); k (h_kv, m, d), all fp32, see `serves`.

    seen (t,) int64, ascending, 1 .. m: how many keys, from the first on, a query sees. window: a key gets sums from queries that
    have it among the last `window` they see. attended: values (h_kv, m, d') and where attention is written, (h, t, d').
    """
    h, t, d = q.shape
    h_kv, m = k.shape[0], k.shape[1]
    g = h // h_kv
    block = max(1, min(_ROWS, max(_FEWEST, _FLOATS // m)) // g)
    parts = min(-(-t // block), -(-4 * torch.get_num_threads() // h_kv))
    new = np.zeros((parts, h, m), np.float32)
    values, out = (None, None) if attended is None else attended
    threads.run(
        _kernel, parts * h_kv, *(_place(x) for x in (q, k, values, out)), seen.numpy(), m if window is None else window,
        block, g, m, d, d if values is None else values.shape[2], np.float32(scaling), new,
        cost=2 * d * h * int(seen.sum()) / _FLOPS_PER_NS,
    )  # fmt: skip
    sums += torch.from_numpy(new).sum(0)
