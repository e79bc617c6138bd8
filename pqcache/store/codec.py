"""Codecs: tokens of one tensor in fewer bits. A quantization method writes one; most write BufferCodec's encode and decode."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from pqcache.store.buffer import STEP, Buffer, take_tokens, write_each
from pqcache.store.layout import Codes
from pqcache.store.quantizer import Quantized, dequantize, pack_codes, quantize, unpack_codes
from pqcache.store.row_state import RowState


class Codec(RowState):
    """Holds the packed tokens of K or of V, (n, h_kv, tokens, d). A token's index is its position among them.

    A codec writes append, tile, take, clear, and names what it keeps in `per_row` (see RowState). It writes retain if it can drop
    tokens without coding the others again. A codec that codes tokens one by one starts from BufferCodec.
    """

    per_row: ClassVar[tuple[str, ...]] = ("parts",)

    # tokens are packed in multiples of this: schedules return multiples, `retain` leaves the remainder of a row in the tail
    unit = 1

    def append(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Pack tokens: row r's last counts[r] of x (n, h_kv, t, d) become its tokens starts[r], starts[r]+1, ..."""
        raise NotImplementedError

    def tile(self, lo: int, hi: int) -> torch.Tensor:
        """Tokens lo .. hi-1, decoded: (n, h_kv, hi - lo, d). Past a row's end: anything finite. Must not decode all tokens."""
        raise NotImplementedError

    def take(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """Tokens `indices` (n, H, k), decoded: (n, max(H, h_kv), k, d). -1 is padding and may give anything finite.

        H as in `take_tokens`: 1 for all heads, h_kv, or h_kv * group (one choice per query head).
        """
        raise NotImplementedError

    def layout(self) -> list[Codes] | None:
        """How the packed tokens are stored, in runs by index, so that kernels need not decode them; None: decode instead.

        Runs may name more tokens than a row has.
        """
        return None

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        """Keep only indices (n, h_kv, m), ascending: row r's new tokens are its old ones indices[r, :, :counts[r]].

        Default: decode the tokens that stay and code them again, with new ranges.
        """
        kept = self.take(indices)
        self.clear()
        self.append(right_align(kept, [0] * len(counts), counts), [0] * len(counts), counts)

    def clear(self) -> None:
        """Forget all tokens."""
        raise NotImplementedError


class BufferCodec(Codec):
    """Base of codecs whose tokens are coded one by one: a few buffers (n, h_kv, capacity, *rest) with one entry per token.

    A subclass writes encode and decode. Any token can be packed, taken and dropped alone, and is coded exactly once.
    step: tokens per growth of the buffers.
    """

    def __init__(self, step: int = STEP) -> None:
        self.step = step
        self.parts: list[Buffer] = []
        self.dtype, self.d = torch.float32, 0

    def encode(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x (n, h_kv, t, d) -> parts, each (n, h_kv, t, *rest)."""
        raise NotImplementedError

    def decode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts of any number of tokens -> (n, heads, t, d)."""
        raise NotImplementedError

    def append(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        self.dtype, self.d = x.dtype, x.shape[3]
        packed = self.encode(x)
        if not self.parts:
            self.parts = [Buffer.like(part, step=self.step) for part in packed]
        write_each(self.parts, packed, starts, counts)

    def tile(self, lo: int, hi: int) -> torch.Tensor:
        return self.decode([b.data[:, :, lo:hi] for b in self.parts])

    def take(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        return self.decode([take_tokens(b.data, indices, group) for b in self.parts])

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        for i, buffer in enumerate(self.parts):
            kept = take_tokens(buffer.data, indices)
            self.parts[i] = Buffer.like(kept, step=self.step)  # the old one is released, with all that was dropped
            self.parts[i].write(kept, [0] * len(counts), [kept.shape[2]] * len(counts))

    def clear(self) -> None:
        self.parts = []


class TokenCodec(BufferCodec):
    """Codes of `bits` bits with one (step, low) per `group` consecutive channels (None: per token and KV head)."""

    def __init__(self, bits: int, group: int | None = None, step: int = STEP) -> None:
        super().__init__(step)
        self.bits = bits
        self.group = group

    def encode(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        codes, step, low = quantize(x.unflatten(-1, (-1, self.group or x.shape[-1])), self.bits)
        return pack_codes(codes.flatten(-2), self.bits), step.squeeze(-1), low.squeeze(-1)

    def decode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        packed, step, low = parts
        codes = unpack_codes(packed, self.bits, self.d).unflatten(-1, (step.shape[-1], -1))
        return dequantize(Quantized(codes, step[..., None], low[..., None]), self.dtype).flatten(-2)

    def layout(self) -> list[Codes] | None:
        if not self.parts:
            return []
        codes, step, low = (part.view(part.filled) for part in self.parts)
        return [Codes(self.bits, self.d, codes, token_step=step, token_low=low)]


class ExactCodec(BufferCodec):
    """16 bits and more: the tokens as they are. The no-op of every quantization method."""

    def encode(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return (x,)

    def decode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0]


def right_align(x: torch.Tensor, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """x[r, :, starts[r]:ends[r]] of every row, ending in the same column: (n, h_kv, max(ends - starts), d), zeros before."""
    if len(set(starts)) == 1 and len(set(ends)) == 1:
        return x[:, :, starts[0] : ends[0]]
    width = max(b - a for a, b in zip(starts, ends, strict=True))
    out = x.new_zeros((*x.shape[:2], width, x.shape[3]))
    for row, (a, b) in enumerate(zip(starts, ends, strict=True)):
        out[row, :, width - (b - a) :] = x[row, :, a:b]
    return out
