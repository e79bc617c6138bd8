"""Oracle: exact top-k attention, the upper bound of retrieval at a budget (PQCache, arXiv 2407.12820, section 4.1.3).

A reference, not a system: with store=host or block_cache every key crosses at each step to be scored.

The released code counts the current token inside the local window and so attends to one token fewer: protocol=release. Elsewhere
it comes on top, as for every other method here.

Deviations:
- A budget of 1.0 attends everything under protocol=release, too. The released code leaves one token out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pqcache.selective.budget import Plan, floor_share, partition_plan
from pqcache.selective.group import products
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape


class ExactIndex(Index):
    """Scores by the keys themselves, which it reads from the store."""

    def __init__(self, method: Oracle) -> None:
        self.reduce, self.scope = method.reduce, method.scope

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        return products(q.float(), self.layer.store.keys(lo, hi)) * ctx.scaling

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        return self.choose_by_products(q.float(), self.layer.store.keys(*self.span(cand)), cand, h_kv, ctx.scaling)

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        return products(q.float(), self.layer.store.keys_at(indices, self.layer.shape.group)) * ctx.scaling


@dataclass(kw_only=True)
class Oracle(RetrievalMethod):
    """Candidates with the largest exact attention weight, summed over a group's query heads, per KV head."""

    name: ClassVar[str] = "oracle"
    released: ClassVar[str] = "HugoZHL/PQCache: vq_method/baseline_compressor.py"
    ranks_shortlists: ClassVar[bool] = True

    # tokens that the softmax before ranking covers: all past ones (the published code), or the candidates only
    scope: Literal["all", "candidates"] = "all"

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        aligned = partition_plan(self.budget_at(s), s, self.n_sink, self.recent_ratio)
        if self.protocol != "release" or self.budget.is_everything:
            return aligned
        total = aligned.local + aligned.k
        k = floor_share(total, 1 - self.recent_ratio)
        return Plan(aligned.sinks, max(1, total - k - 1), k)  # the window's last token is the current one

    def make_index(self, layer_idx: int, shape: ModelShape) -> ExactIndex:
        return ExactIndex(self)
