"""H2O(C): H2O with the memory that the others spend on looking for tokens (PQCache, arXiv 2407.12820, section 4.1.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from baselines.h2o import H2O
from pqcache.selective.shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

COMM_BASES = ("kv", "k", "bytes")


@dataclass(kw_only=True)
class H2OC(H2O):
    """Holds as many tokens as fit into the compared methods' selected K and V plus their extra communication.

    N_C = floor(ratio * s + E / (bytes of a token's K and V)), E the extra communication per layer. comm_base says of what
    it is taken: "kv" of the whole KV cache, comm_ratio of it, as the captions of tables 2 and 3 say (64 tokens at s = 8192);
    "k" of the keys alone, of which SPARQ, InfLLM and PQ codes really read about comm_ratio (32 tokens); "bytes" is what PQ
    codes of m sub-spaces and b bits weigh (24 tokens at m = 2, b = 6, d = 128).

    Deviations: as H2O's. The paper's captions do not say whether sinks take part: they are on top of N_C under the aligned
    protocol, as they are for the other methods.
    """

    name: ClassVar[str] = "h2o_c"

    comm_base: str = "kv"
    comm_ratio: float = 1 / 128
    m: int = 2
    b: int = 6

    def validate(self) -> None:
        super().validate()
        self.require_one_of("comm_base", COMM_BASES)
        self.require("comm_ratio", 0 <= self.comm_ratio <= 1, "a number in [0, 1]")
        self.require("m", self.m >= 1, "an int >= 1")
        self.require("b", self.b >= 1, "an int >= 1")
        self.d = 128  # until a model says otherwise

    def check_model(self, config: PreTrainedConfig) -> None:
        super().check_model(config)
        self.d = ModelShape.of(config).d

    def compensation(self, s: int) -> float:
        if self.comm_base == "bytes":
            return s * self.m * self.b / (2 * self.d * 16)  # against 16-bit K and V
        return s * self.comm_ratio / (1 if self.comm_base == "kv" else 2)
