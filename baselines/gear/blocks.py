"""GEAR's blocks of tokens: codes, outliers and a low-rank part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from pqcache.selective.budget import floor_share
from pqcache.selective.group import top_tokens
from pqcache.store.buffer import STEP, Buffer, take_tokens
from pqcache.store.codec import Codec, right_align
from pqcache.store.layout import Codes, LowRank, Outliers
from pqcache.store.packed import PackedStream
from pqcache.store.quantizer import Quantized, dequantize, finite, pack_codes, quantize, unpack_codes

FEW = 8  # growth step of buffers whose entries cover many tokens each
SMALL = 256  # tokens of a block that is decoded with its neighbours; longer ones are decoded in part
TILE = 1024  # tokens decoded at a time by `take`


def split_outliers(
    x: torch.Tensor, side: int, mean_of_all: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `side` largest and `side` smallest entries of each vector x (n, c, m), ties to the lower position.

    Returns their values and positions (n, c, 2 side), positions ascending, and x with the mean of the other entries in their
    place, so that the quantizer's range is that of the others. mean_of_all: the mean of all entries instead.
    """
    n, c, m = x.shape
    if side == 0:
        return x[..., :0], torch.zeros((n, c, 0), dtype=torch.long, device=x.device), x
    x = x.contiguous()
    positions = _extremes(x, side)
    values = x.gather(-1, positions)
    rest = x.scatter(-1, positions, 0)
    mean = x.mean(-1, keepdim=True) if mean_of_all else rest.sum(-1, keepdim=True) / max(1, m - 2 * side)
    return values, positions, rest.scatter_(-1, positions, mean.expand_as(positions))


def _extremes(x: torch.Tensor, side: int) -> torch.Tensor:
    """Positions of the `side` largest and `side` smallest entries of each vector x (n, c, m): (n, c, 2 side), ascending.

    On a CPU topk finds both where no vector has equal entries on either side of its choice. Only elsewhere are ties resolved.
    """
    n, c, m = x.shape
    if x.device.type == "cpu" and 2 * side <= m:  # to look at ties would wait for a GPU
        high, low = x.topk(side, sorted=False), x.topk(side, largest=False, sorted=False)
        above, below = high.values.amin(-1, keepdim=True), low.values.amax(-1, keepdim=True)
        chosen = (x >= above).count_nonzero() + (x <= below).count_nonzero()
        if bool((below < above).all()) and int(chosen) == 2 * n * c * side:  # NaN fails the first
            return torch.cat([high.indices, low.indices], -1).sort(-1).values
    high_ones = top_tokens(x, [side] * n)
    low_ones = top_tokens((-x).scatter_(-1, high_ones, -torch.inf), [side] * n)
    return torch.cat([high_ones, low_ones], -1).sort(-1).values


