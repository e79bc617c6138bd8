"""Two-stage retrieval: one index makes a shortlist (pages, clusters, ...), another ranks it (product-quantized keys, ...).

    python run.py method=two_stage method.first=quest method.second=pqcache budget=0.1

A composition of published parts: the coarse choice of Quest (arXiv 2406.10774) or ClusterKV (arXiv 2412.03213), the fine one of
PQCache (arXiv 2407.12820). The pair itself is not published. Under protocol=release each stage runs as its own published code;
sinks, window, k and `reduce` are this method's own under every protocol.

Deviations from the parts alone:
- A softmax over all past tokens (oracle, sparq) is taken over the attended and shortlisted tokens: no others are scored.
- SparQ's mean value is refused: its share is a sum over every token.
- Whole pages make a shortlist longer, pages cut by the window make it shorter. A step attends fewer tokens where fewer than k
  are left, except under an aligned token budget: there the shortlist is always long enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar

import torch

from pqcache import kernels
from pqcache.fields import MOST
from pqcache.kernels.scaling import capped
from pqcache.selective.budget import Plan
from pqcache.selective.group import group_reduce, top_tokens
from pqcache.selective.index import Candidates, Index, IndexedLayer, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.method import Method
from pqcache.selective.parts import ComposedMethod
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape

# What every retrieval method has: the options of this method, which hold for both stages.
SHARED = tuple(f.name for f in fields(RetrievalMethod))


@dataclass(frozen=True)
class TwoStagePlan(Plan):
    """The second stage's plan, and the first stage's, whose window is among the tokens to choose."""

    first: Plan


def spread(ends: list[int], starts: list[int], device: torch.device) -> torch.Tensor:
    """Positions starts[r] .. ends[r]-1 of each row, -1 = padding: (n, 1, longest)."""
    width = max(0, *(end - start for start, end in zip(starts, ends, strict=True)))
    position = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
    return torch.where(position < torch.tensor(ends, device=device)[:, None], position, -1)[:, None]


def ascending(positions: torch.Tensor, length: int) -> torch.Tensor:
    """positions (n, H, m), all different in a head, sorted along the last axis, padding (-1) at the end."""
    if kernels.native(positions):
        return kernels.positions.ascending(positions, length)
    last = torch.iinfo(positions.dtype).max
    positions = torch.where(positions < 0, last, positions).sort(-1).values
    return torch.where(positions == last, -1, positions)


class TwoStageIndex(Index):
    """The indexes of both stages. The second scores the shortlist, and what is attended anyway if its softmax includes it."""

    per_row = ("first", "second", "built")

    def __init__(self, method: TwoStage, first: Index, second: Index) -> None:
        self.method, self.first, self.second = method, first, second
        self.reduce, self.scope = second.reduce, second.scope
        self.built: list[list[bool]] = []  # per row: whether the first, the second has an index

    @property
    def layer(self) -> IndexedLayer:
        return self.second.layer

    @layer.setter
    def layer(self, layer: IndexedLayer) -> None:
        self.first.layer = self.second.layer = layer

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        built = self.first.build(k, v, lengths, ctx), self.second.build(k, v, lengths, ctx)
        self.built = [list(row) for row in zip(*built, strict=True)]
        return [all(row) for row in self.built]

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.first.append(k, v, lengths, ctx)
        self.second.append(k, v, lengths, ctx)

    def build_late(self, lengths: list[int], rows: list[int], ctx: LayerContext) -> list[bool]:
        for stage, index in enumerate((self.first, self.second)):
            due = [row for row in rows if not self.built[row][stage]]
            for row, ok in zip(due, index.build_late(lengths, due, ctx), strict=True):
                self.built[row][stage] = ok
        return [all(self.built[row]) for row in rows]

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

    def local(self, plan: Plan, past: int) -> int:
        assert isinstance(plan, TwoStagePlan)
        own = self.second.local(plan, past)
        # Before a first stage has keys enough for its index, its window is the whole budget. ClusterKV always has its clusters.
        return own if all(first for first, _ in self.built) else max(own, self.first.local(plan.first, past))

    def max_local(self, plan: Plan) -> int:
        assert isinstance(plan, TwoStagePlan)
        return max(self.first.max_local(plan.first), self.second.max_local(plan))

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        # a step that attends exactly its budget needs a shortlist that is long enough
        slack = self.method.shortener.slack if self.method.replans else 0
        sizes = [
            min(end - cand.sinks, max(k + slack, math.ceil(self.method.shortlist * k)))
            for end, k in zip(cand.ends, cand.k, strict=True)
        ]
        if all(size == end - cand.sinks for size, end in zip(sizes, cand.ends, strict=True)):
            return self.second.select(q, cand, h_kv, ctx)
        return self.rank(q, self.shorten(q, cand, sizes, h_kv, ctx), cand, h_kv, ctx)

    def shorten(
        self, q: torch.Tensor, cand: Candidates, sizes: list[int], h_kv: int, ctx: LayerContext
    ) -> torch.Tensor:
        """The shortlist (n, H, m), ascending, -1 = padding: sizes[r] tokens by the first index, and those not indexed yet."""
        indexed = []  # the first index covers the positions before this one; if it lags behind, its window is longer
        for plan, end, length in zip(self.layer.plans, cand.ends, cand.lengths, strict=True):
            assert isinstance(plan, TwoStagePlan)
            indexed.append(min(end, max(cand.sinks, length - 1 - self.first.local(plan.first, length - 1))))
        counts = [min(size, end - cand.sinks) for size, end in zip(sizes, indexed, strict=True)]
        rest = spread(cand.ends, indexed, q.device)
        if max(counts) == 0:
            return rest
        chosen = self.first.select(q, Candidates(cand.sinks, indexed, counts, cand.lengths), h_kv, ctx).indices
        return ascending(torch.cat([chosen, rest.expand(-1, chosen.shape[1], -1)], dim=2), max(cand.lengths))

    def rank(
        self, q: torch.Tensor, shortlist: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext
    ) -> Selection:
        """The second index's best cand.k[r] of a shortlist (n, H, m); -1 where a shortlist is shorter than that."""
        best = self.second.best_at(q, shortlist, cand, h_kv, ctx)
        if best is not None:
            return Selection(best, padded=True)
        # a softmax over all past tokens includes what is attended anyway
        logits, forced = self.logits(q, shortlist, cand, ctx, always=self.scope == "all")
        weights = group_reduce(
            logits, h_kv, self.reduce, None, (forced, logits.shape[2]), ctx.scaling if self.scope == "all" else 1.0
        )
        shortlist = shortlist.repeat_interleave(weights.shape[1] // shortlist.shape[1], dim=1)
        slots = top_tokens(weights.masked_fill(shortlist < 0, -torch.inf), [min(k, shortlist.shape[2]) for k in cand.k])
        indices = torch.where(slots < 0, slots, shortlist.gather(2, slots.clamp_min(0)))
        return Selection(indices, padded=True)

    def logits(
        self, q: torch.Tensor, shortlist: torch.Tensor, cand: Candidates, ctx: LayerContext, *, always: bool
    ) -> tuple[torch.Tensor, int]:
        """The second index's scores (n, h, f + m) of f tokens and a shortlist (n, H, m), -inf where it is -1; and f.

        always: the f tokens are sinks, local window and current token. Else there are none.
        """
        scored = shortlist
        if always:
            sinks = spread([min(cand.sinks, n) for n in cand.lengths], [0] * len(cand.lengths), q.device)
            forced = torch.cat([sinks, spread(cand.lengths, cand.ends, q.device)], dim=2)
            scored = torch.cat([forced.expand(-1, shortlist.shape[1], -1), shortlist], dim=2)
        logits = capped(self.second.score_at(q, scored, ctx), ctx.scaling)
        outside = (scored < 0).repeat_interleave(q.shape[1] // scored.shape[1], dim=1)
        return logits.masked_fill(outside, -torch.inf), scored.shape[2] - shortlist.shape[2]


def shortens(cls: type[Any]) -> bool:
    """Whether a method can be the first stage."""
    return issubclass(cls, RetrievalMethod) and cls.composable and cls.shortens


def ranks(cls: type[Any]) -> bool:
    """Whether a method can be the second stage."""
    return issubclass(cls, RetrievalMethod) and cls.composable and cls.ranks_shortlists


@dataclass(kw_only=True)
class TwoStage(ComposedMethod, RetrievalMethod):
    """Two indexes over one store: the first one's best tokens are ranked by the second.

    Sinks, window, k, store and reduce are this method's own and hold for both stages. The query heads of a group share a
    shortlist unless reduce=none lets every query head choose. Tokens that the first stage has not indexed yet (ClusterKV's
    generated tokens) are always on the shortlist.
    """

    name: ClassVar[str] = "two_stage"
    released: ClassVar[str] = "that of each stage"
    shortens: ClassVar[bool] = False
    index_class: ClassVar[type[TwoStageIndex]] = TwoStageIndex

    # retrieval method whose index makes the shortlist
    first: str = "quest"
    # retrieval method whose index ranks the shortlist
    second: str = "pqcache"
    # hyper-parameters of the first method
    first_options: dict = field(default_factory=dict)
    # hyper-parameters of the second method
    second_options: dict = field(default_factory=dict)
    # length of the shortlist in multiples of the tokens to select, at least 1
    shortlist: Annotated[float, 1, MOST] = 4.0

    def setup(self) -> None:
        self.shortener = self._make_stage("first", self.part_class("first", shortens))
        self.ranker = self._make_stage("second", self.part_class("second", ranks))

    def _make_stage(self, stage: str, cls: type[RetrievalMethod]) -> RetrievalMethod:
        """The method whose index serves one stage. It gets this method's partition as far as it has one."""
        key = f"{stage}_options"
        shared = [name for name in getattr(self, key) if name in SHARED or name.startswith("cache_")]
        self.require(key, not shared, f"what is the part's own; method.{', method.'.join(shared)} hold for both stages")
        common: dict[str, Any] = {name: getattr(self, name) for name in SHARED if name != "recent_ratio"} | self.spent()
        if stage == "second":
            common["recent_ratio"] = self.recent_ratio
        else:
            common["n_sink"] = self.n_sink if cls.n_sink is None else min(cls.n_sink, self.n_sink)
            if self.reduce != "none":
                common["reduce"] = cls.shared_reduce
        known = {f.name for f in fields(cls)}
        part = self.make_part(key, cls, {name: value for name, value in common.items() if name in known})
        self.require(key, not part.estimates_rest, "reallocate=false: it needs the weights of all tokens")
        return part

    def parts(self) -> tuple[Method, ...]:
        return self.shortener, self.ranker

    def plan(self, s: int, layer_idx: int, n_layers: int) -> TwoStagePlan:
        own, first = (part.plan(s, layer_idx, n_layers) for part in (self.ranker, self.shortener))
        return TwoStagePlan(own.sinks, own.local, own.k, replace(first, local=0, k=own.local + own.k))

    def replan(self, first: Plan, c: int, layer_idx: int, n_layers: int) -> TwoStagePlan:
        assert isinstance(first, TwoStagePlan)
        own = self.ranker.replan(first, c, layer_idx, n_layers)
        short = self.shortener.replan(first.first, c, layer_idx, n_layers)
        return TwoStagePlan(own.sinks, own.local, own.k, replace(short, local=0, k=own.local + own.k))

    def make_index(self, layer_idx: int, shape: ModelShape) -> TwoStageIndex:
        first, second = (part.make_index(layer_idx, shape) for part in (self.shortener, self.ranker))
        return self.index_class(self, first, second)
