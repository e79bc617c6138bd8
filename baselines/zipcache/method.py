"""ZipCache: salient tokens in 4 bits, the rest in 2, by normalised attention of a few probes (He et al., arXiv 2405.14256).

Section 4.1 and Algorithm 1: channel-separable tokenwise quantization; 4.2, Eq. 8: the saliency; 4.3, Eq. 9: the probes;
Algorithms 2 and 3: prefill and streaming decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from baselines.zipcache.probes import PROBES, ProbeRule, special_tokens
from baselines.zipcache.salient import SalientMethod


@dataclass(kw_only=True)
class ZipCache(SalientMethod):
    """A token's saliency is the mean attention it gets from the probes that can see it; see SalientMethod for the rest.

    probes: "random_recent" (the paper's choice), "random", "recent", "special" (special tokens and punctuation: `special_ids`, or
    what `know_tokenizer` finds, which the harness calls), "all". recent_share, random_share: how many of each; the other
    strategies take as many as both together.
    norm: "probes" divides a token's sum by the number of probes that see it; "full" by the number of queries that do.

    After the prompt everything is packed. Of every `gap` generated tokens the last 5 % and 5 % of the others are probes.

    Deviations: the zero point is the group's minimum in fp16, not an integer. The released code divides by all queries
    (norm=full), draws probes with replacement, anew in every layer, and ranks generated tokens by one query; here the paper
    rules. One c per channel serves both widths, as in the code (Algorithm 2 has one each), and all parameters are per row, where
    the code shares channel parameters over the batch. A token's bit width is final. Rows of a batch, chunks and layers have
    the same probes as a prompt of that length alone. With fewer special tokens than probes wanted, all of them are probes; in
    later turns, whose tokens nobody tells, random and recent ones. A new turn is packed like a prompt, its queries being
    the probes.
    """

    name: ClassVar[str] = "zipcache"

    probes: str = "random_recent"
    recent_share: float = 0.05
    random_share: float = 0.05
    norm: str = "probes"
    special_ids: list = field(default_factory=list)

    def validate(self) -> None:
        super().validate()
        self.require_one_of("probes", PROBES)
        self.require("recent_share", 0 <= self.recent_share <= 1, "a number in [0, 1]")
        self.require(
            "random_share",
            0 <= self.random_share <= 1 - self.recent_share,
            "a number >= 0, with recent_share at most 1",
        )
        self.require_one_of("norm", ("probes", "full"))
        self.require(
            "special_ids",
            not self.special_ids
            or (self.probes == "special" and all(type(i) is int and i >= 0 for i in self.special_ids)),
            "a list of token ids, for probes=special only",
        )
        self.found_ids: tuple[int, ...] | None = None

    def know_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.probes == "special" and not self.special_ids:
            self.found_ids = special_tokens(tokenizer)

    def rule(self) -> ProbeRule:
        ids = tuple(int(i) for i in self.special_ids) or self.found_ids
        if self.probes == "special" and ids is None:
            raise ValueError("special_ids=[]: allowed is a list of token ids, or call know_tokenizer first")
        return ProbeRule(self.probes, self.recent_share, self.random_share, self.seed, ids or ())

    def saliency_norm(self) -> str:
        return self.norm
