"""KIVI: 2-bit keys per channel, values per token, the newest in full (Liu et al., arXiv 2402.02750, section 3).

Keys have one (step, minimum) pair of fp16 per KV head, channel and `group` tokens; values one per KV head, token and `group`
channels. Keys are packed `residual` tokens at a time, so L mod residual of L tokens are exact; of the values the newest
min(L, residual) are. A prompt of fewer than `residual` tokens stays exact.

Bits per number: bits + 32 / group in the body. Compression against 16 bits at 2 bits and group = 32 (`accounted_ratio`), and
what ZipCache's tables print for KIVI:

    tokens (residual)    120 (32)    840 (128)    3072 (256)
    this rule                2.65         3.52          4.52
    ZipCache's tables        2.55         3.46          4.36

The closest rule tried gives 2.56, 3.48 and 4.37: one pair per channel over all keys, 34 bits per value group and `residual`
exact tokens on both sides.

At 2 bits a small model with grouped queries is not lossless. On SmolLM2-135M (heads of 64, three query heads a KV head) the
likeliest token is Full's in 0.81 of the steps, with a KL of 0.160 (six windows of 2,048 tokens of a novel). On other prompts of
2,000 tokens it is in 0.88, at 3 bits in 0.94, at 4 in 0.96. Keys lose most: of a KL of 0.112 there 0.087 remains with exact
values, 0.014 with exact keys. The attention sink's key is a quarter of it.

protocol=release is the same: the release does what the paper's Algorithm 1 says, at the sizes of its LongBench runs (group 32,
residual 128), which are the defaults here.

Deviations:
- A group of equal numbers is stored exactly, where the release divides by its range of zero.
- A new turn's tokens follow the same rules behind what is packed, which stays as it is.
- Under an evictor (method=coded method.policy=snapkv method.codec=kivi) tokens are dropped first, then packed. Only a later
  turn's eviction drops tokens of packed groups of keys, whose others are then packed again (`Codec.retain`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from pqcache.fields import Bits, Positive
from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.buffer import STEP, Buffer, take_tokens, write_each
from pqcache.store.codec import Codec, ExactCodec, TokenCodec
from pqcache.store.layout import Codes
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream
from pqcache.store.quantizer import Quantized, dequantize, pack_codes, quantize, unpack_codes

GROUPS_PER_STEP = 8  # parameters grow with the codes: 8 groups of 32 are 256 tokens


class ChannelCodec(Codec):
    """`bits`-bit codes with one (step, low) per channel of `group` consecutive tokens; tokens come in whole groups.

    step: tokens per growth of the buffers.
    """

    def __init__(self, bits: int, group: int, step: int = STEP) -> None:
        self.bits, self.step = bits, step
        self.unit = self.group = group
        self.dtype, self.d = torch.float32, 0
        self.parts: list[Buffer] = []  # codes (n, h_kv, capacity, bytes); step and low (n, h_kv, groups, d)

    def append(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        self.dtype, self.d = x.dtype, x.shape[3]
        codes, step, low = quantize(x.unflatten(2, (-1, self.group)), self.bits, dim=3)
        new = pack_codes(codes.flatten(2, 3), self.bits), step.squeeze(3), low.squeeze(3)
        if not self.parts:
            groups = min(self.step, GROUPS_PER_STEP)
            self.parts = [Buffer.like(new[0], step=self.step), *(Buffer.like(p, step=groups) for p in new[1:])]
        self.parts[0].write(new[0], starts, counts)
        write_each(self.parts[1:], new[1:], [s // self.group for s in starts], [c // self.group for c in counts])

    def tile(self, lo: int, hi: int) -> torch.Tensor:
        """Tokens lo .. hi-1. Whole groups are decoded: up to group - 1 more tokens at either end."""
        first, last = lo // self.group, -(-hi // self.group)
        codes = self.parts[0].data[:, :, first * self.group : last * self.group]
        step, low = (b.data[:, :, first:last, None] for b in self.parts[1:])
        codes = unpack_codes(codes, self.bits, self.d).unflatten(2, (-1, self.group))
        whole = dequantize(Quantized(codes, step, low), self.dtype).flatten(2, 3)
        return whole[:, :, lo - first * self.group : hi - first * self.group]

    def take(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        codes = unpack_codes(take_tokens(self.parts[0].data, indices, group), self.bits, self.d)
        step, low = (take_tokens(b.data, indices // self.group, group) for b in self.parts[1:])
        return dequantize(Quantized(codes, step, low), self.dtype)

    def layout(self) -> list[Codes] | None:
        if not self.parts:
            return []
        codes, step, low = (part.view(part.filled) for part in self.parts)
        return [Codes(self.bits, self.d, codes, channel_step=step, channel_low=low, span=self.group)]

    def clear(self) -> None:
        self.parts = []


def accounted_ratio(tokens: int, bits: int = 2, group: int = 32, residual: int = 128) -> float:
    """16-bit K + V over codes, 16-bit parameters and exact tails at `tokens` tokens, by KIVI's rules; no buffer capacity."""
    packed = bits + 32 / group
    tails = tokens % residual, min(tokens, residual)
    return 32 * tokens / sum(16 * tail + packed * (tokens - tail) for tail in tails)


@dataclass(kw_only=True)
class KIVI(QuantizationMethod):
    """Every token in `bits` bits, apart from the newest. Ignores the budget. The authors advise bits=4 for GQA models."""

    name: ClassVar[str] = "kivi"
    released: ClassVar[str] = "jy-yuan/KIVI: models/llama_kivi.py"
    noop_options: ClassVar[dict[str, Any]] = {"bits": 16}

    # bits per number, 1 to 8; 16: the no-op
    bits: Bits = 2
    # tokens of a key channel, and channels of a value, that share a step and a minimum (the paper's G)
    group: Positive = 32
    # newest tokens kept exact, a multiple of group (the paper's R)
    residual: Positive = 128

    def validate(self) -> None:
        self.require("residual", self.residual % self.group == 0, f"a multiple of group={self.group}")

    def check_model(self, config: PreTrainedConfig) -> None:
        d = ModelShape.of(config).unit
        self.require("group", self.bits == 16 or d % self.group == 0, f"a divisor of the head dimension {d}")

    def published_ratio(self, tokens: int, shape: ModelShape) -> float | None:
        return None if self.bits == 16 else accounted_ratio(tokens, self.bits, self.group, self.residual)

    def make_store(self, layer_idx: int, shape: ModelShape) -> PackedStore:
        exact = self.bits == 16
        k = ExactCodec() if exact else ChannelCodec(self.bits, self.group)
        v = ExactCodec() if exact else TokenCodec(self.bits, self.group)
        return PackedStore(
            PackedStream(k, lambda tail: tail // self.residual * self.residual),
            PackedStream(v, KeepNewest(self.residual)),
        )
