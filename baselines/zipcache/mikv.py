"""MiKV: tokens that an evictor would drop are kept in fewer bits (Yang et al., arXiv 2402.18096), as ZipCache compares to it.

The saliency is the attention a token has received in all (H2O's), from every query of the prompt and of decoding. No code of
the authors is published, and ZipCache's release has none of this method: protocol=release does not apply.

Deviations:
- Both widths and the granularity are those of ZipCache's comparison: 4 and 2 bits, keys by channel, values channel-separable by
  token. The original keeps important tokens in 16 or 8 bits and quantizes each token on its own.
- The balancer is undone when keys are decoded instead of being applied to queries, which gives the same product.
- A token's bit width is final, so sums of packed tokens are not kept.
- No separate recent window is forced to be important.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .probes import ProbeRule
from .salient import SalientMethod


@dataclass(kw_only=True)
class MiKV(SalientMethod):
    """Important tokens in `bits_high` bits, the others in `bits_low`."""

    name: ClassVar[str] = "mikv"

    # divide key channels by sqrt(max |k| / max |q|) of the prompt, per KV head, before quantizing; for granularity token, group
    balancer: bool = False

    def rule(self) -> ProbeRule:
        return ProbeRule("all")

    def saliency_norm(self) -> str:
        return "none"

    def is_balanced(self) -> bool:
        return self.balancer
