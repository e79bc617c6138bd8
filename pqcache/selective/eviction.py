"""Family: drop tokens for good.

A method writes a `Scorer` (scorer.py) with `head_scores`, importance per query head, and an EvictionMethod with `plan` and
`make_scorer`. Where position alone decides it overrides `choose_entries` instead. The layer frees the memory of what is dropped,
and stores the positions of what stays.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from pqcache.selective.attention import attend_adding, attend_rows
from pqcache.selective.budget import Plan
from pqcache.selective.evictor import EvictionPolicy, Evictor
from pqcache.selective.group import per_head
from pqcache.selective.layer import LayerContext
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from pqcache.selective.staged import StagedLayer
from pqcache.store.buffer import dense, take_tokens
from pqcache.store.drop import Lightest, drop
from pqcache.store.resident import ResidentStore
from pqcache.store.step import StepParts


@dataclass(kw_only=True)
class EvictionMethod(EvictionPolicy):
    """Base of eviction methods. A subclass writes make_scorer (or choose_entries) and its plan."""

    def make_layer(self, layer_idx: int, shape: ModelShape) -> EvictionLayer:
        return EvictionLayer(layer_idx, shape, self)

    def capacity(self, plan: Plan) -> int:
        """Tokens a dynamic method holds between steps: a token budget in full, or its share of the prompt."""
        if self.budget.is_everything:
            return sys.maxsize
        return self.budget.tokens if self.budget.tokens is not None else plan.total

    def victim(self, layer: EvictionLayer) -> Lightest | torch.Tensor:
        """The entry to drop in each row and head of a full layer, or its slot (n, h_kv)."""
        raise NotImplementedError


class Repeated:
    """An attention module whose K and V come once per query head: transformers' kernels repeat them no more."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class EvictionLayer(Evictor, StagedLayer):
    """Keeps `plan.total` tokens per KV head after the prompt; a dynamic method then drops one per generated token.

    Where the method repeats K and V, what is kept has h heads: the prompt is staged as it comes, and repeated when it is settled.
    """

    per_row = ("staged", "store", *Evictor.per_row)
    method: EvictionMethod

    def __init__(self, layer_idx: int, shape: ModelShape, method: EvictionMethod) -> None:
        self.method, self.repeats, self.dynamic = method, method.repeats_kv, method.is_dynamic
        self.needs_probs, self.refreshes = method.needs_probs, method.refreshes
        StagedLayer.__init__(self, layer_idx, replace(shape, h_kv=shape.h) if method.repeats_kv else shape)
        self.model_shape = shape

    def clear(self) -> None:
        super().clear()
        self.store = ResidentStore()
        self.forget()

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        if self.method.repeats_kv and self.positions is not None:  # a later turn: what is held has h heads
            k, v, ctx = per_head(k, self.shape.h), per_head(v, self.shape.h), copy.copy(ctx)
            ctx.module = Repeated(ctx.module)  # type: ignore[assignment]
        return super().prefill(q, k, v, mask, ctx)

    def sums_from(self, lengths: list[int]) -> int | None:
        return 0 if self.scorer.needs_sums else None

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        self.scorer.observe(q, keys, stored, ctx)

    def unpack(self) -> ResidentStore:
        self.kept = list(self.store.lengths)
        if self.method.is_dynamic and self.positions is not None:  # drops have shuffled the entries
            self.sort(self.store)
        return self.store

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        if self.method.repeats_kv:
            k, v = per_head(k, self.shape.h), per_head(v, self.shape.h)
        slots, counts = self.choose(k, lengths, ctx)
        self.take_over(k, v, lengths, slots, counts)

    def take_over(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        """Store of all staged entries k, v (n, h_kv, max(lengths), d) those at `slots` (n, h_kv, m), row r's first counts[r]."""
        self.store = kept_of(k, v, slots, counts)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.add(k, v, ctx)
        q, keys, values = self.rotated(q, ctx)
        lengths = self.store.lengths
        if self.needs_probs:
            out = attend_adding(q, keys, values, lengths, ctx.scaling, self.scorer.received(lengths))
        else:
            out = attend_rows(q, keys, values, lengths, ctx.scaling)
        ctx.cache.ledger.attend(self.layer_idx, fmean(lengths), selecting=True)
        self.evict_surplus()
        self.refresh(q, ctx)
        return out

    def refresh(self, q: torch.Tensor, ctx: LayerContext) -> None:
        """After a step with queries q (n, h, 1, d): rank again, where the method does and the rows hold too much."""
        if not self.refreshes:
            return
        self.scorer.observe_query(q)
        over = self.is_over()
        if any(over):
            entries = self.unpack()
            keys, values = entries.view()
            slots, counts = self.choose_again(keys, entries.lengths, over, ctx)
            self.take_again(keys, values, entries.lengths, slots, counts)

    def take_again(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        """In the middle of an answer, store of all entries those at `slots`; arguments as of `take_over`."""
        self.take_over(k, v, lengths, slots, counts)

    # -- steps that are recorded --------------------------------------------------------------------------------------

    def step_parts(self) -> StepParts | None:
        """An evictor that drops nothing after the prompt attends to all it holds; a subclass may do more."""
        if type(self) is not EvictionLayer or self.dynamic or self.needs_probs or self.repeats or self.refreshes:
            return None
        return StepParts(self.store)

    def note_step(self, ledger: Ledger) -> None:
        super().note_step(ledger)
        self.seen = [s + 1 for s in self.seen]

    def add(self, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> None:
        """Store the new token, k and v (n, h_kv, 1, d), with its position."""
        if self.repeats:
            k, v = per_head(k, self.shape.h), per_head(v, self.shape.h)
        self.place(self.store.lengths, k)
        self.store.append(k, v)

    def evict_surplus(self) -> None:
        """A dynamic method drops one entry per head in every row that holds more than its capacity."""
        pairs = zip(self.store.lengths, self.plans, strict=True)
        over = [length > self.method.capacity(plan) for length, plan in pairs] if self.dynamic else []
        if any(over):
            buffers = [self.positions, *self.scorer.buffers, *self.store.buffers]
            drop(buffers, self.method.victim(self), self.store.lengths, over)
            self.scorer.note_drop(self.store.lengths, over)
            self.store.note_drop(over)

    def rotated(self, q: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, K, V as attention sees them; a method that keeps keys un-rotated overrides this."""
        return q, *self.store.view()

    def held_positions(self) -> torch.Tensor | None:
        return self.where(self.store.lengths)


def kept_of(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, counts: list[int]) -> ResidentStore:
    """A store with entries `slots` (n, h_kv, m), row r's first counts[r], of k, v (n, h_kv, t, d)."""
    store = ResidentStore()
    store.load(take_tokens(dense(k), slots), take_tokens(dense(v), slots), counts)
    return store
