"""Coded: one method chooses tokens, another stores them in fewer bits.

    python run.py method=coded method.policy=pqcache method.codec=zipcache budget=0.2

A retrieval policy reads the tokens it selects from a packed store; what an evictor keeps is packed. The store sees the
prompt's queries, so bit widths that depend on attention work as they do alone.

protocol=release runs both parts as their released code does, and applies where both have one.

Deviations from the parts alone:
- A retrieval policy's sinks and local window are packed like everything else; its index is built from the exact keys. One that is
  built during the answer reads them as they are stored.
- Of generated tokens, probes see the attention over what was selected.
- Evictors prune once, or rank again by their own budget rule. Where a later eviction leaves heads with unequal numbers of packed
  tokens, the surplus is decoded and packed again.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from pqcache.fields import Part
from pqcache.selective.budget import Budget, Plan
from pqcache.selective.eviction import EvictionLayer, EvictionMethod
from pqcache.selective.layer import LayerContext, SelectiveLayer
from pqcache.selective.method import Method
from pqcache.selective.parts import ComposedMethod
from pqcache.selective.quantization import QuantizationMethod, attend_everything
from pqcache.selective.retrieval import RetrievalLayer, RetrievalMethod
from pqcache.selective.shape import ModelShape
from pqcache.selective.staged import exact_copy
from pqcache.store.base import RetrievalStore
from pqcache.store.resident import ResidentStore


class CodedRetrievalLayer(RetrievalLayer):
    """Selects as `method` does, from a packed store that lasts as long as the request."""

    per_row = (*RetrievalLayer.per_row, "packed")
    observes = True  # for its store's probes

    def __init__(self, layer_idx: int, shape: ModelShape, method: RetrievalMethod, codec: QuantizationMethod) -> None:
        self.codec = codec
        super().__init__(layer_idx, shape, method)

    def clear(self) -> None:
        super().clear()
        self.packed = self.codec.make_store(self.layer_idx, self.shape)

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        self.packed.observe(q, keys, stored, ctx)

    def sums_from(self, lengths: list[int]) -> int | None:
        return self.packed.sums_from(lengths)

    def new_store(self, n_local: int, ctx: LayerContext) -> RetrievalStore:
        return self.packed

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        super().settle(k, v, lengths, ctx)
        self.packed.pack(everything=self.codec.packs_prompt)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        if all(self.dense) and not self.method.replans:  # nothing to choose from: decode tile by tile, not all at once
            self.packed.append(k, v)
            out = attend_everything(self, self.packed, q, ctx)
        else:
            out = super().decode(q, k, v, ctx)
        self.packed.pack()
        return out

    def observe_step(self, q: torch.Tensor, lse: torch.Tensor, ctx: LayerContext) -> None:
        self.packed.observe_step(q, lse, ctx.scaling)


class CodedEvictionLayer(EvictionLayer):
    """Holds what `method` keeps, packed. What was packed stays packed when a later turn evicts again."""

    def __init__(self, layer_idx: int, shape: ModelShape, method: EvictionMethod, codec: QuantizationMethod) -> None:
        self.codec = codec
        super().__init__(layer_idx, shape, method)

    def clear(self) -> None:
        super().clear()
        self.packed = self.codec.make_store(self.layer_idx, self.shape)
        self.store: Any = self.packed

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        super().observe(q, keys, stored, ctx)
        self.packed.observe(q, keys, stored, ctx)

    def sums_from(self, lengths: list[int]) -> int | None:
        """As the evictor wants them: from the first query on if at all. Else as the codec's probes do."""
        first = super().sums_from(lengths)
        return self.packed.sums_from(lengths) if first is None else first

    def unpack(self) -> ResidentStore:
        self.kept = list(self.packed.lengths)
        return exact_copy(self.packed)

    def take_over(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        self.packed.load(k, v, lengths)
        self.packed.retain(slots, counts)
        self.packed.pack(everything=self.codec.packs_prompt)

    def take_again(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        self.packed.retain(slots, counts)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.add(k, v, ctx)
        out = attend_everything(self, self.packed, q, ctx)
        self.packed.pack()
        self.refresh(q, ctx)
        return out


def chooses(cls: type[Any]) -> bool:
    """Whether a method's choice of tokens works over a packed store."""
    return issubclass(cls, RetrievalMethod | EvictionMethod) and cls.composable


def codes(cls: type[Any]) -> bool:
    """Whether a method is a codec."""
    return issubclass(cls, QuantizationMethod)


@dataclass(kw_only=True)
class Coded(ComposedMethod):
    """One method's choice of tokens, at `budget`, in another method's bits."""

    name: ClassVar[str] = "coded"
    kind: ClassVar[str] = "any + quantize"
    released: ClassVar[str] = "that of its parts"
    noop_options: ClassVar[dict[str, Any]] = {"codec_budget": 1.0}

    # retrieval or eviction method that chooses the tokens
    policy: str = "pqcache"
    # hyper-parameters of the policy
    policy_options: dict = field(default_factory=dict)
    # quantization method that stores them
    codec: str = "zipcache"
    # hyper-parameters of the codec
    codec_options: dict = field(default_factory=dict)
    # the codec's budget, a share of 16 bits, if it has one (zipcache, mikv); 1.0 keeps tokens exact under every codec
    codec_budget: Part = 0.2

    def setup(self) -> None:
        cls = self.part_class("policy", chooses)
        if issubclass(cls, EvictionMethod):
            self.policy_options = {**cls.static_options, **self.policy_options}
        common = {**self.spent(), "dense_layers": self.dense_layers}
        self.chooser = self.make_part("policy_options", cls, common)
        if isinstance(self.chooser, RetrievalMethod):
            self.require(
                "policy_options", self.chooser.store == "resident", "store: resident, which the codec replaces"
            )
        else:
            # packed tokens give no probabilities
            once_only = self.chooser.ranks_by_steps or not self.part_class("codec", codes).drops_rows
            if self.chooser.refreshes and once_only:
                once = {"budget_rule": "prompt", "budget_of": "prompt"}
                self.chooser = self.make_part("policy_options", cls, {**common, **once})
            self.must_keep_its_choice("policy_options", self.chooser, "has no codec for")
        cls = self.part_class("codec", codes)
        common = {"protocol": self.protocol}
        if not cls.ignores_budget:
            common["budget"] = Budget(ratio=float(self.codec_budget))
        self.coder = self.make_part("codec_options", cls, common)
        if self.codec_budget == 1:
            self.coder = cls.noop(**self.codec_options, protocol=self.protocol)

    def parts(self) -> tuple[Method, ...]:
        return self.chooser, self.coder

    @property
    def effective_rule(self) -> str:
        return self.chooser.effective_rule

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan | None:
        return self.chooser.plan(s, layer_idx, n_layers)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> SelectiveLayer:
        if isinstance(self.chooser, RetrievalMethod):
            return CodedRetrievalLayer(layer_idx, shape, self.chooser, self.coder)
        return CodedEvictionLayer(layer_idx, shape, self.chooser, self.coder)
