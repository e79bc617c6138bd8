"""TurboQuant: rotate, then quantize every coordinate by one codebook that needs no data (Zandieh et al., arXiv 2504.19874).

A random rotation makes the coordinates of any vector of norm 1 follow one known distribution. Its best codebook of `bits` bits
codes them all (Algorithm 1); the norm is stored in fp16. With `sketch` the last bit of a key's coordinate is spent on the signs
of random products of what the others leave over, which makes products with queries unbiased (Algorithm 2).

`coded_keys` ranks tokens by the same codes of keys (method.code=turboquant).

No code of the authors is published: protocol=release does not apply.

Deviations:
- All channels have the same number of bits. The paper's 2.5 and 3.5 bits give outlier channels one bit more.
- Products with a sketch are computed from decoded tokens; no kernel reads it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal
from weakref import WeakValueDictionary

import torch

from pqcache.fields import Whole
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.codec import BufferCodec, Codec, ExactCodec
from pqcache.store.layout import Codes
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream
from pqcache.store.quantizer import finite, pack_codes, unpack_codes

SEEDS = {"rotation": 0, "sketch": 1}
_matrices: WeakValueDictionary[tuple[int, str, str], torch.Tensor] = WeakValueDictionary()  # freed with the last cache


def random_matrix(d: int, kind: str, device: torch.device) -> torch.Tensor:
    """(d, d) fp32 on the device, the same for all layers: a random rotation, or normal entries ("sketch")."""
    matrix = _matrices.get((d, kind, str(device)))
    if matrix is None:
        draw = torch.randn(d, d, generator=torch.Generator().manual_seed(SEEDS[kind]), dtype=torch.float64)
        matrix = (torch.linalg.qr(draw)[0] if kind == "rotation" else draw).float().to(device)
        _matrices[d, kind, str(device)] = matrix
    return matrix


@lru_cache(maxsize=32)
def codebook(bits: int, d: int) -> torch.Tensor:
    """The 2^bits centroids (ascending, fp32) of least squared error for one coordinate of a random unit vector (section 3.1)."""
    x = torch.linspace(-1, 1, 40001, dtype=torch.float64)
    density = (1 - x**2).clamp_min(0) ** ((d - 3) / 2)
    share = density.cumsum(0) / density.sum()
    centroids = x[torch.searchsorted(share, (torch.arange(2**bits) + 0.5).double() / 2**bits)]
    for _ in range(200):  # Lloyd's rounds
        cell = torch.bucketize(x, (centroids[1:] + centroids[:-1]) / 2)
        mass = torch.zeros_like(centroids).index_add_(0, cell, density)
        centroids = torch.zeros_like(centroids).index_add_(0, cell, density * x) / mass
    return centroids.float()


class TurboCodec(BufferCodec):
    """Codes of a rotated unit vector's coordinates, and its norm in fp16; with a sketch the signs and norm of the residual.

    rotated: tokens come rotated and are decoded so.
    """

    counted = ("matrices",)

    def __init__(self, bits: int, sketch: bool = False, rotated: bool = False) -> None:
        super().__init__()
        self.bits, self.sketch, self.rotated = bits - sketch, sketch, rotated
        self.matrices: list[torch.Tensor] = []  # those in use

    def _matrix(self, kind: str, like: torch.Tensor) -> torch.Tensor:
        matrix = random_matrix(like.shape[-1], kind, like.device)
        if not any(matrix is known for known in self.matrices):
            self.matrices.append(matrix)
        return matrix.to(like.dtype)

    def encode(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        x = x.to(accumulator_dtype(x))
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        unit = x / norm.clamp_min(torch.finfo(torch.float32).tiny)
        unit = unit if self.rotated else unit @ self._matrix("rotation", x).mT
        centroids = codebook(self.bits, x.shape[-1]).to(x.device)
        codes = torch.bucketize(unit.contiguous(), ((centroids[1:] + centroids[:-1]) / 2).to(x.dtype))
        parts = [pack_codes(codes.to(torch.uint8), self.bits), finite(norm, torch.float16)]
        if self.sketch:
            rest = unit - centroids.to(x.dtype)[codes]
            signs = (rest @ self._matrix("sketch", x).mT > 0).to(torch.uint8)
            parts += [pack_codes(signs, 1), torch.linalg.vector_norm(rest, dim=-1, keepdim=True).half()]
        return parts

    def decode(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = torch.promote_types(self.dtype, torch.float32)
        centroids = codebook(self.bits, self.d).to(parts[0].device, dtype)
        unit = centroids[unpack_codes(parts[0], self.bits, self.d).long()]
        if self.sketch:
            signs = unpack_codes(parts[2], 1, self.d).to(dtype) * 2 - 1
            unit = unit + math.sqrt(math.pi / 2) / self.d * parts[3].to(dtype) * (signs @ self._matrix("sketch", unit))
        unit = unit if self.rotated else unit @ self._matrix("rotation", unit)
        return finite(unit * parts[1].to(dtype), self.dtype)

    def layout(self) -> list[Codes] | None:
        if self.sketch or not self.parts:
            return None if self.sketch else []
        codes, norm = (part.view(part.filled) for part in self.parts)
        table = codebook(self.bits, self.d).repeat(max(1, 16 >> self.bits)).to(codes.device)
        turn = None if self.rotated else random_matrix(self.d, "rotation", codes.device)
        return [Codes(self.bits, self.d, codes, token_step=norm, table=table, rotation=turn)]


@dataclass(kw_only=True)
class TurboQuant(QuantizationMethod):
    """Codes of `bits` bits for K and V; a token and KV head costs d * bits / 8 + 2 bytes for each, 2 more with a sketch."""

    name: ClassVar[str] = "turboquant"
    noop_options: ClassVar[dict[str, Any]] = {"bits": 16}

    # bits per number, 2 to 8, or 16 for the no-op
    bits: Annotated[int, 2, 8] | Literal[16] = 4
    # whether a key's last bit is spent on signs that make products with queries unbiased
    sketch: bool = False
    # newest tokens kept exact
    residual: Whole = 0

    def make_store(self, layer_idx: int, shape: ModelShape) -> PackedStore:
        codecs: list[Codec] = [
            ExactCodec() if self.bits == 16 else TurboCodec(self.bits, s) for s in (self.sketch, False)
        ]
        k, v = (PackedStream(codec, KeepNewest(self.residual)) for codec in codecs)
        return PackedStore(k, v)
