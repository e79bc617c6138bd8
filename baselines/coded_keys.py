"""Coded keys: rank tokens by their keys in a few bits, one range per token and KV head.

What Twilight (arXiv 2502.02770, section 4.2) estimates attention by, and a baseline for PQCache's product-quantized keys.

Deviations:
- Step and minimum of a range are rounded to fp16, as they are stored. The released Python reference does not round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pqcache.selective.index import Index
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.codec import BufferCodec, TokenCodec, right_align

TILE = 4096  # tokens decoded at a time


class CodedKeyIndex(Index):
    """A second copy of one layer's keys, in codes. rotation (h_kv or 1, d, d): keys are coded after it; None: as they are."""

    scope = "all"

    def __init__(self, codec: BufferCodec, reduce: str, rotation: torch.Tensor | None = None) -> None:
        self.codec, self.reduce, self.rotation = codec, reduce, rotation

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        self.codec.clear()
        n = len(lengths)
        self.codec.append(self._rotated(right_align(k.detach(), [0] * n, lengths)), [0] * n, lengths)
        return [True] * n

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.codec.append(self._rotated(k.detach()), [length - 1 for length in lengths], [1] * len(lengths))

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        q = self._rotated(q)
        tiles = [self.codec.tile(at, min(at + TILE, hi)) for at in range(lo, hi, TILE)]
        return torch.cat([products(q, keys) for keys in tiles], -1) * ctx.scaling

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        keys = self.codec.take(indices, self.layer.shape.group)
        return products(self._rotated(q), keys) * ctx.scaling

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        if self.rotation is None:
            return x
        self.rotation = self.rotation.to(x.device)
        return x.float() @ self.rotation.mT

    def map_rows(self, index: torch.Tensor) -> None:
        self.codec.map_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        return {"device": self.codec.tensors() + ([] if self.rotation is None else [self.rotation])}


def products(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q (n, h, 1, d), keys (n, h_kv or h, m, d) -> q . key in fp32, (n, h, m)."""
    n, h, _, d = q.shape
    return (q.float().view(n, keys.shape[1], -1, d) @ keys.float().mT).view(n, h, -1)


@dataclass(kw_only=True)
class CodedKeys(RetrievalMethod):
    """Tokens with the largest softmax weight by their coded keys, which are on the device wherever K and V are."""

    name: ClassVar[str] = "coded_keys"
    released: ClassVar[str] = "tsinghua-ideal/Twilight: twilight/pyimpl/quantize.py"
    ranks_shortlists: ClassVar[bool] = True

    # bits of a code, 1 to 8
    bits: int = 4

    def validate(self) -> None:
        super().validate()
        self.require("bits", 1 <= self.bits <= 8, "an int from 1 to 8")

    def make_index(self, layer_idx: int, shape: ModelShape) -> CodedKeyIndex:
        return CodedKeyIndex(TokenCodec(self.bits), self.reduce)
