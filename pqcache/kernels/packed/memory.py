"""What the kernel reads and what it adds up, as addresses and sizes; codes, steps and lows of one tile."""

from typing import Any

import numpy as np

from pqcache.kernels.numeric import at, floats, half, part, widen
from pqcache.kernels.packed.tiles import LINE, MOST_HEADS, TILE

WINDOW = 512  # tokens whose outliers are read at a time; a multiple of TILE

# Codes of K or V as numbers: addresses, strides in bytes (of row, KV head, token, ...), sizes. Address 0: there is none.
_FIELDS = (
    "bits",
    "d",
    "read",  # bits of a code as the tiles read it: `bits`, or 32 after decoding
    "tile",  # address of the compiled loop over a tile's codes, see tiles.py
    "table",  # the numbers that codes stand for before steps and lows, at least 16; 0: codes are the numbers
    *("codes", "codes_row", "codes_head", "codes_token"),
    "groups",  # of a token; 0: no steps and lows per token
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

# A thread's memory for each KV head of a task is a line of addresses. Arrays would count references at every use. fp32.
LOGITS = 0  # (heads, LINE); later the probabilities
BESIDE = 1  # (TILE, MOST_HEADS): the probabilities, a token's heads side by side: loops over so many are unrolled
AHEAD = 2  # (WINDOW, MOST_HEADS): what outliers add to the logits of this tile and the next ones
NUMBERS = 3  # (TILE, d), or of a few tokens: what codes stand for
STEPS, LOWS = 4, 5  # (TILE, groups): of the tile's tokens
CHANNELS = 6  # (2, d): steps (1 where there are none) and lows of a segment's channels
QUERY = 7  # (heads, d)
FOLDED = 8  # (heads, d): times the segment's steps
BESIDE_QUERY = 9  # (d, MOST_HEADS): a channel's heads side by side
SUMS = 10  # (2, heads): of the query times the segment's lows, of the folded query
FACTORS = 11  # (rank, TILE): low-rank factors of the tile's tokens
SEEN = 12  # (rank, MOST_HEADS): the query times the other factor of the block
ONE = 13  # (d,)
CURSOR = 14  # (d,) int32: each channel's next outlier
NEAR = 15  # (d,): what the code stands for that outliers of a channel have in their places, where it is one
ADDED = 16  # what a task adds up begins here: (heads, d) weighted codes
DENSE = 17  # (heads, d): the low-rank part
SPARSE = 18  # (d, MOST_HEADS): outliers' differences
WEIGHTED = 19  # (heads,): weighted lows of tokens with one group
LOW_RANK = 20  # (rank, heads): weighted factors of the current block
HIGH, MASS = 21, 22  # (heads,): the running maximum, and the sum of weights


def sizes_of(k: Any, v: Any, d: int, heads: int) -> np.ndarray:
    """Floats of each array above, for streams of any of the runs k, v (runs,) of STREAM. heads: of a block."""
    groups, rank = (max(1, int(k[name].max()), int(v[name].max())) for name in ("groups", "rank"))
    ahead = WINDOW * MOST_HEADS if k["outliers"].any() else 0
    tile, beside = TILE * groups, d * MOST_HEADS
    return np.array([
        heads * LINE, TILE * MOST_HEADS, ahead, TILE * max(d, rank), tile, tile, 2 * d, heads * d, heads * d, beside, 2 * heads,
        rank * TILE, rank * MOST_HEADS, d, d, d, heads * d, heads * d, beside, heads, rank * heads, heads, heads,
    ], np.int64)  # fmt: skip


@part
def laid_out(base, sizes, lines):
    """Addresses (lines, arrays) of arrays of so many floats, each at the start of a cache line."""
    out = np.empty((lines, sizes.shape[0]), np.int64)
    for line in range(lines):
        for i in range(sizes.shape[0]):
            out[line, i] = base
            base += (sizes[i] * 4 + 63) // 64 * 64
    return out


@part
def code_at(address, bits, channel):
    """One code of a token at an address, 8 bits or less: codes are a stream of bits, the lowest first."""
    bit = channel * bits
    row = at(address, (bit + bits + 7) // 8, np.uint8(0))
    word = np.int64(row[bit >> 3])
    if (bit & 7) + bits > 8:
        word |= np.int64(row[(bit >> 3) + 1]) << 8
    return np.float32((word >> (bit & 7)) & ((1 << bits) - 1))


@part
def half_at(address):
    """The fp16 number at an address."""
    return half(at(address, 1, np.int16(0))[0])


@part
def position_at(positions, size, entry):
    """Outliers' positions have `size` bytes."""
    if size == 2:
        return np.int64(at(positions + 2 * entry, 1, np.int16(0))[0])
    return np.int64(at(positions + 4 * entry, 1, np.int32(0))[0])


@part
def read_channels(stream, offset, mem):
    """A segment's channel steps and lows; their place is `offset` bytes from the first ones."""
    for which, source in enumerate((stream.channel_step, stream.channel_low)):
        line = floats(mem[CHANNELS] + 4 * which * stream.d, stream.d)
        if source:
            widen(source + offset, line)
        else:
            line[:] = 1 - which


@part
def _decode(stream, base, count, mem):
    """Write to NUMBERS what `count` tokens' codes at `base` stand for under their groups' steps and lows."""
    groups = max(1, stream.groups)
    out, each = floats(mem[NUMBERS], (TILE, stream.d)), stream.d // groups
    steps, lows = floats(mem[STEPS], (TILE, groups)), floats(mem[LOWS], (TILE, groups))
    for i in range(count):
        address = base + i * stream.codes_token
        for j in range(stream.d):
            number = code_at(address, stream.bits, j)
            if stream.table:
                number = floats(stream.table, 1 << stream.bits)[np.int64(number)]
            out[i, j] = number
            if stream.groups:
                out[i, j] = out[i, j] * steps[i, j // each] + lows[i, j // each]


@part
def read_tile(stream, row, head, start, count, mem):
    """Read a tile's steps and lows; the address of its codes, or of what they stand for, and bytes from token to token."""
    groups = stream.groups
    if groups:
        place = row * stream.token_row + head * stream.token_head + start * stream.token_token
        for source, to in ((stream.token_step, mem[STEPS]), (stream.token_low, mem[LOWS])):
            if not source:
                floats(to, count * groups)[:] = 0
            elif stream.token_token == 2 * groups:
                widen(source + place, floats(to, count * groups))
            else:
                for i in range(count):
                    widen(source + place + i * stream.token_token, floats(to + 4 * i * groups, groups))
    codes = stream.codes + row * stream.codes_row + head * stream.codes_head + start * stream.codes_token
    if stream.read == stream.bits:
        return codes, stream.codes_token
    _decode(stream, codes, count, mem)
    return mem[NUMBERS], 4 * stream.d


@part
def read_factors(stream, row, head, start, count, mem):
    """The low-rank factors of a tile's tokens, by rank. Codes that were written to NUMBERS are lost."""
    rank, size = stream.rank, count * stream.rank
    factors, line = floats(mem[FACTORS], rank * TILE), floats(mem[NUMBERS], size)
    address = stream.a + row * stream.a_row + head * stream.a_head + start * stream.a_token
    if stream.a_token == 2 * rank:
        widen(address, line)
    else:
        for i in range(count):
            widen(address + i * stream.a_token, line[i * rank : (i + 1) * rank])
    for r in range(rank):
        for i in range(count):
            factors[r * TILE + i] = line[i * rank + r]
