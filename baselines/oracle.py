"""Oracle: exact top-k attention, the upper bound of retrieval at a budget (PQCache, arXiv 2407.12820, section 4.1.3).

A reference, not a system: with store=host or block_cache every key crosses at each step to be scored.

Deviations:
- The current token is attended on top of the local window, as for every other method here. The published code counts it inside
  and so attends to one token fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pqcache.selective.index import SCOPES, Index
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape


class ExactIndex(Index):
    """Scores by the keys themselves, which it reads from the store."""

    def __init__(self, method: Oracle) -> None:
        self.reduce, self.scope = method.reduce, method.scope

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        assert self.layer.store is not None
        return self._products(q, self.layer.store.keys(lo, hi), ctx)

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        assert self.layer.store is not None
        return self._products(q, self.layer.store.keys_at(indices, self.layer.shape.group), ctx)

    @staticmethod
    def _products(q: torch.Tensor, keys: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """q (n, h, 1, d), keys (n, h_kv or h, m, d) -> (n, h, m) fp32."""
        n, h, _, d = q.shape
        grouped = q.view(n, keys.shape[1], -1, d).float()
        return (grouped @ keys.float().transpose(-1, -2)).view(n, h, -1) * ctx.scaling


@dataclass(kw_only=True)
class Oracle(RetrievalMethod):
    """Candidates with the largest exact attention weight, summed over a group's query heads, per KV head."""

    name: ClassVar[str] = "oracle"
    ranks_shortlists: ClassVar[bool] = True

    # tokens that the softmax before ranking covers: all past ones (the published code), or the candidates only
    scope: str = "all"

    def validate(self) -> None:
        super().validate()
        self.require_one_of("scope", SCOPES)

    def make_index(self, layer_idx: int, shape: ModelShape) -> ExactIndex:
        return ExactIndex(self)
