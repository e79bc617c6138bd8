"""K and V in fewer bits: a packed body, and an exact tail of the newest tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pqcache import kernels
from pqcache.kernels.scaling import denominator
from pqcache.store.base import RetrievalStore
from pqcache.store.buffer import take_tokens
from pqcache.store.chosen import chosen_run
from pqcache.store.codec import Codec, right_align
from pqcache.store.layout import Codes, Run
from pqcache.store.row_state import RowState
from pqcache.store.transfer import table

# K and V (n, h_kv, m, d), and which entries are tokens, (n, 1 or h_kv, m) bool; None: all
Tile = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Schedule = Callable[[int], int]  # exact tokens in the tail -> how many of the oldest to pack now


@dataclass(frozen=True)
class KeepNewest:
    """The schedule that keeps the newest `residual` tokens exact and packs the rest at once."""

    residual: int

    def __call__(self, tail: int) -> int:
        return max(0, tail - self.residual)


def _rows(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """One number per row, to be compared with indices: (n, 1, 1)."""
    return table(values, device)[:, None, None]


class PackedStream(RowState):
    """One of K or V: a codec's body, then `tail` (n, h_kv, T, d), the newest tokens exact and right-aligned."""

    per_row = ("codec", "body", "tails", "tail")

    def __init__(self, codec: Codec, schedule: Schedule) -> None:
        self.codec = codec
        self.schedule = schedule
        self.body: list[int] = []  # packed tokens per row
        self.tails: list[int] = []  # exact tokens per row
        self.tail: torch.Tensor = None  # type: ignore[assignment]

    @property
    def lengths(self) -> list[int]:
        return [a + b for a, b in zip(self.body, self.tails, strict=True)]

    @property
    def heads(self) -> int:
        return self.tail.shape[1]

    @property
    def device(self) -> torch.device:
        return self.tail.device

    def append(self, x: torch.Tensor, counts: Sequence[int]) -> None:
        """Row r takes the last counts[r] of x (n, h_kv, t, d) into its tail."""
        t = x.shape[2]
        if self.tail is None:
            self.body, self.tails, self.tail = [0] * x.shape[0], [0] * x.shape[0], x[:, :, :0]
        if set(counts) == {t}:
            self.tail = torch.cat([self.tail, x], 2)
        else:
            old = self.tail.shape[2]
            width = max(a + b for a, b in zip(self.tails, counts, strict=True))
            tail = x.new_zeros((*x.shape[:2], width, x.shape[3]))
            for row, (held, new) in enumerate(zip(self.tails, counts, strict=True)):
                tail[row, :, width - new :] = x[row, :, t - new :]
                tail[row, :, width - new - held : width - new] = self.tail[row, :, old - held :]
            self.tail = tail
        self.tails = [a + b for a, b in zip(self.tails, counts, strict=True)]

    def pack(self, everything: bool = False) -> None:
        """Move tokens from the tail into the body: as many as the schedule says, or all that fill units of the codec."""
        unit = self.codec.unit
        move = [tail // unit * unit if everything else self.schedule(tail) for tail in self.tails]
        if not any(move):
            return
        width = self.tail.shape[2]
        first = [width - tail for tail in self.tails]
        oldest = right_align(self.tail, first, [a + b for a, b in zip(first, move, strict=True)])
        self.codec.append(oldest, self.body, move)
        self.body = [a + b for a, b in zip(self.body, move, strict=True)]
        self.tails = [a - b for a, b in zip(self.tails, move, strict=True)]
        self.tail = self.tail[:, :, width - max(self.tails) :].clone()  # a slice would keep the packed tokens alive

    def tile(self, lo: int, hi: int) -> torch.Tensor:
        """Tokens lo .. hi-1 of every row, whether packed or exact: (n, h_kv, hi - lo, d); zeros past a row's end."""
        last = max(self.body)
        body = self.codec.tile(lo, min(hi, last)) if lo < last else self.tail[:, :, :0]
        if len(set(self.body)) == 1 and len(set(self.tails)) == 1:
            if hi <= last:
                return body
            tail = self.tail[:, :, max(lo - last, 0) : hi - last]
            return torch.cat([body, tail], 2) if body.shape[2] else tail
        out = self.tail.new_zeros((*self.tail.shape[:2], hi - lo, self.tail.shape[3]))
        width = self.tail.shape[2]
        for row, (a, b) in enumerate(zip(self.body, self.tails, strict=True)):
            packed = min(max(a - lo, 0), hi - lo)
            out[row, :, :packed] = body[row, :, :packed]
            first, stop = max(lo, a), min(hi, a + b)
            if first < stop:
                out[row, :, first - lo : stop - lo] = self.tail[row, :, width - b + first - a : width - b + stop - a]
        return out

    def take(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """Tokens `indices` (n, H, k), decoded: (n, max(H, h_kv), k, d); -1 is padding. See Codec.take."""
        if not any(self.tails):
            return self.codec.take(indices, group)
        width = self.tail.shape[2]
        if not any(self.body):
            start = _rows([width - b for b in self.tails], indices.device)
            return take_tokens(self.tail.contiguous(), (indices + start).clamp(0, width - 1), group)
        body = _rows(self.body, indices.device)
        packed = self.codec.take(torch.minimum(indices, body - 1), group)
        shift = _rows([width - b - a for a, b in zip(self.body, self.tails, strict=True)], indices.device)
        exact = take_tokens(self.tail.contiguous(), (indices + shift).clamp(0, width - 1), group)
        return torch.where((indices >= body)[..., None], exact, packed)

    def stretch(self, lo: int, hi: int, packed: Codes | None) -> Codes:
        """Tokens lo .. hi-1 as kernels read them, all packed or all exact, where all rows have as many of either."""
        body = self.body[0]
        if hi <= body:
            assert packed is not None
            return packed.part(lo, hi)
        first = self.tail.shape[2] - self.tails[0] - body
        return Codes(32, self.tail.shape[3], self.tail[:, :, first + lo : first + hi])

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        """Keep only indices (n, h_kv, m), ascending in every head: row r keeps its first indices[r, :, :counts[r]].

        Packed tokens stay packed and exact ones stay exact, but all heads of a row must have equally many packed tokens, in whole
        units of the codec. Packed tokens that a head keeps beyond that number become exact copies of what they decode to. Waits
        for the device, to read counts.
        """
        column = torch.arange(indices.shape[2], device=indices.device)
        inside = (indices < _rows(self.body, indices.device)) & (column < _rows(counts, indices.device))
        unit = self.codec.unit
        body = [packed // unit * unit for packed in inside.sum(-1).amin(-1).tolist()]
        tails = [count - packed for count, packed in zip(counts, body, strict=True)]
        tail = self.tail[:, :, :0].clone()
        if any(tails):
            slots = _rows(counts, indices.device) - max(tails) + torch.arange(max(tails), device=indices.device)
            slots = slots.clamp_min(0).expand(*indices.shape[:2], -1)
            tail = self.take(indices.gather(2, slots))  # decoded before the codec forgets
        if any(body):
            # a row with a smaller body would name exact tokens there, which the codec does not hold
            packed_only = torch.where(column < _rows(body, indices.device), indices, 0)
            self.codec.retain(packed_only[:, :, : max(body)], body)
        elif any(self.body):
            self.codec.clear()
        self.body, self.tails, self.tail = body, tails, tail

    def view(self) -> torch.Tensor:
        """Every token, decoded, row r's at 0 .. lengths[r]-1: (n, h_kv, length, d)."""
        return self.tile(0, max(self.lengths))

    def map_rows(self, index: torch.Tensor) -> None:
        if self.tail is not None:
            # the row with the longest tail may be gone: rows of equal length must not begin with a gap
            longest = max(self.tails[i] for i in index.tolist())
            self.tail = self.tail[:, :, self.tail.shape[2] - longest :]
        super().map_rows(index)


class PackedStore(RetrievalStore):
    """K and V as coded streams; row r's first token has index 0. The streams may differ in codec and schedule."""

    per_row: ClassVar[tuple[str, ...]] = ("k", "v")

    def __init__(self, k: PackedStream, v: PackedStream) -> None:
        self.k, self.v = k, v

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.k.lengths

    def read(
        self, sinks: int, indices: torch.Tensor | None, local: int, group: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As RetrievalStore.read, in one gather. Part by part, a codec with tokens of two widths would decode both each time."""
        return self.gather(sinks, indices, local, group, self.k.device)

    def append(self, k: torch.Tensor, v: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """Row r takes the last counts[r] (default all t) of k, v (n, h_kv, t, d), exact until `pack` runs."""
        counts = [k.shape[2]] * k.shape[0] if counts is None else counts
        self.k.append(k, counts)
        self.v.append(v, counts)

    def load(self, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], known: object = None) -> None:
        """Add the new tokens of a whole prompt k, v (n, h_kv, >= max(lengths), d), row r's tokens at 0 .. lengths[r]-1."""
        held = self.lengths or [0] * len(lengths)
        counts = [total - old for total, old in zip(lengths, held, strict=True)]
        self.append(right_align(k, held, lengths), right_align(v, held, lengths), counts)

    def pack(self, everything: bool = False) -> None:
        """Pack what is due, or everything."""
        self.k.pack(everything)
        self.v.pack(everything)

    def sums_from(self, lengths: list[int]) -> int | None:
        """As StagedLayer.sums_from, for `observe`."""
        return None

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: Any) -> None:
        """A block of the prompt attends; arguments as in StagedLayer.observe. For bit widths that depend on attention."""

    def observe_step(self, q: torch.Tensor, lse: torch.Tensor, scaling: float) -> None:
        """A decode step attended, its token in the tail: q (n, h, 1, d), lse (n, h, 1) fp32 over all that it attended to."""

    def tile(self, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens lo .. hi-1, packed or exact: (n, h_kv, hi - lo, d). Other tiles are not decoded."""
        return self.k.tile(lo, hi), self.v.tile(lo, hi)

    def runs(self, exact: bool = False) -> tuple[list[Run], list[int]]:
        """The tokens whose K and V are packed, as kernels read them, and how many of each row's tokens these are.

        exact: behind them also those that one or neither stream has packed, where all rows have as many, in fp32.
        """
        k, v = self.k.codec.layout(), self.v.codec.layout()
        both = [min(pair) for pair in zip(self.k.body, self.v.body, strict=True)]
        runs: list[Run] = []
        start = 0
        for keys, values in zip(k or [], v or [], strict=False):
            tokens = min(keys.tokens, values.tokens, max(both) - start)
            if tokens <= 0:
                break
            counts = [[max(0, min(end - start, tokens))] * self.k.heads for end in both]
            runs.append(Run(keys.part(0, tokens), values.part(0, tokens), counts))
            start += tokens
            if keys.tokens != values.tokens:  # what follows begins at different tokens
                break
        if exact and runs and start == max(both) and self.even():
            return self._with_exact(runs, start, [x[0] if x and len(x) == 1 else None for x in (k, v)])
        return runs, [min(end, start) for end in both]

    def attend_in_place(
        self, q: torch.Tensor, sinks: int, indices: torch.Tensor, local: int, scaling: float, log_weight: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See RetrievalStore; chosen tokens as codes, by a kernel, where the codec's can be gathered."""
        n, length, h_kv = q.shape[0], self.length, self.k.heads
        if (
            not kernels.native(q, indices, scaling=scaling)
            or indices.shape[1] not in (1, h_kv)
            or log_weight is not None
            or bool((indices < 0).any())
        ):
            return None
        first, last = torch.arange(sinks, device=q.device), torch.arange(length - local, length, device=q.device)
        every = [first.expand(n, h_kv, -1), indices.expand(-1, h_kv, -1), last.expand(n, h_kv, -1)]
        runs = self.chosen_runs(torch.cat(every, 2))
        if not runs or not all(kernels.packed.serves(q, run) for run in runs):
            return None
        out, lse = kernels.packed.attend_codes(q, runs, scaling)
        self.observe_step(q, denominator(lse, scaling), scaling)
        return out, lse

    def chosen_runs(self, positions: torch.Tensor) -> list[Run] | None:
        """Tokens at positions (n, h_kv, m), no padding, as kernels read them: packed ones gathered as codes, then exact ones.

        None where they cannot be: see `chosen.gathered`. K and V have packed the same tokens of each row, and as many of all.
        """
        if not self.even() or self.k.body != self.v.body:
            return None
        packed = self._chosen_packed(positions)
        if packed is None or not any(self.k.tails):
            return packed
        first = self.k.body[0]
        tail = self.length - first
        keys, values = (stream.stretch(first, self.length, None) for stream in (self.k, self.v))
        exact = chosen_run(keys, values, (positions - first).clamp(0, tail - 1), positions >= first)
        return None if exact is None else [*packed, exact]

    def _chosen_packed(self, positions: torch.Tensor) -> list[Run] | None:
        """The packed ones among them."""
        k, v = self.k.codec.layout(), self.v.codec.layout()
        if not self.k.body[0]:
            return []
        if not k or not v or len(k) > 1 or len(v) > 1:
            return None
        run = chosen_run(k[0], v[0], positions.clamp_max(self.k.body[0] - 1), positions < self.k.body[0])
        return None if run is None else [run]

    def even(self) -> bool:
        """Whether all rows have as many packed tokens, and as many exact ones, in fp32."""
        return all(
            stream.tail is not None and stream.tail.dtype == torch.float32 and len(set(rows)) == 1
            for stream in (self.k, self.v)
            for rows in (stream.body, stream.tails)
        )

    def _with_exact(self, runs: list[Run], start: int, packed: list[Codes | None]) -> tuple[list[Run], list[int]]:
        """Add the tokens from `start` on of even rows; `packed`: the streams' only layouts."""
        ends, longer = (max(self.k.body[0], self.v.body[0]), self.length), packed[self.v.body[0] > self.k.body[0]]
        if start < ends[0] and (longer is None or longer.outliers is not None or longer.low_rank is not None):
            return runs, [start] * len(self.lengths)
        for lo, hi in zip((start, ends[0]), ends, strict=True):
            if lo < hi:
                keys, values = self.k.stretch(lo, hi, packed[0]), self.v.stretch(lo, hi, packed[1])
                runs.append(Run(keys, values, [[hi - lo] * self.k.heads] * len(self.lengths)))
        return runs, list(self.lengths)

    def tiles(self, size: int, read: Sequence[int] = ()) -> Iterator[Tile]:
        """Every token once, at most `size` at a time and in any order, without each row's first read[r] (see `runs`).

        Only one tile is decoded at a time.
        """
        ends, device = self.lengths, self.k.device
        read = read or [0] * len(ends)
        for lo in range(min(read), max(ends), size):
            hi = min(lo + size, max(ends))
            inside = None
            if max(read) > lo or min(ends) < hi:
                column = torch.arange(lo, hi, device=device)
                inside = (column >= _rows(read, device)) & (column < _rows(ends, device))
            yield *self.tile(lo, hi), inside

    def take(self, indices: torch.Tensor, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded."""
        return self.k.take(indices, group), self.v.take(indices, group)

    def keys(self, lo: int, hi: int) -> torch.Tensor:
        """K of positions lo .. hi-1, decoded: (n, h_kv, hi - lo, d)."""
        return self.k.tile(lo, hi)

    def keys_at(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """K of positions `indices` (n, H, m), decoded: (n, h_kv or h, m, d), undefined for -1."""
        return self.k.take(indices, group)

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        """Keep only `indices` (n, h_kv, m), ascending: row r keeps its first counts[r] entries."""
        self.v.retain(indices, counts)
        self.k.retain(indices, counts)

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything, decoded; used when a new turn begins."""
        return self.k.view(), self.v.view()
