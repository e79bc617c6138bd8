"""Coded keys: rank tokens by their keys in a few bits, as rivals of PQCache's product-quantized keys.

Codes are those of a range per token and KV head, by which Twilight (arXiv 2502.02770, section 4.2) estimates attention; of
TurboQuant (arXiv 2504.19874); or of RaBitQ (arXiv 2405.12497, section 3): the signs of a rotated key after the prompt's mean key
is taken away, its norm, and its product with its signs, which makes the estimate unbiased.

protocol=release is the code of ranges; codes of keys alone are not published.

Deviations:
- RaBitQ keeps queries exact, where its code rounds them to 4 bits. It has one mean per row and KV head and no inverted lists.
- Step and minimum of a range are rounded to fp16, as they are stored. The released Python reference does not round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pqcache import kernels
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.group import products
from pqcache.selective.index import Index
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.chosen import gathered
from pqcache.store.codec import BufferCodec, TokenCodec, right_align
from pqcache.store.layout import Codes
from pqcache.store.quantizer import pack_codes, unpack_codes

from .turboquant import TurboCodec, random_matrix

TILE = 4096  # tokens decoded at a time


class SignCodec(BufferCodec):
    """RaBitQ's codes of rotated keys: signs, and the norm divided by the mean size of the unit vector's entries, fp16."""

    def encode(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        square, size = (x**2).sum(-1, keepdim=True), x.abs().sum(-1, keepdim=True)
        return pack_codes((x > 0).to(torch.uint8), 1), (square / size.clamp_min(1e-20)).half()

    def decode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return (unpack_codes(parts[0], 1, self.d).float() * 2 - 1) * parts[1].float()


class CodedKeyIndex(Index):
    """A second copy of one layer's keys, in codes: as they are, or rotated, or rotated after their mean is taken away."""

    per_row = ("codec", "mean")
    counted = ("rotation",)
    scope = "all"

    def __init__(self, codec: BufferCodec, reduce: str, rotates: bool = False, centers: bool = False) -> None:
        self.codec, self.reduce, self.rotates, self.centers = codec, reduce, rotates, centers
        self.mean: torch.Tensor | None = None  # (n, h_kv, 1, d): adds the same to all scores of a query

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        self.codec.clear()
        n = len(lengths)
        if self.centers:
            self.mean = torch.stack([k[row, :, :length].mean(1, keepdim=True) for row, length in enumerate(lengths)])
        self.codec.append(self.keyed(right_align(k.detach(), [0] * n, lengths)), [0] * n, lengths)
        return [True] * n

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.codec.append(self.keyed(k.detach()), [length - 1 for length in lengths], [1] * len(lengths))

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        q = self.asked(q)
        if (codes := self._readable(q)) is not None:
            return kernels.packed.scores(q, codes.part(lo, hi), ctx.scaling)
        tiles = [self.codec.tile(at, min(at + TILE, hi)) for at in range(lo, hi, TILE)]
        return torch.cat([products(q.float(), keys) for keys in tiles], -1) * ctx.scaling

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        q, codes = self.asked(q), self._readable(q)
        if codes is not None and indices.shape[1] in (1, h_kv := codes.codes.shape[1]):
            chosen = gathered(codes, indices.clamp_min(0).expand(-1, h_kv, -1))
            if chosen is not None:
                return kernels.packed.scores(q, chosen, ctx.scaling)
        return products(q.float(), self.codec.take(indices, self.layer.shape.group)) * ctx.scaling

    def _readable(self, q: torch.Tensor) -> Codes | None:
        """The codes, where a kernel reads them."""
        layout = self.codec.layout() if kernels.native(q) else None
        return layout[0] if layout and kernels.packed.reads(q, layout[0]) else None

    def keyed(self, keys: torch.Tensor) -> torch.Tensor:
        return self.asked(keys if self.mean is None else keys - self.mean)

    def asked(self, q: torch.Tensor) -> torch.Tensor:
        if not self.rotates:
            return q
        self.rotation = random_matrix(q.shape[-1], "rotation", q.device)
        return q.to(accumulator_dtype(q)) @ self.rotation.mT.to(accumulator_dtype(q))


@dataclass(kw_only=True)
class CodedKeys(RetrievalMethod):
    """Tokens with the largest softmax weight by their coded keys, which are on the device wherever K and V are."""

    name: ClassVar[str] = "coded_keys"
    released: ClassVar[str] = "tsinghua-ideal/Twilight: twilight/pyimpl/quantize.py"
    ranks_shortlists: ClassVar[bool] = True

    # range (one per token and KV head) | turboquant | rabitq (signs)
    code: Literal["range", "turboquant", "rabitq"] = "range"
    # bits of a number, 1 to 8, of which rabitq uses 1; null: 4, with rabitq 1
    bits: int | None = None

    def fill(self) -> None:
        self.bits = (1 if self.code == "rabitq" else 4) if self.bits is None else self.bits
        if self.protocol == "release" and self.code != "range":
            raise NotApplicable(
                f"protocol=release: no code of {self.code} for keys is published; aligned and paper apply"
            )

    def validate(self) -> None:
        super().validate()
        largest = 1 if self.code == "rabitq" else 8
        self.require("bits", self.bits is None or 1 <= self.bits <= largest, f"null or an int from 1 to {largest}")

    def make_index(self, layer_idx: int, shape: ModelShape) -> CodedKeyIndex:
        if self.code == "rabitq":
            return CodedKeyIndex(SignCodec(), self.reduce, rotates=True, centers=True)
        if self.code == "turboquant":
            return CodedKeyIndex(TurboCodec(self.bits or 4, rotated=True), self.reduce, rotates=True)
        return CodedKeyIndex(TokenCodec(self.bits or 4), self.reduce)
