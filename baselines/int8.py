"""Int8: every token kept in 8 bits, a baseline without selection.

A baseline of this project: no code is published, so protocol=release does not apply.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pqcache.fields import Whole
from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.codec import Codec, ExactCodec, TokenCodec
from pqcache.store.packed import KeepNewest, Schedule


@dataclass(kw_only=True)
class Int8(QuantizationMethod):
    """Asymmetric 8-bit codes with one (step, minimum) pair of fp16 per token and KV head, for K and for V.

    Ignores the budget: a token costs 2 h_kv (d + 4) bytes per layer instead of 4 h_kv d at 16 bits.
    """

    name: ClassVar[str] = "int8"
    noop_options: ClassVar[dict[str, Any]] = {"bits": 16}

    # 8, or 16 for the no-op
    bits: Literal[8, 16] = 8
    # newest tokens kept exact
    residual: Whole = 0

    def make_codec(self, layer_idx: int, shape: ModelShape) -> Codec:
        return ExactCodec() if self.bits == 16 else TokenCodec(self.bits)

    def schedule(self) -> Schedule:
        return KeepNewest(self.residual)
