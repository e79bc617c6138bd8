"""What the kernel reads and what it adds up, as addresses and sizes; codes, steps and lows of one tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from pqcache.kernels import registers
from pqcache.kernels.registers import LANES

TILE = 128  # tokens between two updates of the running maximum; a multiple of LANES; its codes fit the nearest cache
LINE = TILE + LANES  # floats of a head's logits: the last product may write past the tile
WINDOW = 512  # tokens whose outliers are read at a time; a multiple of TILE
FAST = {"reassoc", "contract", "arcp", "nsz"}  # additions in any order; NaN and infinity stay what they are

# Codes of K or V as numbers: addresses, strides in bytes (of row, KV head, token, ...), sizes. Address 0: there is none.
_FIELDS = (
    "bits",
    "d",
    "read",  # bits of a code as the tiles read it: `bits`, or 8 or 32 after spreading
    "spread",  # whether tiles are spread first, to one byte per code or to floats
    "width",  # channels of a token as the tiles read it
    *("codes", "codes_row", "codes_head", "codes_token"),
    "groups",  # of a token; 0: no steps and lows per token
    "tile_groups",  # that the tiles apply; 1: none
    *("token_step", "token_low", "token_row", "token_head", "token_token"),
    "span",  # tokens per segment of channel steps
    "offset",  # tokens of the first segment that come before the first token
    *("channel_step", "channel_low", "channel_row", "channel_head", "channel_segment"),
    "outliers",  # per block and channel (keys), or per token (values)
    "alike",  # whether a vector's outliers all have the same code, step and low
    *("values", "positions", "position_bytes"),
    *("entry_row", "entry_head", "entry_block", "entry_next"),  # strides in entries
    "rank",
    *("a", "a_row", "a_head", "a_token", "b", "b_row", "b_head", "b_block"),
    "length",  # tokens per block of outliers by channel, and of the low-rank part; 0: no blocks
)
STREAM = np.dtype([(name, np.int64) for name in _FIELDS])


class Scratch(NamedTuple):
    """Addresses of a thread's memory for a tile of a KV head: fp32 unless stated. Arrays would count references at every use."""

    logits: int  # (heads, LINE); later the probabilities
    beside: int  # (TILE, heads): the probabilities, a token's heads side by side
    ahead: int  # (WINDOW, heads): what outliers add to the logits of this tile and the next ones
    spread: int  # (TILE, width) bytes or floats: codes, or what they stand for
    steps: int  # (TILE, groups): of the tile's tokens
    lows: int
    channels: int  # (2, width): steps (1 where there are none) and lows of a segment's channels
    query: int  # (heads, width)
    folded: int  # (heads, width): times the segment's steps
    beside_query: int  # (d, heads): a channel's heads side by side
    sums: int  # (2, heads): of the query times the segment's lows, of the folded query
    factors: int  # (rank, TILE): low-rank factors of the tile's tokens
    seen: int  # (rank, heads): the query times the other factor of the block
    line: int  # (d,)
    cursor: int  # (d,) int32: each channel's next outlier
    near: int  # (d,): what the code stands for that outliers of a channel have in their places, where it is one


class Sums(NamedTuple):
    """Addresses of what a task adds up: fp32."""

    codes: int  # (heads, width): weighted codes
    dense: int  # (heads, d): the low-rank part
    sparse: int  # (d, heads): outliers' differences
    lows: int  # (heads,): weighted lows of tokens with one group
    low_rank: int  # (rank, heads): weighted factors of the current block
    high: int  # (heads,): the running maximum
    mass: int  # (heads,)


@numba.njit(nogil=True)
def laid_out(base, sizes):
    """Addresses of consecutive arrays of so many floats, each at the start of a cache line."""
    out = np.zeros(sizes.shape[0] + 1, np.int64)
    out[0] = base
    for i in range(sizes.shape[0]):
        out[i + 1] = out[i] + (sizes[i] * 4 + 63) // 64 * 64
    return out


@numba.njit(nogil=True)
def memory_of(s, index):
    """Scratch and Sums of a task's KV head number `index`, from the addresses of the first one's arrays."""
    by = index * (s[-1] - s[0])
    scratch = Scratch(
        s[0] + by, s[1] + by, s[2] + by, s[3] + by, s[4] + by, s[5] + by, s[6] + by, s[7] + by, s[8] + by, s[9] + by,
        s[10] + by, s[11] + by, s[12] + by, s[13] + by, s[14] + by, s[15] + by,
    )  # fmt: skip
    return scratch, Sums(s[16] + by, s[17] + by, s[18] + by, s[19] + by, s[20] + by, s[21] + by, s[22] + by)


