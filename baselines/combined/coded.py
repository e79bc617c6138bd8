"""Coded: one method's choice of tokens, kept in another method's bits.

    python run.py method=coded method.policy=pqcache method.codec=zipcache budget=0.2

A retrieval policy reads the tokens it selects from a coded store; an evictor's kept tokens are packed. The store sees the
prompt's queries, so bit widths that depend on attention work as they do alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from baselines.gear import GEAR
from baselines.h2o import H2O
from baselines.int8 import Int8
from baselines.kivi import KIVI
from baselines.kvcrush import KVCrush
from baselines.oracle import Oracle
from baselines.pyramidkv import PyramidKV
from baselines.quest import Quest
from baselines.snapkv import SnapKV
from baselines.streaming import StreamingLLM
from baselines.zipcache import MiKV, ZipCache
from pqcache.pq import PQCache
from pqcache.selective.attention import partial
from pqcache.selective.budget import Budget, Plan
from pqcache.selective.eviction import EvictionLayer, EvictionMethod
from pqcache.selective.group import per_head
from pqcache.selective.layer import LayerContext, SelectiveLayer, exact_copy
from pqcache.selective.method import Method
from pqcache.selective.quantization import QuantizationMethod, attend_coded
from pqcache.selective.retrieval import RetrievalLayer, RetrievalMethod, RetrievalStore
from pqcache.selective.shape import ModelShape
from pqcache.store.resident import ResidentStore

RETRIEVAL: dict[str, type[RetrievalMethod]] = {"pqcache": PQCache, "oracle": Oracle, "quest": Quest}
EVICTION: dict[str, type[EvictionMethod]] = {
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "h2o": H2O,
    "kvcrush": KVCrush,
    "streaming": StreamingLLM,
}
CODECS: dict[str, type[QuantizationMethod]] = {
    "zipcache": ZipCache,
    "mikv": MiKV,
    "int8": Int8,
    "kivi": KIVI,
    "gear": GEAR,
}


class CodedRetrievalLayer(RetrievalLayer):
    """Selects as `method` does, from a coded store that lives as long as the request."""

    def __init__(self, layer_idx: int, shape: ModelShape, method: RetrievalMethod, codec: QuantizationMethod) -> None:
        self.codec = codec
        super().__init__(layer_idx, shape, method)

    def clear(self) -> None:
        super().clear()
        self.coded = self.codec.make_store(self.layer_idx, self.shape)

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        self.coded.observe(q, keys, stored, ctx)

    def new_store(self, window: int, ctx: LayerContext) -> RetrievalStore:
        return self.coded

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        super().settle(k, v, lengths, ctx)
        self.coded.pack(everything=self.codec.packs_prompt)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        if all(self.dense):  # nothing to choose from: tile by tile instead of reading everything at once
            out = attend_all(self, q, k, v, ctx)
        else:
            out = super().decode(q, k, v, ctx)
        self.coded.pack()
        return out

    def attend_chosen(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        ctx: LayerContext,
        log_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the base class, but the store's probes learn how much was attended in all."""
        mask = None if valid is None else per_head(valid, q.shape[1])[:, :, None]
        bias = None if log_weight is None else log_weight[:, :, None]
        part = partial(q, keys, values, ctx.scaling, mask, bias=bias)
        self.coded.observe_step(q, part.lse, ctx)
        return part.out.transpose(1, 2).to(q.dtype)

    def map_rows(self, index: torch.Tensor) -> None:
        if self.store is None:  # a prompt that still comes in: the store has seen its queries only
            self.coded.map_rows(index)
        super().map_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        tiers = super().tensors()
        if self.store is None:
            tiers["device"] += self.coded.tensors()["device"]
        return tiers


