"""StreamingLLM: attention sinks and a local window, nothing in between (Xiao et al., arXiv 2309.17453, section 3.2).

Deviations:
- The default mode is static, so that generated tokens stay as they do under the retrieval methods.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pqcache.selective import rope
from pqcache.selective.attention import row_mask
from pqcache.selective.budget import Plan, partition_plan
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.eviction_layer import EvictionLayer
from pqcache.selective.layer import LayerContext
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.resident import ResidentStore

_NEVER = torch.iinfo(torch.int32).max  # a position later than any
MODES = ("static", "dynamic", "rolling")


@dataclass(kw_only=True)
class StreamingLLM(EvictionMethod):
    """Keeps the first n_sink tokens and the most recent ones."""

    name: ClassVar[str] = "streaming"
    ranks_by_scores: ClassVar[bool] = False  # by position alone
    static_options: ClassVar[dict[str, Any]] = {"mode": "static"}

    # first tokens, always kept; null: 32 on top of a budget ratio, in the paper's protocol 4 inside the budget
    n_sink: int | None = None
    # static: prune once, after the prompt; dynamic: each generated token evicts the oldest one after the sinks; rolling:
    # dynamic, and keys are rotated by their rank in the cache, as published
    mode: str = "static"

    def validate(self) -> None:
        self.require("n_sink", self.n_sink is None or self.n_sink >= 0, "an int >= 0")
        self.require_one_of("mode", MODES)

    def setup(self) -> None:
        if self.n_sink is None:
            self.n_sink = 32 if self.protocol == "aligned" else 4

    def check_budget(self) -> None:
        assert self.n_sink is not None
        if self.budget.tokens is not None and self.budget.tokens <= self.n_sink:
            raise NotApplicable(
                f"budget={self.budget.tokens}: streaming needs more tokens than its {self.n_sink} sinks"
            )

    @property
    def is_dynamic(self) -> bool:
        return self.mode != "static"

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        assert self.n_sink is not None
        if self.protocol == "aligned":
            return partition_plan(self.budget, s, self.n_sink, recent_ratio=1.0)
        total = self.budget.total(s)
        sinks = min(self.n_sink, s)
        return Plan(sinks=sinks, local=min(s - sinks, max(1, total - sinks)), k=0)

    def capacity(self, plan: Plan) -> int:
        return sys.maxsize if self.budget.is_everything else super().capacity(plan)

    def victim(self, layer: EvictionLayer) -> torch.Tensor:
        """Each row's oldest token after the sinks."""
        assert layer.positions is not None and self.n_sink is not None
        position = layer.positions.view(layer.store.length)
        candidates = position.masked_fill(position < self.n_sink, _NEVER)
        valid = row_mask(layer.store.lengths, position.shape[2], position.device)
        return (candidates if valid is None else candidates.masked_fill(~valid, _NEVER)).argmin(-1)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> EvictionLayer:
        return (RollingLayer if self.mode == "rolling" else EvictionLayer)(layer_idx, shape, self)


class RollingLayer(EvictionLayer):
    """Stores keys before RoPE after the prompt; every query and key is rotated by its rank in the cache."""

    def clear(self) -> None:
        super().clear()
        self.by_rank = False  # whether staged keys are rotated by rank (a later turn), not by the model's positions

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        if not ctx.step.first and self.positions is not None:
            held = self.staged.lengths if self.staged is not None else self.store.lengths
            at = torch.tensor(held, device=q.device)[:, None] + torch.arange(q.shape[2], device=q.device)
            q, k = self._rotated_to(q, at, ctx), self._rotated_to(k, at, ctx)
            self.by_rank = True
        return super().prefill(q, k, v, mask, ctx)

    def unpack(self) -> ResidentStore:
        store = super().unpack()
        if self.positions is not None:
            assert store.k is not None and self.module is not None and self.rotary is not None
            rank = torch.arange(store.k.capacity, device=store.k.data.device)[None]
            store.k.data = rope.rotate(self.module, store.k.data, *rope.tables(self.rotary, store.k.data, rank))
        return store

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.module, self.rotary = ctx.module, ctx.rotary
        at = torch.arange(k.shape[2], device=k.device)[None]
        if not self.by_rank and ctx.position_ids is not None:  # a caller may count padding columns as positions
            last = torch.tensor(ctx.step.total, device=k.device)[:, None] - 1
            at = at + ctx.position_ids[:, -1:] - last
        super().settle(rope.unrotate(ctx.module, k, *rope.tables(ctx.rotary, k, at)), v, lengths, ctx)

    def add(self, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> None:
        super().add(rope.unrotate(ctx.module, k, ctx.cos, ctx.sin), v, ctx)

    def rotated(self, q: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.positions is not None
        keys, values = self.store.view()
        position = self.positions.view(keys.shape[2])[:, 0]  # the same for all heads
        valid = row_mask(self.store.lengths, position.shape[1], q.device)
        if valid is not None:
            position = position.masked_fill(~valid[:, 0], _NEVER)
        rank = position.argsort(-1).argsort(-1)
        newest = torch.tensor(self.store.lengths, device=q.device)[:, None] - 1
        keys = rope.rotate(ctx.module, keys, *rope.tables(ctx.rotary, keys, rank))
        return self._rotated_to(q, newest, ctx), keys, values

    def _rotated_to(self, x: torch.Tensor, at: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """x (n, heads, t, d), which the model rotated by its positions, rotated by positions `at` (n, t) instead."""
        return rope.rotate(ctx.module, rope.unrotate(ctx.module, x, ctx.cos, ctx.sin), *rope.tables(ctx.rotary, x, at))