def scratch_sizes(k: Any, v: Any, d: int, heads: int) -> np.ndarray:
    """Floats of each array of Scratch, for streams of any of the runs k, v (runs,) of STREAM. heads: of a block."""
    width, groups = (max(1, k[name].max(), v[name].max()) for name in ("width", "groups"))
    spread = max(int(x["width"]) * int(x["read"]) // 32 for x in (*k, *v))
    rank = max(k["rank"].max(), v["rank"].max())
    ahead = WINDOW * heads if k["outliers"].any() else 0
    sizes = Scratch(
        logits=heads * LINE, beside=TILE * heads, ahead=ahead, spread=TILE * spread, steps=TILE * groups, lows=TILE * groups,
        channels=2 * width, query=heads * width, folded=heads * width, beside_query=d * heads, sums=2 * heads,
        factors=rank * TILE, seen=rank * heads, line=d, cursor=d, near=d,
    )  # fmt: skip
    return np.array(sizes, np.int64)


def sums_sizes(v: Any, d: int, heads: int) -> np.ndarray:
    """Floats of each array of Sums."""
    width, rank = int(v["width"].max()), max(1, int(v["rank"].max()))
    sizes = Sums(
        codes=heads * width,
        dense=heads * d,
        sparse=d * heads,
        lows=heads,
        low_rank=rank * heads,
        high=heads,
        mass=heads,
    )
    return np.array(sizes, np.int64)


@numba.njit(nogil=True)
def _spread_codes(stream, base, count, d, out):
    """Write the codes of `count` tokens at `base` to `out` (TILE, width), one byte each, in order.

    Eight codes are a word of `bits` bytes; its halves, quarters and eighths are moved apart.
    """
    one, bits = np.uint64(1), np.uint64(stream.bits)
    half = (one << bits * np.uint64(4)) - one
    quarter = (one << bits * np.uint64(2)) - one
    eighth = (one << bits) - one
    quarter |= quarter << np.uint64(32)
    eighth |= eighth << np.uint64(16)
    eighth |= eighth << np.uint64(32)
    for i in range(count):
        at = base + i * stream.codes_token
        for j in range(d // 8):
            word = np.uint64(0)
            for m in range(stream.bits):
                word |= np.uint64(registers.read_byte(at + m)) << np.uint64(8 * m)
            word = (word & half) | (word >> bits * np.uint64(4) & half) << np.uint64(32)
            word = (word & quarter) | (word >> bits * np.uint64(2) & quarter) << np.uint64(16)
            registers.write_word(
                out + i * stream.width + 8 * j, (word & eighth) | (word >> bits & eighth) << np.uint64(8)
            )
            at += stream.bits


@numba.njit(nogil=True)
def _spread_numbers(stream, base, count, scratch):
    """Write to scratch.spread, in fp32, what `count` tokens' codes at `base` stand for under their groups' steps and lows."""
    out = registers.floats_at(scratch.spread, (TILE, stream.width))
    steps = registers.floats_at(scratch.steps, (TILE, stream.groups))
    lows = registers.floats_at(scratch.lows, (TILE, stream.groups))
    each = stream.d // max(1, stream.groups)
    for i in range(count):
        at = base + i * stream.codes_token
        for j in range(stream.d):
            if stream.bits == 32:
                out[i, j] = registers.read_float(at + 4 * j)
            else:
                out[i, j] = code_at(at, stream.bits, j) * steps[i, j // each] + lows[i, j // each]
        # the padding may hold bytes of another run's codes: as a float they can be NaN, and 0 * NaN is NaN
        for j in range(stream.d, stream.width):
            out[i, j] = 0


@numba.njit(nogil=True, fastmath=FAST)
def undo(bits, steps, lows):
    """Steps and lows of codes become those of what the tiles read (tiles.py): 1 + code / 2^bits below 8 bits."""
    if bits < 8:
        for i in range(steps.shape[0]):
            steps[i] *= 1 << bits
            lows[i] -= steps[i]


@numba.njit(nogil=True)
def _read_pairs(stream, row, head, start, count, source, out):
    """A tile's steps, or lows, in fp32: out (TILE, groups)."""
    groups = stream.groups
    at = source + row * stream.token_row + head * stream.token_head + start * stream.token_token
    if stream.token_token == 2 * groups:
        registers.widen(at, out, count * groups)
    else:
        for i in range(count):
            registers.widen(at + i * stream.token_token, out + 4 * i * groups, groups)


@numba.njit(nogil=True)
def prepare_tile(stream, row, head, start, count, scratch):
    """Read a tile's steps and lows, and its codes, spread if need be: their address and stride."""
    if stream.groups:
        _read_pairs(stream, row, head, start, count, stream.token_step, scratch.steps)
        _read_pairs(stream, row, head, start, count, stream.token_low, scratch.lows)
    codes = stream.codes + row * stream.codes_row + head * stream.codes_head + start * stream.codes_token
    if stream.read == 32 and stream.spread:
        _spread_numbers(stream, codes, count, scratch)
        return scratch.spread, 4 * stream.width
    if stream.groups:
        size = (count * stream.groups,)
        undo(stream.read, registers.floats_at(scratch.steps, size), registers.floats_at(scratch.lows, size))
    if not stream.spread:
        return codes, stream.codes_token
    _spread_codes(stream, codes, count, stream.d, scratch.spread)
    return scratch.spread, stream.width


@numba.njit(nogil=True)
def code_at(at, bits, channel):
    """One code of a token at an address, 8 bits or less: codes are a stream of bits, the lowest first."""
    bit = channel * bits
    word = registers.read_byte(at + (bit >> 3))
    if (bit & 7) + bits > 8:
        word |= registers.read_byte(at + (bit >> 3) + 1) << 8
    return np.float32((word >> (bit & 7)) & ((1 << bits) - 1))


@numba.njit(nogil=True)
def position_at(positions, size, entry):
    """Outliers' positions have `size` bytes."""
    return registers.read_short(positions + 2 * entry) if size == 2 else registers.read_int(positions + 4 * entry)


@numba.njit(nogil=True)
def read_factors(stream, row, head, start, count, scratch):
    """The low-rank factors of a tile's tokens, by rank."""
    factors = registers.floats_at(scratch.factors, (stream.rank, TILE))
    at, stride = stream.a + row * stream.a_row + head * stream.a_head + start * stream.a_token, stream.a_token
    for r in range(stream.rank):
        for i in range(count):
            factors[r, i] = registers.read_half(at + i * stride + 2 * r)