class CodedEvictionLayer(EvictionLayer):
    """Keeps what `method` keeps, packed. What was packed stays packed when a later turn evicts again."""

    def __init__(self, layer_idx: int, shape: ModelShape, method: EvictionMethod, codec: QuantizationMethod) -> None:
        self.codec = codec
        super().__init__(layer_idx, shape, method)

    def clear(self) -> None:
        super().clear()
        self.coded = self.codec.make_store(self.layer_idx, self.shape)
        self.store: Any = self.coded

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        super().observe(q, keys, stored, ctx)
        self.coded.observe(q, keys, stored, ctx)

    def unpack(self) -> ResidentStore:
        self.kept = list(self.coded.lengths)
        return exact_copy(self.coded)

    def take_over(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        self.coded.load(k, v, lengths)
        self.coded.retain(slots, counts)
        self.coded.pack(everything=self.codec.packs_prompt)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        out = attend_all(self, q, k, v, ctx)
        self.coded.pack()
        return out


def attend_all(
    layer: CodedRetrievalLayer | CodedEvictionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ctx: LayerContext,
) -> torch.Tensor:
    """Store one token per row, k and v (n, h_kv, 1, d), and attend q (n, h, 1, d) to everything stored: (n, 1, h, d)."""
    if isinstance(layer, EvictionLayer):
        layer.add(k, v, ctx)  # with its position
    else:
        layer.coded.append(k, v)
    lengths = layer.coded.lengths
    part = attend_coded(q, layer.coded, ctx.scaling)
    layer.coded.observe_step(q, part.lse, ctx)
    ctx.cache.ledger.attend(layer.layer_idx, sum(lengths) / len(lengths), selecting=True)
    return part.out.transpose(1, 2).to(q.dtype)


@dataclass(kw_only=True)
class Coded(Method):
    """policy, policy_options: the method that selects or evicts, at `budget`, and its hyper-parameters.

    codec, codec_options: the method that codes, and its hyper-parameters. codec_budget: the share of 16-bit codes it takes,
    where it has one (zipcache, mikv); 1.0 keeps tokens exact, whatever the codec.

    Deviations from the parts alone: a retrieval policy's sinks and local window are coded like everything else, its index is
    built from the exact keys, and of generated tokens, probes see the attention over what was selected. Evictors prune once.
    Where a later turn's eviction leaves heads with unequal numbers of packed tokens, the surplus is decoded and packed again.
    """

    name: ClassVar[str] = "coded"

    policy: str = "pqcache"
    policy_options: dict = field(default_factory=dict)
    codec: str = "zipcache"
    codec_options: dict = field(default_factory=dict)
    codec_budget: float = 0.2

    def validate(self) -> None:
        policies: dict[str, type[Any]] = {**RETRIEVAL, **EVICTION}
        self.require_one_of("policy", tuple(policies))
        self.require_one_of("codec", tuple(CODECS))
        self.require("codec_budget", 0 < self.codec_budget <= 1, "a number in (0, 1]")
        if self.policy in ("h2o", "streaming"):
            self.policy_options = {"mode": "static", **self.policy_options}
        common = {"budget": self.budget, "protocol": self.protocol, "dense_layers": self.dense_layers}
        self.chooser = self.make_part("policy_options", policies[self.policy], common)
        if isinstance(self.chooser, RetrievalMethod):
            self.require(
                "policy_options", self.chooser.store == "resident", "store: resident, which the codec replaces"
            )
        else:
            self.require("policy_options", not self.chooser.is_dynamic, "an evictor that prunes once (mode: static)")
        cls = CODECS[self.codec]
        budget = {} if cls.ignores_budget else {"budget": Budget(ratio=float(self.codec_budget))}
        self.coder = self.make_part("codec_options", cls, budget)
        if self.codec_budget == 1:
            self.coder = cls.noop(**self.codec_options)

    def check_model(self, config: Any) -> None:
        self.chooser.check_model(config)
        self.coder.check_model(config)

    def check_prepared(self, *where: Any) -> None:
        self.chooser.check_prepared(*where)

    def prepare(self, model: Any, text: torch.Tensor | None, cache_dir: Any) -> None:
        self.chooser.prepare(model, text, cache_dir)
        self.coder.prepare(model, text, cache_dir)

    def know_tokenizer(self, tokenizer: Any) -> None:
        self.chooser.know_tokenizer(tokenizer)
        self.coder.know_tokenizer(tokenizer)

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan | None:
        return self.chooser.plan(s, layer_idx, n_layers)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> SelectiveLayer:
        if isinstance(self.chooser, RetrievalMethod):
            return CodedRetrievalLayer(layer_idx, shape, self.chooser, self.coder)
        return CodedEvictionLayer(layer_idx, shape, self.chooser, self.coder)

    @classmethod
    def noop(cls, **hyper: Any) -> Self:
        return super().noop(**{**hyper, "codec_budget": 1.0})
