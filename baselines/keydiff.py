"""KeyDiff: keep the keys that differ most from the mean direction of all keys (Park et al., arXiv 2504.15364, section 4).

A key's score is minus its cosine similarity to the mean of all normalised keys held. No query is looked at.

An aligned token budget B holds at every step: everything is kept until B tokens are held. Then the keys held are scored again,
and max(B - 64, B / 2) tokens stay.

protocol=release is KeyDiffPress of NVIDIA/kvpress.

Deviations:
- A prompt is attended whole and pruned once, as in kvpress. The paper prunes after every block of it (128 tokens), which bounds
  the memory of the prompt, too.
- Under a budget ratio generated tokens stay, as in kvpress.
- Similarities are in fp32.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from pqcache.fields import Whole
from pqcache.selective.budget import Plan, window_plan
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.layer import LayerContext
from pqcache.selective.scorer import Scorer
from pqcache.selective.shape import ModelShape


class AnchorScorer(Scorer):
    """Minus the cosine of each key and the mean direction of its row and head."""

    def __init__(self, group: int) -> None:
        self.group = group

    def head_scores(self, k: torch.Tensor, lengths: list[int], ctx: LayerContext | None) -> torch.Tensor:
        scores = k.new_zeros((*k.shape[:2], max(lengths)), dtype=accumulator_dtype(k))
        for row, length in enumerate(lengths):
            directions = F.normalize(k[row, :, :length].to(scores.dtype), dim=-1)
            anchor = F.normalize(directions.mean(1, keepdim=True), dim=-1)
            scores[row, :, :length] = -(directions @ anchor.mT)[..., 0]
        return scores.repeat_interleave(self.group, 1)

    def scores_now(
        self, k: torch.Tensor, positions: torch.Tensor, lengths: list[int], seen: list[int], scaling: float
    ) -> torch.Tensor:
        return self.head_scores(k, lengths, None)


@dataclass(kw_only=True)
class KeyDiff(EvictionMethod):
    """Sinks and the most distinctive keys."""

    name: ClassVar[str] = "keydiff"
    released: ClassVar[str] = "NVIDIA/kvpress: presses/keydiff_press.py"
    own_rule: ClassVar[str] = "refreshed"

    # newest tokens, always kept (the paper's sliding window variant)
    recent: Whole = 0
    # first tokens, always kept; null: 32 on top of a budget ratio, in the protocols paper and release 0
    n_sink: Whole | None = None

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 0))

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        return window_plan(self.budget_at(s), s, self.n_sink or 0, self.recent)

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        return Scorer() if self.budget.is_everything else AnchorScorer(shape.group)
