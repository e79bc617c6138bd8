"""Evict, then retrieve: one method drops part of the prompt for good, another one picks from what is left at every step.

    python run.py method=evict_retrieve method.evict=snapkv method.keep=0.5 method.retrieve=pqcache budget=0.1

A composition of published parts: less memory than retrieval alone, whose K, V and index hold the whole prompt, and fewer tokens
attended than eviction alone at the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedConfig

from baselines.clusterkv import ClusterKV
from baselines.h2o import H2O
from baselines.kvcrush import KVCrush
from baselines.oracle import Oracle
from baselines.pyramidkv import PyramidKV
from baselines.quest import Quest
from baselines.snapkv import SnapKV
from baselines.sparq import SparQ
from pqcache.pq import PQCache
from pqcache.selective.budget import Budget, Plan
from pqcache.selective.eviction import EvictionMethod, Evictor, kept_of
from pqcache.selective.layer import LayerContext
from pqcache.selective.method import Method
from pqcache.selective.retrieval import RetrievalLayer, RetrievalMethod
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.resident import ResidentStore

EVICT: dict[str, type[EvictionMethod]] = {"snapkv": SnapKV, "pyramidkv": PyramidKV, "h2o": H2O, "kvcrush": KVCrush}
RETRIEVE: dict[str, type[RetrievalMethod]] = {
    "pqcache": PQCache,
    "sparq": SparQ,
    "quest": Quest,
    "clusterkv": ClusterKV,
    "oracle": Oracle,
}
OURS = ("budget", "protocol", "dense_layers")  # not a part's to choose


class EvictRetrieveLayer(RetrievalLayer):
    """A retrieval layer whose store and index see what an evictor left of the prompt; positions of that are kept beside it."""

    def __init__(self, layer_idx: int, shape: ModelShape, retriever: RetrievalMethod, evictor: EvictionMethod) -> None:
        self.evictor = Evictor(evictor, layer_idx, shape)
        super().__init__(layer_idx, shape, retriever)

    def clear(self) -> None:
        super().clear()
        self.evictor.forget()

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        self.evictor.scorer.observe(q, keys, stored, ctx)

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        slots, counts = self.evictor.choose(k, lengths, ctx)
        if self.store is not None and not self.evictor.method.budget.is_everything:
            self.store = None  # a later turn moved the entries: neither host rows nor index are of use any more
            self.index = self.new_index()
        kept = self.staged = kept_of(k, v, slots, counts)
        super().settle(*kept.view(), counts, ctx)

    def make_plans(self, lengths: list[int], ctx: LayerContext) -> list[Plan]:
        """Window and selection of a budget for everything seen; the rest of a plan describes what is stored."""
        plans = []
        for held, seen in zip(lengths, ctx.step.total, strict=True):
            spent = self.method.plan(seen, self.layer_idx, self.shape.n_layers)
            stored = self.method.plan(held, self.layer_idx, self.shape.n_layers)
            plans.append(replace(stored, local=spent.local, k=spent.k))
        return plans

    def unpack(self) -> ResidentStore:
        assert self.store is not None
        self.evictor.kept = list(self.store.lengths)
        return super().unpack()

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        assert self.store is not None
        self.evictor.place(self.store.lengths, k)
        return super().decode(q, k, v, ctx)

    def held_positions(self) -> torch.Tensor | None:
        return None if self.store is None else self.evictor.where(self.store.lengths)

    def map_rows(self, index: torch.Tensor) -> None:
        super().map_rows(index)
        self.evictor.follow_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        tiers = super().tensors()
        for tier, tensors in self.evictor.own_tensors().items():
            tiers.setdefault(tier, []).extend(tensors)
        return tiers


@dataclass(kw_only=True)
class EvictRetrieve(Method):
    """evict, evict_options: what drops tokens once, after the prompt, and its hyper-parameters. keep: the share of the prompt
    that it keeps (its own sinks apart, as its budget ratio counts them).

    retrieve, retrieve_options: what picks from the rest at every step, and its hyper-parameters, its store among them. `budget`
    is its own: a share of the whole prompt, or tokens, attended per step. A budget beyond what is held attends all of it.

    Sinks, local window, pages and clusters of the retriever are of the entries that are left, in the order of their positions:
    its window is the newest of them. Keys keep their rotations. Generated tokens are added, and none is dropped while they
    come; a new turn attends to everything held, then evicts again, with its own queries, from that and itself (`keep` of all
    tokens seen), and indexes what is left anew. keep=1.0 is the retriever alone, budget=1.0 the evictor alone.

    Deviations: evictors that also drop while decoding (H2O by default) prune once here: an index whose tokens go one by one
    would have to forget them.
    """

    name: ClassVar[str] = "evict_retrieve"

    evict: str = "snapkv"
    evict_options: dict = field(default_factory=dict)
    keep: float = 0.5
    retrieve: str = "pqcache"
    retrieve_options: dict = field(default_factory=dict)

    def validate(self) -> None:
        self.require_one_of("evict", tuple(EVICT))
        self.require_one_of("retrieve", tuple(RETRIEVE))
        self.require("keep", 0 < self.keep <= 1, "a number in (0, 1]")
        static = {"mode": "static"} if self.evict == "h2o" else {}
        share = Budget(ratio=float(self.keep))
        self.evictor = self._part("evict_options", EVICT[self.evict], share, {**static, **self.evict_options})
        self.require("evict_options", not self.evictor.is_dynamic, "an evictor that prunes once (mode: static)")
        self.retriever = self._part("retrieve_options", RETRIEVE[self.retrieve], self.budget, self.retrieve_options)

    def _part(self, key: str, cls: type[Any], budget: Budget, options: dict) -> Any:
        ours = [name for name in options if name in OURS]
        self.require(key, not ours, f"what is the part's own, without {', '.join(ours)}")
        try:
            return cls(budget=budget, protocol=self.protocol, dense_layers=self.dense_layers, **options)
        except NotApplicable:
            raise
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}={getattr(self, key)}: {str(error).split('() ')[-1]}") from None

    def check_model(self, config: PreTrainedConfig) -> None:
        self.evictor.check_model(config)
        self.retriever.check_model(config)

    def check_prepared(self, *where: Any) -> None:
        self.retriever.check_prepared(*where)

    def prepare(self, model: Any, text: torch.Tensor | None, cache_dir: Any) -> None:
        self.evictor.prepare(model, text, cache_dir)
        self.retriever.prepare(model, text, cache_dir)

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        """What a step attends: the retriever's plan, as far as it is held."""
        plan: Plan = self.retriever.plan(s, layer_idx, n_layers)
        held = self.evictor.plan(s, layer_idx, n_layers).total
        return replace(plan, k=max(0, min(plan.k, held - plan.sinks - plan.local)))

    def make_layer(self, layer_idx: int, shape: ModelShape) -> EvictRetrieveLayer:
        return EvictRetrieveLayer(layer_idx, shape, self.retriever, self.evictor)

    @classmethod
    def noop(cls, **hyper: Any) -> Self:
        return super().noop(**{**hyper, "keep": 1.0})
