"""Evict, then retrieve: one method drops part of the prompt for good, another selects from what is left at every step.

    python run.py method=evict_retrieve method.evict=snapkv method.keep=0.5 method.retrieve=pqcache budget=0.1

A composition of published parts. It holds less than retrieval alone, whose K, V and index cover the whole prompt, and attends
fewer tokens than eviction alone at the same memory. Under protocol=release each part runs as its own published code.

Deviations from the parts alone:
- Evictors that also drop while decoding (H2O by default) prune once here: an index cannot forget single tokens.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from pqcache.fields import Part
from pqcache.selective.budget import Budget, Plan
from pqcache.selective.eviction import EvictionMethod, kept_of
from pqcache.selective.evictor import Evictor
from pqcache.selective.layer import LayerContext
from pqcache.selective.method import TOKEN_RULES, Method
from pqcache.selective.parts import ComposedMethod
from pqcache.selective.retrieval import RetrievalLayer, RetrievalMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.resident import ResidentStore


class EvictRetrieveLayer(RetrievalLayer):
    """A retrieval layer whose store and index hold what an evictor left of the prompt; the evictor records its positions."""

    per_row = (*RetrievalLayer.per_row, "evictor", "dropped")

    def __init__(self, layer_idx: int, shape: ModelShape, retriever: RetrievalMethod, evictor: EvictionMethod) -> None:
        self.evictor = Evictor(evictor, layer_idx, shape)
        super().__init__(layer_idx, shape, retriever)

    def clear(self) -> None:
        super().clear()
        self.evictor.forget()
        self.dropped: list[int] = []  # tokens of each row that the evictor dropped
        # a step that attends all of a token budget needs as many tokens
        self.evictor.least = self.method.budget.tokens or 0 if self.method.effective_rule in TOKEN_RULES else 0

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        self.evictor.scorer.observe(q, keys, stored, ctx)

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        slots, counts = self.evictor.choose(k, lengths, ctx)
        if self.store.lengths and not self.evictor.method.budget.is_everything:
            self.store = ResidentStore()  # a later turn moved the entries: host rows and index are stale
            self.index = self.new_index()
        self.dropped = [seen - held for seen, held in zip(ctx.step.total, counts, strict=True)]
        kept = self.staged = kept_of(k, v, slots, counts)
        super().settle(*kept.view(), counts, ctx)

    def make_plans(self, lengths: list[int], ctx: LayerContext) -> list[Plan]:
        """Window and k are the budget's share of all tokens seen; the rest of a plan describes the entries stored."""
        if self.method.effective_rule in TOKEN_RULES:  # all tokens seen are held, or more than the budget
            return super().make_plans(lengths, ctx)
        plans = []
        for held, seen in zip(lengths, ctx.step.total, strict=True):
            spent = self.method.plan(seen, self.layer_idx, self.shape.n_layers)
            stored = self.method.plan(held, self.layer_idx, self.shape.n_layers)
            plans.append(replace(stored, local=spent.local, k=spent.k))
        return plans

    def replan(self, lengths: list[int]) -> list[Plan]:
        stored = super().replan(lengths)
        if self.method.budget.tokens is not None:
            return stored
        spent = super().replan([held + dropped for held, dropped in zip(lengths, self.dropped, strict=True)])
        return [replace(a, local=b.local, k=b.k) for a, b in zip(stored, spent, strict=True)]

    def unpack(self) -> ResidentStore:
        self.evictor.kept = list(self.store.lengths)
        return super().unpack()

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.evictor.place(self.store.lengths, k)
        return super().decode(q, k, v, ctx)

    def held_positions(self) -> torch.Tensor | None:
        return self.evictor.where(self.store.lengths)


def evicts(cls: type[Any]) -> bool:
    """Whether a method can evict before another retrieves."""
    return issubclass(cls, EvictionMethod) and cls.composable


def retrieves(cls: type[Any]) -> bool:
    """Whether a method can retrieve from what another left."""
    return issubclass(cls, RetrievalMethod) and cls.composable


@dataclass(kw_only=True)
class EvictRetrieve(ComposedMethod):
    """An evictor prunes the prompt once; a retriever selects from the rest at every step, within `budget`.

    `budget` is the retriever's: a share of the whole prompt, or tokens, attended per step. If fewer tokens are left, all of them
    are attended; of an aligned token budget the evictor leaves at least as many. keep=1.0 is the retriever alone, budget=1.0 the
    evictor alone.

    Sinks, local window, pages and clusters of the retriever refer to the entries that are left, in the order of their
    positions. Keys keep their rotations. Generated tokens are added and none is dropped. A new turn attends to everything
    held. Its queries then rank the held and the new tokens; `keep` of all tokens seen stay and are indexed.
    """

    name: ClassVar[str] = "evict_retrieve"
    kind: ClassVar[str] = "evict + retrieve"
    released: ClassVar[str] = "that of each part"
    noop_options: ClassVar[dict[str, Any]] = {"keep": 1.0}

    # eviction method that prunes the prompt
    evict: str = "snapkv"
    # hyper-parameters of the eviction method
    evict_options: dict = field(default_factory=dict)
    # share of the prompt that the eviction method keeps, its sinks apart
    keep: Part = 0.5
    # retrieval method that selects from what is left
    retrieve: str = "pqcache"
    # hyper-parameters of the retrieval method, its store among them
    retrieve_options: dict = field(default_factory=dict)

    def setup(self) -> None:
        common = {**self.spent(), "dense_layers": self.dense_layers}
        cls, share = self.part_class("evict", evicts), Budget(ratio=float(self.keep))
        once = {"budget": share, "budget_rule": None, "budget_of": "prompt"}
        self.evictor = self.make_part("evict_options", cls, {**common, **once}, **cls.static_options)
        self.must_keep_its_choice("evict_options", self.evictor, "does not search")
        cls = self.part_class("retrieve", retrieves)
        self.retriever = self.make_part("retrieve_options", cls, common)

    def parts(self) -> tuple[Method, ...]:
        return self.evictor, self.retriever

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        """What a step attends: the retriever's plan, as far as it is held."""
        plan: Plan = self.retriever.plan(s, layer_idx, n_layers)
        held = self.evictor.plan(s, layer_idx, n_layers).total
        if self.replans and self.budget.tokens is not None:
            held = max(held, min(self.budget.tokens, s))
        return replace(plan, k=max(0, min(plan.k, held - plan.sinks - plan.local)))

    @property
    def effective_rule(self) -> str:
        return self.retriever.effective_rule

    def make_layer(self, layer_idx: int, shape: ModelShape) -> EvictRetrieveLayer:
        return EvictRetrieveLayer(layer_idx, shape, self.retriever, self.evictor)
