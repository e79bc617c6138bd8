"""H2O(C): H2O with the memory that other methods spend on their indexes (PQCache, arXiv 2407.12820, section 4.1.3).

It holds N_C = floor(ratio * s + E / (bytes of a token's K and V)) tokens, E being the extra communication per layer of the
compared methods. An aligned token budget is B + E / (bytes of a token's K and V) at every step, s being all tokens so far.

Deviations: as H2O's.
- The paper's captions do not say whether sinks take part. Here they come on top of N_C under the aligned protocol.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from transformers import PreTrainedConfig

from pqcache.fields import Positive, Share
from pqcache.selective.shape import ModelShape

from .h2o import H2O


@dataclass(kw_only=True)
class H2OC(H2O):
    """H2O with as many more tokens as the compared methods' extra communication weighs."""

    name: ClassVar[str] = "h2o_c"
    own_rule: ClassVar[str] = "extra"
    released: ClassVar[str] = ""  # PQCache's code has no compensation; its runs set H2O's ratio by hand

    # kv: comm_ratio of the whole KV cache (captions of tables 2 and 3); k: of the keys alone; bytes: of PQ codes
    comm_base: Literal["kv", "k", "bytes"] = "kv"
    # extra communication as a share of the KV cache or the keys
    comm_ratio: Share = 1 / 128
    # sub-spaces of the PQ codes, with comm_base=bytes
    m: Positive = 2
    # bits per PQ code, with comm_base=bytes
    b: Positive = 6

    def setup(self) -> None:
        self.d = 128  # head dimension, until check_model

    def check_model(self, config: PreTrainedConfig) -> None:
        super().check_model(config)
        self.d = ModelShape.of(config).d

    def compensation(self, s: int) -> float:
        if self.comm_base == "bytes":
            return s * self.m * self.b / (2 * self.d * 16)  # against 16-bit K and V
        return s * self.comm_ratio / (1 if self.comm_base == "kv" else 2)
