"""Twilight: of the tokens that any ranking selects, attend the fewest whose weights sum to p (Lin et al., arXiv 2502.02770).

    python run.py method=twilight method.first=quest method.p=0.85 budget=0.25

`first` selects as many tokens as the budget allows. `second` estimates their softmax weights, among them those of the tokens
that are attended anyway. The heaviest tokens stay, until their sum reaches p: a number of tokens per head and step (section
4.1). The budget is the upper bound, which the paper calls the conservative budget.

protocol=release is the authors' Python reference: no sinks, no window, every query head for itself.

Deviations:
- The query heads of a group share a choice, by their mean weight, unless reduce=none.
- The current token and the one before it are attended whatever their weights; in the release they compete.
- A budget of every token attends every token, whatever p is.
- Weights are sorted. The release searches a threshold by bisection; both keep the same tokens unless weights tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pqcache.fields import Part
from pqcache.selective.index import Candidates, Selection
from pqcache.selective.layer import LayerContext
from pqcache.store.transfer import table

from .two_stage import TwoStage, TwoStageIndex, ascending


def nucleus(weights: torch.Tensor, p: float) -> torch.Tensor:
    """Which of weights (..., m), of sum 1, are among the fewest whose sum is at least p: bool. Ties go to the earlier one."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, before < p)


class TwilightIndex(TwoStageIndex):
    """The first index selects, the second weighs; those outside the nucleus are left out again."""

    method: Twilight

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        return self.rank(q, self.shorten(q, cand, cand.k, h_kv, ctx), cand, h_kv, ctx)

    def rank(
        self, q: torch.Tensor, shortlist: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext
    ) -> Selection:
        logits, forced = self.logits(q, shortlist, cand, ctx, always=True)
        weights = logits.float().softmax(-1)
        if self.method.reduce != "none":
            weights = weights.unflatten(1, (h_kv, -1)).mean(2)
        # a row whose budget is enough for all attends to all, as it would alone
        whole = [k == end - cand.sinks for k, end in zip(cand.k, cand.ends, strict=True)]
        kept = nucleus(weights, self.method.p)[..., forced:] | table(whole, q.device)[:, None, None]
        shortlist = shortlist.repeat_interleave(kept.shape[1] // shortlist.shape[1], dim=1)
        chosen = ascending(torch.where(kept, shortlist, -1), max(cand.lengths))
        if chosen.device.type == "cpu":  # elsewhere the longest head's number is known to the device alone
            chosen = chosen[..., : max(1, int((chosen >= 0).sum(-1).max()))]
        return Selection(chosen, padded=True)


@dataclass(kw_only=True)
class Twilight(TwoStage):
    """A ranking, and weights that decide at every step how many of its tokens each head attends."""

    name: ClassVar[str] = "twilight"
    released: ClassVar[str] = "tsinghua-ideal/Twilight: twilight/pyimpl"
    own_rule: ClassVar[str] = "prompt"  # the budget is an upper bound
    paper_dense_layers: ClassVar[int] = 2
    index_class: ClassVar[type[TwoStageIndex]] = TwilightIndex
    shortlist: ClassVar[float] = 1.0  # type: ignore[misc]

    # retrieval method whose index estimates the weights
    second: str = "coded_keys"
    # sum of the weights that are attended, at least, in (0, 1]
    p: Part = 0.85
    # first tokens, always attended; null: 32 on top of a budget ratio, in the protocols paper and release 0
    n_sink: int | None = None  # type: ignore[assignment]
    # share of the budget that is the local window; null: 0.5, in the protocols paper and release 0 (one token)
    recent_ratio: float | None = None  # type: ignore[assignment]
    # as of every retrieval method: none (every query head for itself), or shared by a group; null: sum_softmax, in the
    # protocols paper and release none
    reduce: str | None = None  # type: ignore[assignment]

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 0), recent_ratio=(0.5, 0.0), reduce=("sum_softmax", "none"))