def low_rank(error: torch.Tensor, rank: int, rounds: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors a (h, l, r), b (h, r, d) in fp16 with a @ b near error (h, l, d), r = min(rank, l, d).

    Power iteration: Q = orth(E orth(P)), P = E^T Q, from the same random P for every matrix; a @ b = Q P^T is the projection of
    E onto r directions, so that subtracting it never makes the error larger. Each factor takes the square root of a
    direction's size: P alone may exceed fp16's range.
    """
    h, length, d = error.shape
    r = min(rank, length, d)
    start = torch.randn((d, r), generator=torch.Generator().manual_seed(seed))
    p = start.to(error.device).expand(h, d, r)
    for _ in range(rounds):
        q = torch.linalg.qr(error @ torch.linalg.qr(p).Q).Q
        p = error.transpose(1, 2) @ q
    size = p.norm(dim=1, keepdim=True).sqrt()  # (h, 1, r)
    b = (p / size.clamp_min(2**-24)).transpose(1, 2)  # smaller sizes are zero in fp16: avoid 0 * inf
    return (q * size).half(), b.half()


def released_outliers(channels: int, share: float) -> int:
    """Outliers per side in the released code, of a token's channels and of a channel's tokens alike."""
    return floor_share(channels, share) // 2


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of one row that have the same sizes."""

    start: int  # first token
    blocks: int
    length: int  # tokens per block
    # entries per block in the buffers of parameters, outliers, a and b; 0, 0, ... if the first two have one entry per token
    sizes: tuple[int, int, int, int]
    offsets: tuple[int, ...]  # the first block's first entries in those buffers

    @property
    def end(self) -> tuple[int, ...]:
        """The next block's first entries in the buffers."""
        return tuple(offset + self.blocks * size for offset, size in zip(self.offsets, self.sizes, strict=True))


class BlockCodec(Codec):
    """Blocks of tokens as codes, outliers and a low-rank part; each `append` makes one block per row.

    group: numbers of a vector per (step, low); None: all. outliers: share of each vector. rank: of the blocks to come. released:
    outliers are counted and replaced as in the released code.

    Subclasses define which numbers make a vector, and where its parameters and outliers are stored.
    """

    per_row = ("parts", "runs")
    per_token = False  # whether parameters and outliers have one entry per token; if not, some entries per block

    def __init__(
        self, bits: int, group: int | None, outliers: float, rank: int, rounds: int, seed: int, released: bool = False
    ) -> None:
        self.bits, self.group, self.outliers = bits, group, outliers
        self.rank, self.rounds, self.seed, self.released = rank, rounds, seed, released
        # codes (n, h_kv, tokens, bytes), a (n, h_kv, numbers), b (n, h_kv, ranks, d); parameters and outliers: see subclasses
        self.parts: dict[str, Buffer] = {}
        self.runs: list[list[Run]] = []  # per row
        self.shape = (0, 0, 0)  # n, h_kv, d
        self.dtype = torch.float32

    # -- what a subclass writes -------------------------------------------------------------------------------------

    def vectors(self, x: torch.Tensor) -> torch.Tensor:
        """(n, h_kv, l, d) -> (n, heads, vectors, entries). A vector shares parameters and is searched for outliers."""
        raise NotImplementedError

    def tokens(self, vectors: torch.Tensor) -> torch.Tensor:
        """The inverse of `vectors`."""
        raise NotImplementedError

    def near(
        self, rows: slice, codes: torch.Tensor, run: Run, start: int, first: int, span: tuple[int, int]
    ) -> torch.Tensor:
        """Dequantized codes with the outliers in their places: fp32, as codes (rows, h_kv, t, d).

        The first token is `start`. The codes are tokens span[0] .. span[1]-1 of each block, from the run's block `first` on.
        """
        raise NotImplementedError

    def describe(self, run: Run, codes: torch.Tensor, low_rank: LowRank | None) -> Codes | None:
        """One run's parameters and outliers beside its codes (n, h_kv, tokens, bytes); None where no kernel can read them."""
        raise NotImplementedError

    @property
    def alike(self) -> bool:
        """Whether the codes in the places of a vector's outliers are equal: one mean was coded there, under one step and low."""
        return self.group is None

    def outliers_per_side(self, entries: int) -> int:
        """Largest (and as many smallest) numbers of a vector of `entries` that are stored exactly."""
        if not self.released:
            return floor_share(entries, self.outliers / 2)
        return min(released_outliers(self.shape[1] * self.shape[2], self.outliers), entries // 2)

    # -- coding -----------------------------------------------------------------------------------------------------

    def append(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Row by row: a block has its own ranges, and rows may hold blocks of different length."""
        n, h, t, d = x.shape
        self.dtype, self.shape = x.dtype, (n, h, d)
        self.runs = self.runs or [[] for _ in range(n)]
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count:
                self._append(row, start, x[row : row + 1, :, t - count :].detach())

    def _append(self, row: int, start: int, x: torch.Tensor) -> None:
        """One block, x (1, h_kv, l, d), as tokens `start`, start + 1, ... of a row."""
        exact = x.float()
        vectors = self.vectors(exact)
        side = self.outliers_per_side(vectors.shape[3])
        values, positions, rest = split_outliers(vectors[0], side, mean_of_all=self.released)
        packed = quantize(rest.unflatten(2, (-1, self.group or rest.shape[2])), self.bits)
        near = dequantize(packed, torch.float32).flatten(2).scatter_(2, positions, values)
        a, b = low_rank((exact - self.tokens(near[None]))[0], self.rank, self.rounds, self.seed)
        codes = self.tokens(packed.codes.flatten(2)[None])[0]
        wide = vectors.shape[3] > torch.iinfo(torch.int16).max
        positions = positions.to(torch.int32 if wide else torch.int16)
        parts = [packed.step.squeeze(3), packed.low.squeeze(3), values.to(x.dtype), positions]
        if not self.per_token:
            parts = [part.transpose(1, 2) for part in parts]

        runs, length, rank = self.runs[row], *a.shape[1:]
        sizes = (0, 0) if self.per_token else (parts[0].shape[1], parts[2].shape[1])
        run = Run(start, 1, length, (*sizes, length * rank, rank), runs[-1].end if runs else (0, 0, 0, 0))
        at, step = (run.offsets, FEW) if not self.per_token else ((start, start, *run.offsets[2:]), STEP)
        self._put("codes", row, start, pack_codes(codes, self.bits), STEP)
        for name, where, part in zip(("step", "low", "values", "positions"), (0, 0, 1, 1), parts, strict=True):
            self._put(name, row, at[where], part, step)
        self._put("a", row, at[2], a.flatten(1), STEP)
        self._put("b", row, at[3], b, FEW)
        if runs and length <= SMALL and (runs[-1].length, runs[-1].sizes) == (length, run.sizes):
            runs[-1] = replace(runs[-1], blocks=runs[-1].blocks + 1)
        else:
            runs.append(run)

    def _put(self, name: str, row: int, at: int, part: torch.Tensor, step: int) -> None:
        """part (heads, entries, *rest) as a row's entries at, at + 1, ..."""
        if not part.numel():
            return
        if name not in self.parts:
            self.parts[name] = Buffer(self.shape[0], part.shape[0], part.shape[2:], part.dtype, part.device, step=step)
        buffer = self.parts[name]
        if part.dtype.itemsize > buffer.data.dtype.itemsize:  # the first block whose positions need 32 bits
            buffer.data = buffer.data.to(part.dtype)
        buffer.reserve(at + part.shape[1])
        buffer.data[row, :, at : at + part.shape[1]] = part

    # -- decoding ---------------------------------------------------------------------------------------------------

    def tile(self, lo: int, hi: int) -> torch.Tensor:
        n, h, d = self.shape
        out = torch.zeros((n, h, hi - lo, d), dtype=self.dtype, device=self.parts["codes"].data.device)
        together = all(runs == self.runs[0] for runs in self.runs)
        for rows in [slice(0, n)] if together else [slice(row, row + 1) for row in range(n)]:
            for run in self.runs[rows.start]:
                first, last = max(lo, run.start), min(hi, run.start + run.blocks * run.length)
                if first < last:
                    decoded = self._decode(rows, run, first - run.start, last - run.start)
                    out[rows, :, first - lo : last - lo] = finite(decoded, self.dtype)
        return out

    def _decode(self, rows: slice, run: Run, lo: int, hi: int) -> torch.Tensor:
        """Tokens lo .. hi-1 of a run, fp32 (rows, h_kv, hi - lo, d): a part of one block, or several small blocks whole."""
        first, last = lo // run.length, (hi - 1) // run.length
        blocks = last + 1 - first
        span = (0, run.length) if blocks > 1 else (lo - first * run.length, hi - first * run.length)
        offset = first * run.length + span[0]  # of the first token decoded
        t = blocks * (span[1] - span[0])
        start = run.start + offset
        codes = unpack_codes(self.parts["codes"].data[rows, :, start : start + t], self.bits, self.shape[2])
        out = self.near(rows, codes, run, start, first, span)
        rank = run.sizes[3]
        if rank:
            a, b = run.offsets[2] + offset * rank, run.offsets[3] + first * rank
            left = self.parts["a"].data[rows, :, a : a + t * rank].float()
            right = self.parts["b"].data[rows, :, b : b + blocks * rank].float()
            both = left.unflatten(2, (blocks, -1, rank)) @ right.unflatten(2, (blocks, rank))
            out = out + both.flatten(2, 3)
        return out[:, :, lo - offset : hi - offset]

    def layout(self) -> list[Codes] | None:
        """One run per Run, if all rows have the same."""
        if any(runs != self.runs[0] for runs in self.runs):
            return None
        out = []
        for run in self.runs[0] if self.runs else []:
            tokens, rank = run.blocks * run.length, run.sizes[3]
            low_rank = None
            if rank:
                a = self._entries("a", run.offsets[2], tokens * rank).unflatten(2, (tokens, rank))
                b = self._entries("b", run.offsets[3], run.blocks * rank).unflatten(2, (run.blocks, rank))
                low_rank = LowRank(a, b, run.length)
            described = self.describe(run, self._entries("codes", run.start, tokens), low_rank)
            if described is None:
                return None
            out.append(described)
        return out

    def _entries(self, name: str, start: int, count: int) -> torch.Tensor:
        """`count` entries of a buffer from `start` on, no copy."""
        return self.parts[name].data[:, :, start : start + count]

    def take(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """Outliers of keys are stored by channel, so no token can be looked up: all are decoded, one tile at a time."""
        n, h, d = self.shape
        end = max(runs[-1].start + runs[-1].blocks * runs[-1].length if runs else 0 for runs in self.runs)
        out: torch.Tensor | None = None
        for lo in range(0, end, TILE):
            tile = self.tile(lo, min(lo + TILE, end))
            local = indices - lo
            taken = take_tokens(tile, local.clamp(0, tile.shape[2] - 1), group)
            out = taken if out is None else torch.where((local >= 0)[..., None], taken, out)
        assert out is not None
        return out

    def clear(self) -> None:
        self.parts, self.runs = {}, []

    def forget(self, row: int) -> None:
        """Drop the blocks of one row."""
        if self.runs:
            self.runs[row] = []

    def map_rows(self, index: torch.Tensor) -> None:
        super().map_rows(index)
        self.shape = (len(self.runs), *self.shape[1:])


class KeyCodec(BlockCodec):
    """Vectors are a channel's tokens in the block; parameters and outliers (n, h_kv, entries, d)."""

    def vectors(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(2, 3)

    def tokens(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors.transpose(2, 3)

    def describe(self, run: Run, codes: torch.Tensor, low_rank: LowRank | None) -> Codes | None:
        entries, count = run.blocks * run.sizes[0], run.sizes[1]
        step, low = (self._entries(name, run.offsets[0], entries) for name in ("step", "low"))
        outliers = None
        if count:
            values, positions = (
                self._entries(name, run.offsets[1], run.blocks * count).unflatten(2, (run.blocks, count))
                for name in ("values", "positions")
            )
            outliers = Outliers(values, positions, run.length, alike=self.alike)
        span = run.length // run.sizes[0]
        return Codes(self.bits, self.shape[2], codes, None, None, step, low, span, outliers, low_rank)

    def near(
        self, rows: slice, codes: torch.Tensor, run: Run, start: int, first: int, span: tuple[int, int]
    ) -> torch.Tensor:
        per = run.length // run.sizes[0]  # tokens per parameter
        offset = start - run.start
        entry = torch.arange(offset, offset + codes.shape[2], device=codes.device) // per + run.offsets[0]
        step, low = (self.parts[name].data[rows].index_select(2, entry) for name in ("step", "low"))
        out = dequantize(Quantized(codes, step, low), torch.float32)
        count = run.sizes[1]
        if not count:
            return out
        width = span[1] - span[0]
        blocks = codes.shape[2] // width
        out = F.pad(out.unflatten(2, (blocks, width)), (0, 0, 0, 1))  # the last line takes outliers of other tokens
        lo = run.offsets[1] + first * count
        values, positions = (
            self.parts[name].data[rows, :, lo : lo + blocks * count].unflatten(2, (blocks, count))
            for name in ("values", "positions")
        )
        for i in range(0, count, SMALL):  # a few at a time: their number grows with the block
            at = positions[:, :, :, i : i + SMALL].long() - span[0]
            at = torch.where((at >= 0) & (at < width), at, width)
            out.scatter_(3, at, values[:, :, :, i : i + SMALL].float())
        return out[:, :, :, :width].flatten(2, 3)


class ValueCodec(BlockCodec):
    """Vectors are a token's channels, all KV heads jointly; parameters and outliers (n, 1, tokens, entries)."""

    per_token = True

    def vectors(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(2)[:, None]

    def tokens(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[:, 0].unflatten(2, (self.shape[1], -1)).transpose(1, 2)

    def describe(self, run: Run, codes: torch.Tensor, low_rank: LowRank | None) -> Codes | None:
        n, h, d = self.shape
        tokens = codes.shape[2]
        step, low, *sparse = (
            self._entries(name, run.start, tokens)
            for name in ("step", "low", "values", "positions")
            if name in self.parts
        )
        if step.shape[3] == 1:  # one for all KV heads
            step, low = (x.expand(n, h, -1, -1) for x in (step, low))
        elif step.shape[3] % h == 0:
            step, low = (x[:, 0].unflatten(2, (h, -1)).transpose(1, 2) for x in (step, low))
        else:
            return None
        outliers = Outliers(sparse[0], sparse[1], alike=self.alike) if sparse else None
        return Codes(self.bits, d, codes, step, low, outliers=outliers, low_rank=low_rank)

    def near(
        self, rows: slice, codes: torch.Tensor, run: Run, start: int, first: int, span: tuple[int, int]
    ) -> torch.Tensor:
        tokens = slice(start, start + codes.shape[2])
        step, low = (self.parts[name].data[rows, :, tokens, :, None] for name in ("step", "low"))
        codes = self.vectors(codes).unflatten(3, (step.shape[3], -1))
        out = dequantize(Quantized(codes, step, low), torch.float32).flatten(3)
        if "values" in self.parts:
            values, positions = (self.parts[name].data[rows, :, tokens] for name in ("values", "positions"))
            out = out.scatter(3, positions.long(), values.float())
        return self.tokens(out)


class BlockStream(PackedStream):
    """A prompt, or a turn with the exact tokens before it, is one block. Later blocks have `residual` tokens and their own rank.

    Tokens that do not fill a `unit`, the group of the backbone, stay exact in the tail.
    """

    def __init__(self, codec: BlockCodec, unit: int, residual: int, ranks: tuple[int, int]) -> None:
        super().__init__(codec, lambda tail: tail)
        self.blocks, self.sizes, self.ranks = codec, (unit, residual), ranks
        codec.unit = unit

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        self.blocks.rank = self.ranks[0]  # the tokens that stay are one block
        super().retain(indices, counts)

    def pack(self, everything: bool = False) -> None:
        size, self.blocks.rank = (x[not everything] for x in (self.sizes, self.ranks))
        self.schedule = lambda tail: tail // size * size
        super().pack()


class WholeStream(BlockStream):
    """As the released code: a row whose tokens are a multiple of `residual` becomes one block of the later blocks' rank."""

    def pack(self, everything: bool = False) -> None:
        size, self.blocks.rank = self.sizes[1], self.ranks[1]
        due = [tail > 0 and (body + tail) % size == 0 for body, tail in zip(self.body, self.tails, strict=True)]
        if not any(due):
            return
        whole, counts = self.view(), [length * flag for length, flag in zip(self.lengths, due, strict=True)]
        for row, flag in enumerate(due):
            if flag:
                self.blocks.forget(row)
        starts = [0] * len(due)
        self.blocks.append(right_align(whole, starts, counts), starts, counts)
        self.body = [count or body for count, body in zip(counts, self.body, strict=True)]
        left = [0 if flag else tail for flag, tail in zip(due, self.tails, strict=True)]
        self.tails, self.tail = left, self.tail[:, :, self.tail.shape[2] - max(left) :].clone()
