"""Two-stage retrieval: one index makes a shortlist (clusters, pages, ...), another one ranks it (product-quantized keys, ...).

A composition of published parts: the coarse choice of ClusterKV (arXiv 2412.03213) or Quest (arXiv 2406.10774), the fine one of
PQCache (arXiv 2407.12820). Nobody published the pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from baselines.clusterkv import ClusterKV
from baselines.oracle import Oracle
from baselines.quest import Quest
from baselines.sparq import SparQ
from pqcache.pq import PQCache
from pqcache.selective.budget import Plan
from pqcache.selective.group import group_reduce, top_tokens
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalLayer, RetrievalMethod
from pqcache.selective.shape import ModelShape, NotApplicable

SECOND: dict[str, type[RetrievalMethod]] = {"pqcache": PQCache, "sparq": SparQ, "oracle": Oracle}
FIRST: dict[str, type[RetrievalMethod]] = {"quest": Quest, "clusterkv": ClusterKV, **SECOND}
PER_KV_HEAD = {"quest": "sum_logit"}  # where a method's usual way to agree is none: how a group shares one shortlist
OURS = ("n_sink", "recent_ratio", "store", "reduce", "budget", "protocol", "dense_layers")  # not a part's to choose


@dataclass(frozen=True)
class TwoStagePlan(Plan):
    """The second stage's plan, and the first stage's, without a window of its own."""

    first: Plan


def spread(ends: list[int], starts: list[int], device: torch.device) -> torch.Tensor:
    """Positions starts[r] .. ends[r]-1 of each row, -1 = padding: (n, 1, longest)."""
    width = max(0, *(end - start for start, end in zip(starts, ends, strict=True)))
    position = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
    return torch.where(position < torch.tensor(ends, device=device)[:, None], position, -1)[:, None]


def ascending(positions: torch.Tensor) -> torch.Tensor:
    """Sorted along the last axis, padding (-1) at the end."""
    last = torch.iinfo(positions.dtype).max
    positions = torch.where(positions < 0, last, positions).sort(-1).values
    return torch.where(positions == last, -1, positions)


class TwoStageIndex(Index):
    """Both stages' indexes. The second one scores the shortlist, and what is attended anyway if its softmax asks for it."""

    def __init__(self, method: TwoStage, first: Index, second: Index) -> None:
        self.method, self.first, self.second = method, first, second
        self.reduce, self.scope = second.reduce, second.scope

    @property
    def layer(self) -> RetrievalLayer:
        return self.second.layer

    @layer.setter
    def layer(self, layer: RetrievalLayer) -> None:
        self.first.layer = self.second.layer = layer

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        built = self.first.build(k, v, lengths, ctx), self.second.build(k, v, lengths, ctx)
        return [all(row) for row in zip(*built, strict=True)]

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.first.append(k, v, lengths, ctx)
        self.second.append(k, v, lengths, ctx)

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()

    def on_previous_input(self, ctx: LayerContext) -> None:
        self.first.on_previous_input(ctx)
        self.second.on_previous_input(ctx)

    def on_layer_input(self, ctx: LayerContext) -> None:
        self.first.on_layer_input(ctx)
        self.second.on_layer_input(ctx)

    def end_step(self) -> None:
        self.first.end_step()
        self.second.end_step()

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        return self.second.score(q, lo, hi, ctx)

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        return self.second.score_at(q, indices, ctx)

    def local(self, plan: Plan, past: int) -> int:
        return self.second.local(plan, past)

    def max_local(self, plan: Plan) -> int:
        assert isinstance(plan, TwoStagePlan)
        return max(self.first.max_local(plan.first), self.second.max_local(plan))

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        wanted = [
            min(hi - cand.sinks, max(k, math.ceil(self.method.shortlist * k)))
            for hi, k in zip(cand.ends, cand.k, strict=True)
        ]
        if all(count == hi - cand.sinks for count, hi in zip(wanted, cand.ends, strict=True)):
            return self.second.select(q, cand, h_kv, ctx)
        return self.rank(q, self.shorten(q, cand, wanted, h_kv, ctx), cand, h_kv, ctx)

    def shorten(
        self, q: torch.Tensor, cand: Candidates, wanted: list[int], h_kv: int, ctx: LayerContext
    ) -> torch.Tensor:
        """Positions (n, H, m), ascending, -1 = padding: what the first index chooses, and what it does not cover yet."""
        known = []  # up to here the first index knows every token; one that lags behind says so by its window
        for plan, hi, length in zip(self.layer.plans, cand.ends, cand.lengths, strict=True):
            assert isinstance(plan, TwoStagePlan)
            known.append(min(hi, max(cand.sinks, length - 1 - self.first.local(plan.first, length - 1))))
        counts = [min(count, end - cand.sinks) for count, end in zip(wanted, known, strict=True)]
        rest = spread(cand.ends, known, q.device)
        if max(counts) == 0:
            return rest
        chosen = self.first.select(q, Candidates(cand.sinks, known, counts, cand.lengths), h_kv, ctx).indices
        return ascending(torch.cat([chosen, rest.expand(-1, chosen.shape[1], -1)], dim=2))

    def rank(
        self, q: torch.Tensor, shortlist: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext
    ) -> Selection:
        """The second index's best cand.k[r] of a shortlist (n, H, m); -1 where a shortlist is shorter than that."""
        h, forced = q.shape[1], 0
        scored = shortlist
        if self.scope == "all":  # the softmax takes in what is attended anyway, as far as it is known
            always = torch.cat(
                [spread([min(cand.sinks, n) for n in cand.lengths], [0] * len(cand.lengths), q.device),
                 spread(cand.lengths, cand.ends, q.device)], dim=2
            )  # fmt: skip
            forced = always.shape[2]
            scored = torch.cat([always.expand(-1, shortlist.shape[1], -1), shortlist], dim=2)
        logits = self.second.score_at(q, scored, ctx)
        valid = scored >= 0
        logits = logits.masked_fill(~valid.repeat_interleave(h // valid.shape[1], dim=1), -torch.inf)
        weights = group_reduce(logits, h_kv, self.reduce, span=(forced, scored.shape[2]))
        shortlist = shortlist.repeat_interleave(weights.shape[1] // shortlist.shape[1], dim=1)
        slots = top_tokens(weights.masked_fill(shortlist < 0, -torch.inf), [min(k, shortlist.shape[2]) for k in cand.k])
        indices = torch.where(slots < 0, slots, shortlist.gather(2, slots.clamp_min(0)))
        return Selection(indices, padded=True)

    def map_rows(self, index: torch.Tensor) -> None:
        self.first.map_rows(index)
        self.second.map_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        first, second = self.first.tensors(), self.second.tensors()
        return {tier: [*first.get(tier, []), *second.get(tier, [])] for tier in {**first, **second}}


@dataclass(kw_only=True)
class TwoStage(RetrievalMethod):
    """first, second: the methods whose indexes shorten and rank; first_options, second_options: their hyper-parameters.
    shortlist: how many times the tokens to select the first stage hands over, at least 1.

    Sinks, window, k, store and reduce are this method's own and hold for both stages; a group of query heads shares a shortlist
    unless reduce=none lets every query head choose. Only the shortlist is scored by the second index. Tokens the first stage has
    no place for yet (ClusterKV's generated tokens) are always on it. Whole pages may make it longer, pages cut by the window
    shorter; a step attends fewer tokens where less than k are left.

    Deviations: a softmax over all past tokens (oracle, sparq) is taken over the attended and shortlisted ones, all that are
    scored. SparQ's mean value cannot be used: its share is a sum over every token.
    """

    name: ClassVar[str] = "two_stage"

    first: str = "quest"
    second: str = "pqcache"
    first_options: dict = field(default_factory=dict)
    second_options: dict = field(default_factory=dict)
    shortlist: float = 4.0

    def validate(self) -> None:
        super().validate()
        self.require_one_of("first", tuple(FIRST))
        self.require_one_of("second", tuple(SECOND))
        self.require("shortlist", self.shortlist >= 1, "a number >= 1")
        self.shortener = self._part("first", FIRST[self.first])
        self.ranker = self._part("second", SECOND[self.second])

    def _part(self, stage: str, cls: type[RetrievalMethod]) -> RetrievalMethod:
        """The method whose index serves one stage; it gets this method's partition as far as it has one."""
        key = f"{stage}_options"
        options = getattr(self, key)
        ours = [name for name in options if name in OURS or name.startswith("cache_")]
        self.require(key, not ours, f"what is the part's own; method.{', method.'.join(ours)} hold for both stages")
        shared: dict[str, Any] = {"n_sink": min(cls.n_sink, self.n_sink), "store": self.store, "reduce": self.reduce}
        if stage == "second":
            shared |= {"n_sink": self.n_sink, "recent_ratio": self.recent_ratio}
        elif self.reduce != "none":
            shared["reduce"] = PER_KV_HEAD.get(self.first, "sum_softmax")
        try:
            part = cls(budget=self.budget, protocol=self.protocol, dense_layers=self.dense_layers, **shared, **options)
        except NotApplicable:
            raise
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}={options}: {str(error).split('() ')[-1]}") from None
        self.require(
            key, not getattr(part, "reallocate", False), "reallocate=false: it needs the weights of all tokens"
        )
        return part

    def check_model(self, config: PreTrainedConfig) -> None:
        self.shortener.check_model(config)
        self.ranker.check_model(config)

    def check_prepared(self, *where: Any) -> None:
        self.shortener.check_prepared(*where)
        self.ranker.check_prepared(*where)

    def prepare(self, model: Any, text: torch.Tensor | None, cache_dir: Any) -> None:
        self.shortener.prepare(model, text, cache_dir)
        self.ranker.prepare(model, text, cache_dir)

    def plan(self, s: int, layer_idx: int, n_layers: int) -> TwoStagePlan:
        own, first = (part.plan(s, layer_idx, n_layers) for part in (self.ranker, self.shortener))
        return TwoStagePlan(own.sinks, own.local, own.k, replace(first, local=0))

    def make_index(self, layer_idx: int, shape: ModelShape) -> TwoStageIndex:
        first, second = (part.make_index(layer_idx, shape) for part in (self.shortener, self.ranker))
        return TwoStageIndex(self, first, second)
