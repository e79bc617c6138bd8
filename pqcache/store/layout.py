"""How packed tokens are stored, for kernels that attend to codes without decoding them.

A codec describes its tokens once (`Codec.layout`); every kernel, of a CPU or a GPU, reads that description. Of token i and
channel j, `Codes` stand for

    (code[i, j] * token_step[i, j // width] + token_low[i, j // width]) * channel_step[i // span, j] + channel_low[i // span, j]

where a missing step is 1 and a missing low is 0; width = d / groups; with a table, table[code] takes the place of code. Outliers
then replace single numbers, and a low-rank product is added. All tensors are views of what the codec holds: nothing is copied,
and the bytes a method reports stay the same.

Steps and lows of the query's side fold away: (q * channel_step) . code, with q . channel_low once per `span` tokens, for keys;
(p * token_step) code, with sum(p * token_low) once per query head, for values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Outliers:
    """Numbers stored exactly, which replace what the codes stand for. Positions ascend.

    length tokens per block: values (n, h_kv, blocks, count, d), the token within the block in positions.
    length = 0, one entry per token for all KV heads: values (n, 1, tokens, count), the channel among h_kv * d in positions.
    values have the model's type, positions int16 or int32. alike: the outliers of a channel in a block, or of a token, stand in
    the places of equal codes with one step and low, so that one of them tells what all differ from.
    """

    values: torch.Tensor
    positions: torch.Tensor
    length: int = 0
    alike: bool = False


@dataclass(frozen=True)
class LowRank:
    """What is added: a[i] @ b[i // length] for token i. a (n, h_kv, tokens, r), b (n, h_kv, blocks, r, d), fp16."""

    a: torch.Tensor
    b: torch.Tensor
    length: int


@dataclass(frozen=True)
class Codes:
    """A run of packed tokens of K or V; see the module's formula.

    bits: of a code. d: head dimension. codes: (n, h_kv, tokens, bytes) uint8, packed as by `quantizer.pack_codes`; with 32 bits
    (n, h_kv, tokens, d), the numbers themselves in fp32.
    table: fp32, 16 numbers or more, repeated where there are fewer codes.
    token_step, token_low: (n, h_kv, tokens, groups) fp16, expanded over KV heads where these share them. No low without a step.
    channel_step, channel_low: (n, h_kv, segments, d) fp16; channel_low is None where channels are only multiplied.
    rotation: (d, d) orthogonal, fp32: the codes stand for rotation @ token.
    span: tokens per segment; the last segment may have fewer. offset: tokens of the first segment before the first token.
    """

    bits: int
    d: int
    codes: torch.Tensor
    token_step: torch.Tensor | None = None
    token_low: torch.Tensor | None = None
    channel_step: torch.Tensor | None = None
    channel_low: torch.Tensor | None = None
    span: int = 1
    outliers: Outliers | None = None
    low_rank: LowRank | None = None
    offset: int = 0
    table: torch.Tensor | None = None
    rotation: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.codes.shape[2]

    def part(self, lo: int, hi: int) -> Codes:
        """Tokens lo .. hi-1; lo = 0 where there are outliers or a low-rank part."""
        assert not lo or (self.outliers is None and self.low_rank is None)
        step, low = (None if x is None else x[:, :, lo:hi] for x in (self.token_step, self.token_low))
        by_channel = (
            None if x is None else x[:, :, (self.offset + lo) // self.span :]
            for x in (self.channel_step, self.channel_low)
        )
        return replace(
            self, codes=self.codes[:, :, lo:hi], token_step=step, token_low=low, channel_step=next(by_channel),
            channel_low=next(by_channel), offset=(self.offset + lo) % self.span,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Tokens whose K and V are both packed: of row r and KV head c the first counts[r][c] exist."""

    k: Codes
    v: Codes
    counts: Sequence[Sequence[int]]
