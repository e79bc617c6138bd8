"""Eviction with lengths of their own for KV heads.

A method is a RaggedMethod: it writes `choose_heads`, which sees all KV heads of one row of the batch at once. Inside the layer
each KV head is a row by itself, with one KV head and the g query heads of its group, so that scorers and bookkeeping of evictors
of equal lengths serve it: n rows of h_kv heads are n * h_kv rows, row by row.
"""

import copy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

import torch
from transformers import PreTrainedConfig

from pqcache.selective.attention import attend_ragged
from pqcache.selective.budget import Plan
from pqcache.selective.eviction import EvictionLayer, EvictionMethod
from pqcache.selective.evictor import Evictor, join_rows
from pqcache.selective.layer import LayerContext
from pqcache.selective.scorer import Prompt
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.selective.support import WITH_SINKS
from pqcache.store.ragged import Ragged, RaggedStore
from pqcache.store.resident import ResidentStore
from pqcache.store.row_state import map_state


@dataclass(kw_only=True)
class RaggedMethod(EvictionMethod):
    """Base of evictors whose KV heads keep different numbers of tokens. A plan says what they keep in the mean."""

    ragged: ClassVar[bool] = True
    composable: ClassVar[bool] = False
    ranks_by_scores: ClassVar[bool] = False

    def check_model(self, config: PreTrainedConfig) -> None:
        super().check_model(config)
        if config.model_type in WITH_SINKS:
            raise NotApplicable(f"{self.name}: heads of their own length do not carry a model's attention sinks")

    def choose_heads(
        self, scores: list[torch.Tensor | None], lengths: list[int], plan: Plan, layer_idx: int
    ) -> list[torch.Tensor]:
        """Which entries each KV head of a row keeps, of lengths[j]: ascending slots (m_j,).

        scores[j] (g, lengths[j]) of its group's query heads, None where the scorer has none.
        """
        raise NotImplementedError

    def choose_entries(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        kept: list[torch.Tensor] = []
        for first in range(0, len(prompt.lengths), prompt.heads):
            lengths = prompt.lengths[first : first + prompt.heads]
            scores = [
                None if prompt.scores is None else prompt.scores[first + j, :, :length]
                for j, length in enumerate(lengths)
            ]
            kept += self.choose_heads(scores, lengths, prompt.plans[first], prompt.ctx.layer_idx)
        return join_rows([slots[None].to(prompt.k.device) for slots in kept])

    def make_layer(self, layer_idx: int, shape: ModelShape) -> EvictionLayer:
        return RaggedLayer(layer_idx, shape, self)


class RaggedLayer(EvictionLayer):
    """An eviction layer whose rows are the KV heads of all rows of the batch."""

    def clear(self) -> None:
        super().clear()
        self.store: RaggedStore = RaggedStore()  # type: ignore[assignment]

    # -- rows of the batch become rows of one KV head -----------------------------------------------------------------

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, heads, ...) -> (n * h_kv, heads / h_kv, ...)."""
        return x.reshape(x.shape[0] * self.shape.h_kv, -1, *x.shape[2:])

    def together(self, out: torch.Tensor) -> torch.Tensor:
        """An attention's result (n * h_kv, t, g, d) -> (n, t, h, d)."""
        return out.unflatten(0, (-1, self.shape.h_kv)).transpose(1, 2).flatten(2, 3)

    def each(self, values: list[int]) -> list[int]:
        """One entry per row of the batch -> one per KV head."""
        return [value for value in values for _ in range(self.shape.h_kv)]

    def context(self, ctx: LayerContext) -> LayerContext:
        """The same call, as these rows see it."""
        one, step = copy.copy(ctx), ctx.step
        past, counts, final = (self.each(of) for of in (step.past, step.counts, step.final))
        one.step, one.kept = replace(step, past=past, counts=counts, final=final, masks={}), None
        for name in ("cos", "sin", "position_ids"):
            x = getattr(ctx, name)
            if x is not None and len(x) > 1:
                setattr(one, name, x.repeat_interleave(self.shape.h_kv, 0))
        if ctx.column_sums is not None:
            one.column_sums = ctx.column_sums._replace(sums=self.apart(ctx.column_sums.sums))
        if ctx.probs is not None:
            one.probs = self.apart(ctx.probs)
        return one

    # -- the phases ---------------------------------------------------------------------------------------------------

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        if self.positions is None:  # all heads hold the whole prompt so far
            return super().prefill(q, k, v, mask, ctx)
        q, k, v = (self.apart(x) for x in (q, k, v))
        return self.together(super().prefill(q, k, v, None, self.context(ctx)))

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        if self.positions is None:
            q, keys, stored, ctx = self.apart(q), self.apart(keys), self.each(stored), self.context(ctx)
        super().observe(q, keys, stored, ctx)

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        ctx = self.context(ctx)
        if self.positions is None:
            k, v, lengths = self.apart(k), self.apart(v), self.each(lengths)
        ctx.values = v
        super().settle(k, v, lengths, ctx)

    def pick(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        return super().pick(replace(prompt, heads=self.shape.h_kv))

    def take_over(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        self.store.take(k, v, slots, counts)

    def unpack(self) -> ResidentStore:
        self.kept, whole = list(self.store.lengths), self.store.whole_rows()
        self.store = RaggedStore()
        return whole

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        q, k, v = (self.apart(x) for x in (q, k, v))
        self.add(k, v, ctx)
        ctx.cache.ledger.attend(self.layer_idx, fmean(self.store.lengths), selecting=True)
        return self.together(attend_ragged(q, self.store, ctx.scaling, ctx.cache.accelerator))

    # -- entries ------------------------------------------------------------------------------------------------------

    def _note(self, positions: torch.Tensor, counts: list[int]) -> None:
        self.positions, self.noted = Ragged(positions, counts), list(counts)

    def held_positions(self) -> torch.Tensor | None:
        """(n, h_kv, m), -1 where a head holds less than the longest of all."""
        position = super().held_positions()
        return None if position is None else position.view(-1, self.shape.h_kv, position.shape[2])

    def map_rows(self, index: torch.Tensor) -> None:
        own = (index[:, None] * self.shape.h_kv + torch.arange(self.shape.h_kv)).flatten()
        if self.staged is not None:  # the first prompt is staged as it comes
            self.staged.map_rows(index if self.positions is None else own)
        map_state(self, ("store", *Evictor.per_row), own)
