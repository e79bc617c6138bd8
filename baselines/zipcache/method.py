"""ZipCache: salient tokens in 4 bits, the rest in 2, by normalised attention of a few probes (He et al., arXiv 2405.14256).

Section 4.1 and Algorithm 1: channel-separable tokenwise quantization; 4.2, Eq. 8: the saliency; 4.3, Eq. 9: the probes;
Algorithms 2 and 3: prefill and streaming decoding. After the prompt everything is packed. Of every `gap` generated tokens the
last 5 % and 5 % of the others are probes.

protocol=release is what the released code does instead: sums are divided by all queries (norm=full), random probes are drawn
with replacement and anew in every layer, and generated tokens are ranked by the attention of the last of them alone.

Deviations:
- The zero point is the group's minimum in fp16, not an integer, as in the released code.
- One c per channel serves both widths, as in the released code. Algorithm 2 has one each.
- All parameters are per row. The released code shares channel parameters over the batch, so that neighbours change a result.
- A token's bit width is final. Old codes change only where new tokens widen a range; the released code codes everything again
  from its own decoded values at every packing, which adds errors.
- Saliency is fp32. The released code rounds attention and its sums to the model's type.
- The j-th tokens of a width by position share a value step across heads. In the released code it is the j-th least salient
  regular tokens, the order in which its top-k returns them.
- Rows of a batch, chunks and layers have the same probes as a prompt of that length alone; under protocol=release each layer
  draws its own.
- With fewer special tokens than probes, all of them are probes. In later turns, whose token ids are unknown, probes=special
  means random and recent ones. A new turn is packed like a prompt, its queries being the probes.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from pqcache.fields import Share

from .probes import ProbeRule, Probes, special_tokens
from .salient import SalientMethod


@dataclass(kw_only=True)
class ZipCache(SalientMethod):
    """A token's saliency is the mean attention that it receives from the probes that can see it."""

    name: ClassVar[str] = "zipcache"
    released: ClassVar[str] = "ThisisBillhe/ZipCache: zipcache/models/modeling_llama.py"

    # which queries are probes: random_recent (the paper's choice), random, recent, special (tokens and punctuation), all
    probes: Probes = "random_recent"
    # share of the tokens that are recent probes; random and recent alone take both shares
    recent_share: Share = 0.05
    # share of the tokens that are random probes
    random_share: float = 0.05
    # a token's sum is divided by the number of probes, or by the number of queries (full), that see it; null: probes
    # (Equation 8), in the release protocol full
    norm: Literal["probes", "full"] | None = None
    # token ids for probes=special; empty: the tokenizer's special tokens and punctuation
    special_ids: list = field(default_factory=list)

    def fill(self) -> None:
        self.by_protocol(norm=("probes", "probes", "full"))

    def validate(self) -> None:
        super().validate()
        fits = 0 <= self.random_share <= 1 - self.recent_share
        self.require("random_share", fits, "a number >= 0, with recent_share at most 1")
        are_ids = self.probes == "special" and all(type(i) is int and i >= 0 for i in self.special_ids)
        self.require("special_ids", not self.special_ids or are_ids, "a list of token ids, for probes=special only")

    def setup(self) -> None:
        self.tokenizer_ids: tuple[int, ...] | None = None  # special tokens by `know_tokenizer`

    def know_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.probes == "special" and not self.special_ids:
            self.tokenizer_ids = special_tokens(tokenizer)

    def rule(self) -> ProbeRule:
        ids = tuple(int(i) for i in self.special_ids) or self.tokenizer_ids
        if self.probes == "special" and ids is None:
            raise ValueError("special_ids=[]: allowed is a list of token ids, or call know_tokenizer first")
        return ProbeRule(self.probes, self.recent_share, self.random_share, self.seed, ids or ())

    def store_options(self) -> dict[str, Any]:
        return {"norm": self.norm}
