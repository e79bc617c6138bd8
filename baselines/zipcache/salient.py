"""What ZipCache and MiKV share: salient tokens in more bits than the others, at one budget of bits."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pqcache.fields import Positive, Share
from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.codec import ExactCodec
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream

from .accounting import mean_bits, published_ratio
from .mixed_codec import MixedCodec
from .probes import ProbeRule
from .salient_store import SalientStore
from .widths import Widths

GRANULARITIES = {  # name -> `by` of MixedCodec for K and V
    "channel-cst": ("channel", "cst"),
    "channel-token": ("channel", "token"),
    "token": ("token", "token"),
    "group": ("group", "group"),
}


@dataclass(kw_only=True)
class SalientMethod(QuantizationMethod):
    """Base of methods that keep salient tokens in `bits_high` bits and regular ones in `bits_low`, both packed.

    The budget is the mean bits of a token's codes as a share of 16 bits, so it gives the share of salient tokens: 0.2 is 3.2
    bits, which at 4 and 2 bits makes 60 % salient. 1.0 keeps everything exact.
    """

    ignores_budget: ClassVar[bool] = False
    drops_rows: ClassVar[bool] = False  # heads that share a token's step and minimum get their own, in all rows
    packs_prompt: ClassVar[bool] = True
    noop_options: ClassVar[dict[str, Any]] = {"saliency_ratio": None}

    # bits of a salient token's codes
    bits_high: Annotated[int, 2, 8] = 4
    # bits of a regular token's codes
    bits_low: int = 2
    # share of salient tokens; it must agree with the budget; null: by the budget
    saliency_ratio: Share | None = None
    # numbers that share a step and a minimum, keys before values: channel-cst (a channel; a token after its channels were
    # divided by sqrt(max |v|)), channel-token, token, or group (`group` channels of a token)
    granularity: Literal["channel-cst", "channel-token", "token", "group"] = "channel-cst"
    # channels per step and minimum, with granularity=group
    group: Positive = 32
    # generated tokens that are packed together, exact until then
    gap: Positive = 100
    # whole: pack old tokens again where new ones widen a range; segment: tokens packed together have ranges of their own
    recompress: Literal["whole", "segment"] = "whole"
    # one ranking per KV head (head) or per layer (layer)
    scope: Literal["head", "layer"] = "head"
    # seed of random probes
    seed: Annotated[int, 0, 2**63 - 1] = 0

    def validate(self) -> None:
        self.require("bits_low", 1 <= self.bits_low < self.bits_high, f"an int >= 1 below bits_high={self.bits_high}")

    def check_budget(self) -> None:
        lowest, highest = self.bits_low / 16, self.bits_high / 16
        ratio = self.budget.ratio
        if ratio == 1.0:
            return
        if ratio is None or not lowest <= ratio <= highest:
            raise NotApplicable(
                f"budget={self.budget}: {self.name} at {self.bits_high} and {self.bits_low} bits takes a share of 16-bit"
                f" codes in {lowest:g}..{highest:g}, or 1.0"
            )
        if self.saliency_ratio is not None:
            bits = self.saliency_ratio * self.bits_high + (1 - self.saliency_ratio) * self.bits_low
            self.require(
                "saliency_ratio",
                abs(bits / 16 - ratio) < 1e-6,
                f"{self.salient_share:g} at budget={self.budget}, or null; this ratio is budget={bits / 16:g}",
            )

    def check_model(self, config: Any) -> None:
        d = ModelShape.of(config).unit
        self.require(
            "group", self.granularity != "group" or d % self.group == 0, f"a divisor of the head dimension {d}"
        )

    @property
    def salient_share(self) -> float:
        """Share of tokens in bits_high bits."""
        assert self.budget.ratio is not None
        return round((16 * self.budget.ratio - self.bits_low) / (self.bits_high - self.bits_low), 9)

    def rule(self) -> ProbeRule:
        """Which queries are probes."""
        raise NotImplementedError

    def layer_rule(self, layer_idx: int) -> ProbeRule:
        """`rule` in one layer."""
        return replace(self.rule(), repeats=self.protocol == "release", layer=layer_idx)

    def store_options(self) -> dict[str, Any]:
        """What the method alone says of its SalientStore: norm, newest, balance."""
        raise NotImplementedError

    def published_ratio(self, tokens: int, shape: ModelShape) -> float | None:
        """With the paper's 8 rows and 4096 channels, whatever the model has; see baselines/zipcache/accounting.py."""
        if self.budget.is_everything:
            return None
        share = self.salient_share
        counting = "mixed" if 0 < share < 1 and self.granularity.startswith("channel") else self.granularity
        bits = mean_bits(share, self.bits_high, self.bits_low)
        return published_ratio(counting, bits, tokens, group=self.group)

    def make_store(self, layer_idx: int, shape: ModelShape) -> PackedStore:
        if self.budget.is_everything:
            return PackedStore(*(PackedStream(ExactCodec(), KeepNewest(0)) for _ in "kv"))
        widths, (by_k, by_v), own = Widths(), GRANULARITIES[self.granularity], self.store_options()

        def stream(by: str, of_keys: bool) -> PackedStream:
            bits, segment = (self.bits_high, self.bits_low), self.recompress == "segment"
            codec = MixedCodec(bits, by, widths, owner=of_keys, segment=segment, group=self.group)
            codec.balanced = of_keys and own.get("balance", False)
            return PackedStream(codec, lambda tail: tail if tail >= self.gap else 0)

        return SalientStore(
            stream(by_k, True),
            stream(by_v, False),
            widths,
            ratio=self.salient_share,
            rule=self.layer_rule(layer_idx),
            scope=self.scope,
            gap=self.gap,
            last_step=self.protocol == "release",
            **own,
        )
