"""MiKV: tokens that an evictor would drop are kept in fewer bits (Yang et al., arXiv 2402.18096), as ZipCache compares to it.

The saliency is the attention a token has received, from every query of the prompt and of decoding; as in H2O, a share of the
important tokens are the newest ones. protocol=paper is ZipCache's comparison, which says only that attention is accumulated:
there none are. No code of the authors is published, and ZipCache's release has none of this method: protocol=release does not
apply.

Sums of attention favour early tokens: without the newest, 58 % of the last tenth of a 2,000-token prompt are left in 2 bits
(SmolLM2-135M). Most of what is lost then is due to keys in 2 bits whose channels share one range over the whole prompt. With
granularity=group and balancer=true, closer to the original at 1 bit per number more, the likeliest token is Full's in 0.95 of
the steps, by default in 0.81, under protocol=paper in 0.72.

Deviations:
- Both widths and the granularity are those of ZipCache's comparison: 4 and 2 bits, keys by channel, values channel-separable by
  token. The original keeps important tokens in 16 or 8 bits and quantizes each token on its own.
- The balancer is undone when keys are decoded instead of being applied to queries, which gives the same product.
- A token's bit width is final, so sums of packed tokens are not kept, and the newest tokens are those of what is packed together.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from pqcache.fields import Share, added

from .probes import ProbeRule
from .salient import SalientMethod


@dataclass(kw_only=True)
class MiKV(SalientMethod):
    """Important tokens in `bits_high` bits, the others in `bits_low`."""

    name: ClassVar[str] = "mikv"

    # divide key channels by sqrt(max |k| / max |q|) of the prompt, per KV head, before quantizing; for granularity token, group
    balancer: bool = False
    # share of the important tokens that are the newest ones; null: 0.5, as in H2O, in the protocol paper 0
    recent_ratio: Share | None = added(None, absent=0.0)

    def fill(self) -> None:
        self.by_protocol(recent_ratio=(0.5, 0.0))

    def rule(self) -> ProbeRule:
        return ProbeRule("all")

    def store_options(self) -> dict[str, Any]:
        return {"norm": "none", "newest": self.recent_ratio or 0.0, "balance": self.balancer}
