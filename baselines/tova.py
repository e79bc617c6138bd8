"""TOVA: drop the token that the newest query attends to least (Oren et al., arXiv 2401.06104, section 3.2).

At every step the current query's attention, averaged over all heads of a layer, ranks the tokens held; all KV heads keep the
same ones. Earlier queries do not count.

protocol=release is the authors' code; mode=static n_sink=0 keeps what TOVAPress of NVIDIA/kvpress keeps.

Deviations:
- The newest token stays (recent), as in kvpress. In the paper and the release, recent=0, it may be dropped, too.
- A prompt is attended whole, then its last query ranks it, as in the release.
- Attention is averaged in fp32. The release averages in 16 bits.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from pqcache.fields import Whole
from pqcache.selective.budget import Plan, window_plan
from pqcache.selective.eviction import EvictionLayer, EvictionMethod
from pqcache.selective.layer import LayerContext
from pqcache.selective.scorer import Scorer
from pqcache.selective.shape import ModelShape
from pqcache.store.drop import Lightest

from .snapkv import WindowScorer

ROOM = 64  # tokens by which a step's weights may grow before they are allocated anew


class NewestQueryScorer(WindowScorer):
    """Attention of the newest query, averaged over all query heads."""

    counted = ("step",)

    def __init__(self, h_kv: int) -> None:
        super().__init__(1)
        self.h_kv = h_kv
        self.step: torch.Tensor = None  # type: ignore[assignment]  # (n, h_kv, >= entries held): the current step's, mean of each group

    def head_scores(self, k: torch.Tensor, lengths: list[int], ctx: LayerContext) -> torch.Tensor:
        scores = super().head_scores(k, lengths, ctx)
        self.step = scores.new_zeros((len(lengths), self.h_kv, 1))
        return scores.mean(1, keepdim=True).expand_as(scores)

    def received(self, lengths: list[int]) -> torch.Tensor:
        """Zeros: each step stands for itself."""
        n, width = len(lengths), self.step.shape[2]
        width = width if width >= max(lengths) else max(lengths) + ROOM
        self.step = self.step.new_zeros((n, self.h_kv, width))
        return self.step


@dataclass(kw_only=True)
class TOVA(EvictionMethod):
    """The tokens that the newest query attends to, and the newest one."""

    name: ClassVar[str] = "tova"
    released: ClassVar[str] = "schwartz-lab-NLP/TOVA: src/tova_cache.py"
    own_rule: ClassVar[str] = "exact"
    static_options: ClassVar[dict[str, Any]] = {"mode": "static"}

    # dynamic: each generated token evicts the one that its query attends to least; static: prune once, after the prompt
    mode: Literal["dynamic", "static"] = "dynamic"
    # newest tokens, always kept; null: 1, in the protocols paper and release 0
    recent: Whole | None = None
    # first tokens, always kept; null: 32 on top of a budget ratio, in the protocols paper and release 0
    n_sink: Whole | None = None

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 0), recent=(1, 0))

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        return window_plan(self.budget_at(s), s, self.n_sink or 0, self.recent or 0)

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        return Scorer() if self.budget.is_everything else NewestQueryScorer(shape.h_kv)

    @property
    def ranks_by_steps(self) -> bool:
        return True

    def capacity(self, plan: Plan) -> int:
        return max(super().capacity(plan), plan.sinks + 1)

    def victim(self, layer: EvictionLayer) -> Lightest:
        """The entry with the smallest mean weight in this step, outside sinks and newest tokens; the same for all heads."""
        scorer = layer.scorer
        assert isinstance(scorer, NewestQueryScorer)
        weights = scorer.step.mean(1, keepdim=True).expand_as(scorer.step).contiguous()
        ends = [seen - (self.recent or 0) for seen in layer.seen]
        return Lightest(layer.positions.data, weights, [plan.sinks for plan in layer.plans], ends)
