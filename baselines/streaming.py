"""StreamingLLM: attention sinks and a local window, nothing in between (Xiao et al., arXiv 2309.17453, section 3.2).

protocol=release is the authors' code: 4 sinks, keys rotated by their rank in the cache, and room for a new turn is made before
it is attended.

Deviations:
- The default mode is static, so that generated tokens stay as they do under the retrieval methods; not under protocol=release,
  and not under an aligned token budget, which holds at every step.
- A prompt longer than the cache is attended whole, as under all methods. The release's evaluation feeds it token by token.
- Room is made for the tokens of a new turn alone. The release's chat also makes room for the longest answer.
- A budget of no more tokens than there are sinks keeps the first ones and the newest. The release has no such budgets.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedConfig

from pqcache.fields import Whole
from pqcache.selective import rope
from pqcache.selective.attention import row_mask
from pqcache.selective.budget import Plan, partition_plan
from pqcache.selective.eviction import EvictionLayer, EvictionMethod
from pqcache.selective.layer import LayerContext
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import check_rotated
from pqcache.store.resident import ResidentStore
from pqcache.store.transfer import table

_NEVER = torch.iinfo(torch.int32).max  # a position later than any


@dataclass(kw_only=True)
class StreamingLLM(EvictionMethod):
    """Keeps the first n_sink tokens and the most recent ones."""

    name: ClassVar[str] = "streaming"
    revision: ClassVar[int] = 1  # 1: sinks within the budget; see `revisions`
    released: ClassVar[str] = "mit-han-lab/streaming-llm: kv_cache.py, enable_streaming_llm.py"
    own_rule: ClassVar[str] = "exact"
    ranks_by_scores: ClassVar[bool] = False  # by position alone
    static_options: ClassVar[dict[str, Any]] = {"mode": "static"}

    # first tokens, always kept; null: 32 on top of a budget ratio, in the protocols paper and release 4 inside the budget
    n_sink: Whole | None = None
    # static: prune once, after the prompt; dynamic: each generated token evicts the oldest one after the sinks; rolling:
    # dynamic, and keys are rotated by their rank in the cache, as published; null: static, in the protocol release rolling, and
    # dynamic where the budget holds at every step (budget_rule)
    mode: Literal["static", "dynamic", "rolling"] | None = None

    def setup(self) -> None:
        self.by_protocol(n_sink=(32, 4), mode=("dynamic" if self.replans else "static", "static", "rolling"))

    def revisions(self) -> dict[str, int | str]:
        """The aligned protocol, where sinks come on top of the budget, computes what it always did."""
        return {} if self.protocol == "aligned" else super().revisions()

    def check_model(self, config: PreTrainedConfig) -> None:
        if self.mode == "rolling":
            check_rotated(config.get_text_config(decoder=True), "mode=rolling")

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        if self.protocol == "aligned":
            return partition_plan(self.budget_at(s), s, self.n_sink or 0, recent_ratio=1.0)
        total = self.budget.total(s)
        sinks = min(s, self.sinks_within(total if self.budget.tokens is None else self.budget.tokens))
        return Plan(sinks=sinks, local=min(s - sinks, max(1, total - sinks)), k=0)

    def sinks_within(self, total: int) -> int:
        """Sinks of a cache of `total` tokens, the newest among them."""
        return min(self.n_sink or 0, max(0, total - 1))

    def victim(self, layer: EvictionLayer) -> torch.Tensor:
        """Each row's oldest token after the sinks."""
        position = layer.positions.view(layer.store.length)
        sinks = [self.sinks_within(self.capacity(plan)) for plan in layer.plans]
        first = table(sinks, position.device)[:, None, None]
        candidates = position.masked_fill(position < first, _NEVER)
        valid = row_mask(layer.store.lengths, position.shape[2], position.device)
        return (candidates if valid is None else candidates.masked_fill(~valid, _NEVER)).argmin(-1)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> EvictionLayer:
        return (RollingLayer if self.mode == "rolling" else EvictionLayer)(layer_idx, shape, self)


class RollingLayer(EvictionLayer):
    """Stores keys before RoPE after the prompt; every query and key is rotated by its rank in the cache."""

    def clear(self) -> None:
        super().clear()
        self.by_rank = False  # whether staged keys are rotated by rank (a later turn), not by the model's positions
        self.coming: list[int] | None = None  # tokens of the turn per row, if what is held makes room for them first

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        if not ctx.step.first and self.positions is not None:
            if self.staged is None and self.method.protocol == "release":
                self.coming = [final - past for final, past in zip(ctx.step.final, ctx.step.past, strict=True)]
                self.staged, self.coming = self.unpack(), None
            held = self.staged.lengths if self.staged is not None else self.store.lengths
            at = table(held, q.device)[:, None] + torch.arange(q.shape[2], device=q.device)
            q, k = self._rotated_to(q, at, ctx), self._rotated_to(k, at, ctx)
            self.by_rank = True
        return super().prefill(q, k, v, mask, ctx)

    def unpack(self) -> ResidentStore:
        store = super().unpack()
        if self.coming is not None:
            self.make_room(store, self.coming)
        if self.positions is not None:
            rank = torch.arange(store.k.capacity, device=store.k.data.device)[None]
            store.k.data = rope.rotate(self.module, store.k.data, *rope.tables(self.rotary, store.k.data, rank))
        return store

    def make_room(self, store: ResidentStore, coming: list[int]) -> None:
        """Drop the oldest tokens after the sinks, so that row r's held and coming[r] new tokens fit; sinks stay."""
        slots, counts = [], []
        for length, plan, new in zip(store.lengths, self.plans, coming, strict=True):
            newest = max(0, min(length - plan.sinks, self.method.capacity(plan) - plan.sinks - new))
            slots.append(torch.tensor([*range(plan.sinks), *range(length - newest, length)]))
            counts.append(len(slots[-1]))
        heads = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True)[:, None].to(store.k.data.device)
        heads = heads.expand(-1, store.k.data.shape[1], -1)
        positions = self._positions(store.lengths).gather(-1, heads)
        store.retain(heads, counts)
        self._note(positions, counts)
        self.kept = counts

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.module, self.rotary = ctx.module, ctx.rotary
        at = torch.arange(k.shape[2], device=k.device)[None]
        if not self.by_rank and ctx.position_ids is not None:  # a caller may count padding columns as positions
            last = table(ctx.step.total, k.device)[:, None] - 1
            at = at + ctx.position_ids[:, -1:] - last
        super().settle(rope.unrotate(ctx.module, k, *rope.tables(ctx.rotary, k, at)), v, lengths, ctx)

    def add(self, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> None:
        super().add(rope.unrotate(ctx.module, k, ctx.cos, ctx.sin), v, ctx)

    def rotated(self, q: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = self.store.view()
        position = self.positions.view(keys.shape[2])[:, 0]  # the same for all heads
        valid = row_mask(self.store.lengths, position.shape[1], q.device)
        if valid is not None:
            position = position.masked_fill(~valid[:, 0], _NEVER)
        rank = position.argsort(-1).argsort(-1)
        newest = table(self.store.lengths, q.device)[:, None] - 1
        keys = rope.rotate(ctx.module, keys, *rope.tables(ctx.rotary, keys, rank))
        return self._rotated_to(q, newest, ctx), keys, values

    def _rotated_to(self, x: torch.Tensor, at: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """x (n, heads, t, d), which the model rotated by its positions, rotated by positions `at` (n, t) instead."""
        return rope.rotate(ctx.module, rope.unrotate(ctx.module, x, ctx.cos, ctx.sin), *rope.tables(ctx.rotary, x, at))
