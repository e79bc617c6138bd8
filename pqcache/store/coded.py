"""K and V in fewer bits: a packed body, and an exact tail of the newest tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pqcache.store.buffer import Buffer
from pqcache.store.quantizer import Quantized, dequantize, quantize


class Codec:
    """Holds one tensor's packed tokens (n, h_kv, tokens, d). A codec writes append, view, map_rows, tensors."""

    def append(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Pack tokens: row r's last counts[r] of x (n, h_kv, t, d) become its tokens starts[r], starts[r]+1, ..."""
        raise NotImplementedError

    def view(self, tokens: int) -> torch.Tensor:
        """The first `tokens` tokens, decoded: (n, h_kv, tokens, d)."""
        raise NotImplementedError

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was."""
        raise NotImplementedError

    def tensors(self) -> list[torch.Tensor]:
        """Everything kept."""
        raise NotImplementedError


class TokenCodec(Codec):
    """8-bit-or-fewer codes with one (step, low) per token and KV head: any token can be packed alone, exactly once."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.dtype = torch.float32
        self.parts: list[Buffer] = []  # codes (n, h_kv, capacity, d), step and low (n, h_kv, capacity, 1)

    def append(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        packed = quantize(x, self.bits)
        self.dtype = x.dtype
        if not self.parts:
            self.parts = [Buffer.like(part) for part in packed]
        for buffer, part in zip(self.parts, packed, strict=True):
            buffer.write(part, starts, counts)

    def view(self, tokens: int) -> torch.Tensor:
        return dequantize(Quantized(*(b.view(tokens) for b in self.parts)), self.dtype)

    def map_rows(self, index: torch.Tensor) -> None:
        for buffer in self.parts:
            buffer.map_rows(index)

    def tensors(self) -> list[torch.Tensor]:
        return [b.data for b in self.parts]


class ExactCodec(Codec):
    """16 bits and more: the tokens as they are. The no-op of every quantization method."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None

    def append(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        if self.buffer is None:
            self.buffer = Buffer.like(x)
        self.buffer.write(x, starts, counts)

    def view(self, tokens: int) -> torch.Tensor:
        assert self.buffer is not None
        return self.buffer.view(tokens)

    def map_rows(self, index: torch.Tensor) -> None:
        if self.buffer is not None:
            self.buffer.map_rows(index)

    def tensors(self) -> list[torch.Tensor]:
        return [] if self.buffer is None else [self.buffer.data]


Schedule = Callable[[int], int]  # exact tokens in the tail -> how many of the oldest to pack now


def pack_all_but(residual: int) -> Schedule:
    """Keep the newest `residual` tokens exact, pack the rest at once."""
    return lambda tail: max(0, tail - residual)


def right_align(x: torch.Tensor, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """x[r, :, starts[r]:ends[r]] of every row, ending in the same column: (n, h_kv, max(ends - starts), d), zeros before."""
    if len(set(starts)) == 1 and len(set(ends)) == 1:
        return x[:, :, starts[0] : ends[0]]
    width = max(b - a for a, b in zip(starts, ends, strict=True))
    out = x.new_zeros((*x.shape[:2], width, x.shape[3]))
    for row, (a, b) in enumerate(zip(starts, ends, strict=True)):
        out[row, :, width - (b - a) :] = x[row, :, a:b]
    return out


class CodedStream:
    """One of K or V: a codec's body, then `tail` (n, h_kv, T, d), the newest tokens exact and right-aligned."""

    def __init__(self, codec: Codec, schedule: Schedule) -> None:
        self.codec = codec
        self.schedule = schedule
        self.body: list[int] = []  # packed tokens per row
        self.tails: list[int] = []  # exact tokens per row
        self.tail: torch.Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        return [a + b for a, b in zip(self.body, self.tails, strict=True)]

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

    def pack(self) -> None:
        """Move what the schedule says from the tail into the body."""
        assert self.tail is not None
        move = [self.schedule(tail) for tail in self.tails]
        if not any(move):
            return
        width = self.tail.shape[2]
        first = [width - tail for tail in self.tails]
        oldest = right_align(self.tail, first, [a + b for a, b in zip(first, move, strict=True)])
        self.codec.append(oldest, self.body, move)
        self.body = [a + b for a, b in zip(self.body, move, strict=True)]
        self.tails = [a - b for a, b in zip(self.tails, move, strict=True)]
        self.tail = self.tail[:, :, width - max(self.tails) :].clone()  # a slice would keep the packed tokens alive

    def view(self) -> torch.Tensor:
        """Every token, decoded, row r's at 0 .. lengths[r]-1: (n, h_kv, length, d)."""
        assert self.tail is not None
        body = self.codec.view(max(self.body)) if any(self.body) else self.tail[:, :, :0]
        if len(set(self.body)) == 1 and len(set(self.tails)) == 1:
            return torch.cat([body, self.tail], 2)
        out = self.tail.new_zeros((*self.tail.shape[:2], max(self.lengths), self.tail.shape[3]))
        width = self.tail.shape[2]
        for row, (a, b) in enumerate(zip(self.body, self.tails, strict=True)):
            out[row, :, :a] = body[row, :, :a]
            out[row, :, a : a + b] = self.tail[row, :, width - b :]
        return out

    def map_rows(self, index: torch.Tensor) -> None:
        if self.tail is None:
            return
        self.codec.map_rows(index)
        self.tail = self.tail.index_select(0, index.to(self.tail.device))
        rows = index.tolist()
        self.body, self.tails = [self.body[i] for i in rows], [self.tails[i] for i in rows]

    def tensors(self) -> list[torch.Tensor]:
        return self.codec.tensors() + ([] if self.tail is None else [self.tail])


class CodedStore:
    """K and V as coded streams; row r's first token has index 0."""

    whole = False  # `view` decodes everything

    def __init__(self, k: CodedStream, v: CodedStream) -> None:
        self.k, self.v = k, v

    @property
    def lengths(self) -> list[int]:
        return self.k.lengths

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    def append(self, k: torch.Tensor, v: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """Row r takes the last counts[r] (default all t) of k, v (n, h_kv, t, d), exact until `pack` runs."""
        counts = [k.shape[2]] * k.shape[0] if counts is None else counts
        self.k.append(k, counts)
        self.v.append(v, counts)

    def load(self, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], known: object = None) -> None:
        """Take what is new of a whole prompt: k, v (n, h_kv, >= max(lengths), d), row r's tokens at 0 .. lengths[r]-1."""
        held = self.lengths or [0] * len(lengths)
        counts = [total - old for total, old in zip(lengths, held, strict=True)]
        self.append(right_align(k, held, lengths), right_align(v, held, lengths), counts)

    def pack(self) -> None:
        """Pack what is due."""
        self.k.pack()
        self.v.pack()

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k.view(), self.v.view()

    def map_rows(self, index: torch.Tensor) -> None:
        self.k.map_rows(index)
        self.v.map_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        return {"device": self.k.tensors() + self.v.tensors()}
