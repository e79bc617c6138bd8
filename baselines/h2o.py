"""H2O: keep the tokens that received most attention, and the newest ones (Zhang et al., arXiv 2306.14048, Algorithm 1).

Heavy hitters are the keys with the largest accumulated attention.

protocol=release is the class of the authors' code that really drops tokens:
- Every query head chooses, as in the paper's models; K and V are repeated for it (repeat_kv).
- Of a budget ratio, heavy hitters and window are rounded down apart.

Deviations:
- One choice per KV head, by the mean of its group's sums, unless repeat_kv. The paper has one KV head per query head.
- Sums are in fp32. The release adds in 16 bits, where large sums stop growing.
- Rows of a batch are chosen apart. The release adds their sums and refuses batches.
- A new token attends beside a full budget, then one makes room. The release's mask simulation counts it inside, and hides a
  token that leaves the local window for one step.
- A new turn adds to the sums.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from pqcache.fields import Positive, Share, Whole, added
from pqcache.selective.budget import Plan, floor_share
from pqcache.selective.column_sums import accumulator_dtype, add_column_sums
from pqcache.selective.eviction import EvictionLayer, EvictionMethod
from pqcache.selective.layer import LayerContext
from pqcache.selective.scorer import Scorer
from pqcache.selective.shape import ModelShape
from pqcache.store.buffer import Buffer, take_tokens
from pqcache.store.drop import Lightest


class HeavyHitterScorer(Scorer):
    """The attention every entry has received: per query head during a prompt, then per KV head (mean of the group)."""

    per_row = ("sums", "prompt", "counts")
    needs_sums = True

    def __init__(self, shape: ModelShape) -> None:
        self.h_kv, self.group = shape.h_kv, shape.group
        self.prompt: torch.Tensor | None = None  # (n, h, final length), during a prompt
        self.sums: Buffer = None  # type: ignore[assignment]  # (n, h_kv, capacity) of the entries held
        self.counts: list[int] = []  # entries of `sums` per row

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        if self.prompt is None:
            step = ctx.step
            final = max(a + b - c for a, b, c in zip(stored, step.final, step.total, strict=True))
            self.prompt = torch.zeros((*q.shape[:2], final), dtype=accumulator_dtype(q), device=q.device)
        if ctx.probs is not None:  # attn=standard has computed them
            self.prompt[:, :, : ctx.probs.shape[3]] += ctx.probs.sum(2, dtype=self.prompt.dtype)
            return
        if ctx.column_sums is not None and ctx.column_sums.first == 0:  # so has the prompt's attention
            self.prompt += ctx.column_sums.sums
            return
        kept = ctx.kept if stored == ctx.step.counts else None  # all keys are the prompt's own
        if kept is not None and "column sums" in kept:
            self.prompt += kept["column sums"]
            return
        add_column_sums(self.prompt, q, keys, stored, ctx.step.counts, ctx.scaling)
        if kept is not None:
            kept["column sums"] = self.prompt.clone()

    def head_scores(self, k: torch.Tensor, lengths: list[int], ctx: LayerContext) -> torch.Tensor:
        assert self.prompt is not None
        scores, self.prompt = self.prompt, None
        if self.sums is not None:  # a new turn: add the sums from before it
            for row, count in enumerate(self.counts):
                scores[row, :, :count] += self.sums.data[row, :, :count].repeat_interleave(self.group, 0)
        self.sums = Buffer.like(scores[:, : self.h_kv])
        self.sums.data = scores.unflatten(1, (self.h_kv, self.group)).mean(2)
        return scores

    def retain(self, slots: torch.Tensor, counts: list[int]) -> None:
        self.sums.reserve(int(slots.max()) + 1)  # entries newer than the last scores have no sums yet
        kept = take_tokens(self.sums.data.contiguous(), slots)
        self.sums = Buffer.like(kept)
        self.sums.write(kept, [0] * len(counts), [kept.shape[2]] * len(counts))
        self.counts = list(counts)

    def received(self, lengths: list[int]) -> torch.Tensor:
        self.sums.reserve(max(lengths))
        for row, length in enumerate(lengths):  # the slot may still hold a dropped entry's sum
            self.sums.data[row, :, self.counts[row] : length] = 0
        self.counts, self.sums.filled = list(lengths), max(lengths)
        return self.sums.data

    def scores_now(
        self, k: torch.Tensor, positions: torch.Tensor, lengths: list[int], seen: list[int], scaling: float
    ) -> torch.Tensor:
        """The sums so far, the same for all query heads of a group."""
        return self.sums.view(max(lengths)).repeat_interleave(self.group, 1)

    @property
    def buffers(self) -> list[Buffer]:
        return [self.sums]

    def note_drop(self, lengths: list[int], rows: list[bool]) -> None:
        self.counts = [length - flag for length, flag in zip(lengths, rows, strict=True)]


@dataclass(kw_only=True)
class H2O(EvictionMethod):
    """Sinks, heavy hitters and the local window."""

    name: ClassVar[str] = "h2o"
    released: ClassVar[str] = "FMInference/H2O: h2o_hf, utils_real_drop"
    own_rule: ClassVar[str] = "exact"
    static_options: ClassVar[dict[str, Any]] = {"mode": "static"}

    # dynamic: each generated token evicts the lightest one outside sinks and local window; static: prune once, after the prompt
    mode: Literal["dynamic", "static"] = "dynamic"
    # the local window's share of the budget, sinks apart
    recent_ratio: Share = 0.5
    # tokens of the local window; null: by recent_ratio
    recent: Positive | None = None
    # first tokens, always kept; null: 32 on top of a budget ratio, in the protocols paper and release 0
    n_sink: Whole | None = None
    # K and V once per query head, each of which keeps tokens of its own; null: only in the protocol release
    repeat_kv: bool | None = added(None, absent=False)

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 0), repeat_kv=(False, False, True))

    def window(self, total: int) -> int:
        return max(1, floor_share(total, self.recent_ratio))

    def check_budget(self) -> None:
        self.require_room(self.recent or 1)

    def compensation(self, s: int) -> float:
        """Tokens on top of the budget at a prompt of `s` tokens."""
        return 0.0

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        sinks = min(self.n_sink or 0, s)
        rest = s - sinks
        budget = self.budget_at(s)
        if budget.tokens is not None:
            total = max(0, budget.tokens - sinks + floor_share(1, self.compensation(s)))
        else:
            assert budget.ratio is not None
            share = rest * budget.ratio + self.compensation(s)
            total = floor_share(1, share)
            if self.protocol == "release" and self.recent is None:
                total = floor_share(1, share * self.recent_ratio) + floor_share(1, share * (1 - self.recent_ratio))
        total = min(rest, total)
        local = floor_share(total, self.recent_ratio) if self.recent is None else min(self.recent, total)
        local = min(rest, max(1, local))
        return Plan(sinks=sinks, local=local, k=max(0, total - local))

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        return Scorer() if self.budget.is_everything else HeavyHitterScorer(shape)

    @property
    def ranks_by_steps(self) -> bool:
        return True

    @property
    def fixed_local(self) -> bool:
        return self.recent is not None

    def capacity(self, plan: Plan) -> int:
        """As planned; a prompt of sinks alone leaves room for one token more, so that no sink is evicted."""
        return max(super().capacity(plan), plan.total, plan.sinks + 1)

    def local(self, plan: Plan) -> int:
        """Newest tokens that a decode step may not drop."""
        if self.budget.tokens is not None and plan.total < self.budget.tokens:  # a short prompt, which has grown since
            plan = self.plan(self.budget.tokens, 0, 1)
        return max(1, plan.local)

    def victim(self, layer: EvictionLayer) -> Lightest:
        """The entry with the smallest sum outside sinks and local window."""
        scorer = layer.scorer
        assert isinstance(scorer, HeavyHitterScorer)
        ends = [seen - self.local(plan) for seen, plan in zip(layer.seen, layer.plans, strict=True)]
        return Lightest(layer.positions.data, scorer.sums.data, [plan.sinks for plan in layer.plans], ends)
