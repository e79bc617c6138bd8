"""GEAR: codes, and their error as a few outliers and a low-rank matrix (Kang et al., arXiv 2403.05527, section 3).

Tokens are packed in blocks. A block has codes, fp16 parameters, outliers in the model's type with their positions, and two
low-rank factors in fp16. Positions have 16 bits, or 32 where a block or the channels exceed 32767.

Compression against 16 bits at 4 bits and 4096 channels (`accounted_ratio`):

    tokens of the block     120    840   3072
    16-bit positions       2.75   3.05   3.09
    32-bit positions       2.61   2.88   2.91

ZipCache's tables print a constant 3.00, which is none of them. Small blocks compress less: at 64 tokens a channel has no
outliers (floor of 0.64), but it has parameters.

protocol=release is what the released code does instead:

- A prompt stays exact. Whenever the cache holds a multiple of `residual` tokens, all of them become one block of rank
  `new_rank`: what was packed before is coded again from what it decodes to.
- Outliers per key channel are counted from the channels of a token: at 4096 channels 40 largest and 40 smallest, 9.5 % of 840
  tokens, and every one of 64.
- Removed outliers are replaced by the mean of the whole vector, which can widen the range of the others.

Deviations:
- 2^bits - 1 steps per range. The release has bits^2 - 1, which is the same at 2 and 4 bits, and leaves codes unused or does not
  fit at others.
- Directions are made orthonormal in each round, not in the last alone: the same space, without overflow. Each factor takes the
  square root of a direction's size, to fit fp16.
- Packed blocks are never compressed again (protocol=release apart). Removed outliers are replaced by the mean of the others.
- A new turn's tokens, after those buffered, are a block like the prompt's.
- The power iteration begins with seeded normal numbers; the release draws uniform ones without a seed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformers import PreTrainedConfig

from pqcache.fields import Bits, Positive, Share, Whole
from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.codec import ExactCodec
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream

from .blocks import BlockStream, KeyCodec, ValueCodec, WholeStream, released_outliers


def accounted_ratio(
    tokens: int,
    bits: int = 4,
    rank: int = 4,
    outliers: float = 0.02,
    d: int = 128,
    channels: int = 4096,
    index: int = 16,
) -> float:
    """16-bit K + V over everything GEAR-KCVT stores for one block of `tokens` tokens; no buffered tokens or capacity.

    channels: h_kv d. index: bits of an outlier's position.
    """
    parameters = (32 / tokens + 32 / channels) / 2
    return 16 / (bits + parameters + outliers * (16 + index) + 16 * rank * (tokens + d) / (tokens * d))


@dataclass(kw_only=True)
class GEAR(QuantizationMethod):
    """Every token as codes + outliers + a low-rank part, in blocks. Ignores the budget."""

    name: ClassVar[str] = "gear"
    released: ClassVar[str] = "opengear-project/GEAR: GenerationBench/GenerationTest/GEARLM/Simulated"
    packs_prompt: ClassVar[bool] = True
    noop_options: ClassVar[dict[str, Any]] = {"bits": 16}

    # bits per code, 1 to 8; 16: the no-op
    bits: Bits = 4
    # kcvt: keys per channel over a block, values per token over all KV heads (the paper's choice at 4 bits);
    # kivi: groups of `group` tokens or channels (at 2 bits)
    backbone: Literal["kcvt", "kivi"] = "kcvt"
    # tokens or channels per step and minimum, with backbone=kivi
    group: Positive = 64
    # share of each channel or token that is stored exactly, with positions: half are the largest numbers, half the smallest
    outliers: Share = 0.02
    # rank of the low-rank part per KV head, in the prompt's block
    rank: Whole = 4
    # rank in later blocks
    new_rank: Whole = 2
    # rounds of power iteration
    rounds: Positive = 3
    # generated tokens per block, exact until a block is full (the KCVT runs also use 20)
    residual: Positive = 64
    # seed of the iteration's start, the same for all rows, heads and blocks
    seed: int = 0

    def validate(self) -> None:
        if self.backbone == "kivi":
            self.require("residual", self.residual % self.group == 0, f"a multiple of group={self.group}")

    def check_model(self, config: PreTrainedConfig) -> None:
        shape = ModelShape.of(config)
        channels = shape.h_kv * shape.unit
        fits = self.bits == 16 or self.backbone == "kcvt" or channels % self.group == 0
        self.require("group", fits, f"a divisor of {channels}, the channels of all KV heads")

    def published_ratio(self, tokens: int, shape: ModelShape) -> float | None:
        """For the backbone it is published for, with the model's own channels."""
        if self.bits == 16 or self.backbone != "kcvt":
            return None
        channels = shape.h_kv * shape.d
        if self.protocol != "release":
            return accounted_ratio(tokens, self.bits, self.rank, self.outliers, shape.d, channels)
        side = released_outliers(channels, self.outliers)
        share = (min(1.0, 2 * side / tokens) + 2 * side / channels) / 2  # of keys and of values
        return accounted_ratio(tokens, self.bits, self.new_rank, share, shape.d, channels)

    def make_store(self, layer_idx: int, shape: ModelShape) -> PackedStore:
        if self.bits == 16:
            return PackedStore(*(PackedStream(ExactCodec(), KeepNewest(self.residual)) for _ in "kv"))
        group = self.group if self.backbone == "kivi" else None
        streams = []
        for codec in (KeyCodec, ValueCodec):
            released = self.protocol == "release"
            blocks = codec(self.bits, group, self.outliers, self.rank, self.rounds, self.seed, released)
            stream = WholeStream if released else BlockStream
            streams.append(stream(blocks, group or 1, self.residual, (self.rank, self.new_rank)))
        return PackedStore(*streams)
