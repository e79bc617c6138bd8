"""Family: drop tokens for good.

A method writes a `Scorer` (scorer.py) with `head_scores`, importance per query head, and an EvictionMethod with `plan` and
`make_scorer`. Where position alone decides it overrides `choose_entries` instead. The layer (eviction_layer.py) frees the memory
of what is dropped, and stores the positions of what stays.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from pqcache.selective.budget import Allowance, Plan
from pqcache.selective.eviction_layer import EvictionLayer
from pqcache.selective.group import top_tokens
from pqcache.selective.method import Method
from pqcache.selective.scorer import Prompt, Scorer
from pqcache.selective.shape import ModelShape
from pqcache.store.drop import Lightest


@dataclass(kw_only=True)
class EvictionMethod(Method):
    """Base of eviction methods. A subclass writes make_scorer (or choose_entries) and its plan."""

    kind: ClassVar[str] = "evict"
    # what compositions read (baselines/kvcrush.py, baselines/combined):
    composable: ClassVar[bool] = True  # its choice works in another method's layer
    ranks_by_scores: ClassVar[bool] = True  # `ranking` of its head scores alone decides which candidates stay
    static_options: ClassVar[dict[str, Any]] = {}  # hyper-parameters under which it prunes once, after the prompt

    @property
    def fixed_local(self) -> bool:
        """Whether its local window is a number of tokens; else it is a share of the budget."""
        return True

    @property
    def repeats_kv(self) -> bool:
        """Whether K and V are stored once per query head, so that every query head keeps tokens of its own."""
        return False

    @property
    def prunes_turns(self) -> bool:
        """Whether the end of a later turn prunes again; else its tokens are added to what is held."""
        return True

    def window(self, total: int) -> int:
        """Tokens of the local window where `total` tokens beside the sinks are kept. Asked where `fixed_local` is false."""
        raise NotImplementedError

    @property
    def is_dynamic(self) -> bool:
        """Whether decode steps evict, too."""
        return False

    @property
    def needs_probs(self) -> bool:
        """Whether the scorer uses each decode step's attention probabilities."""
        return False

    @property
    def ranks_by_steps(self) -> bool:
        """Whether ranking again in the middle of an answer takes the attention probabilities of its steps."""
        return False

    @property
    def refreshes(self) -> bool:
        """Whether it ranks what it holds again during the answer, whenever that is more than the budget."""
        return self.replans and self.aligned_rule in ("refreshed", "pooled")

    def allowed(self, c: int) -> int:
        """Tokens that a layer may hold after `c` tokens, where `refreshes`; the mean of layers that differ."""
        return self.budget.tokens if self.budget.tokens is not None else self.plan(c, 0, 1).total

    def kept(self, filled: int, plan: Plan) -> int:
        """How many of `filled` entries `choose_entries` keeps."""
        return min(filled, plan.total)

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        """What accumulates importance in one layer."""
        return Scorer()

    def make_layer(self, layer_idx: int, shape: ModelShape) -> EvictionLayer:
        return EvictionLayer(layer_idx, shape, self)

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        """Tokens kept of a prompt (or prompt + turns) of `s` tokens."""
        raise NotImplementedError

    def at(self, tokens: int) -> Self:
        """This method with a budget of `tokens`, however few: for plans alone."""
        other = copy.copy(self)
        other.budget = Allowance(tokens=tokens)
        return other

    def level(self, tokens: int, s: int, layer_idx: int, n_layers: int) -> Plan:
        """A plan of `tokens` tokens in this very layer, whatever the others keep."""
        return self.at(tokens).plan(s, layer_idx, n_layers)

    def published_ratio(self, tokens: int, shape: ModelShape) -> float | None:
        """Prompt tokens over tokens kept (mean of the layers that drop some), as papers count eviction."""
        layers = range(self.dense_layers or 0, shape.n_layers)
        kept = [self.plan(tokens, i, shape.n_layers).total for i in layers]
        return tokens * len(kept) / sum(kept) if kept and sum(kept) else None

    def capacity(self, plan: Plan) -> int:
        """Tokens a dynamic method holds between steps: a token budget in full, or its share of the prompt."""
        return self.budget.tokens if self.budget.tokens is not None else plan.total

    def victim(self, layer: EvictionLayer) -> Lightest | torch.Tensor:
        """The entry to drop in each row and head of a full layer, or its slot (n, h_kv)."""
        raise NotImplementedError

    def smooth(self, scores: torch.Tensor, hi: int) -> torch.Tensor:
        """One row's scores (heads, entries), smoothed for ranking. The local window begins at entry `hi`. Default: no change."""
        return scores

    def ranking(self, scores: torch.Tensor, h_kv: int, hi: int) -> torch.Tensor:
        """One row's scores per query head (h, entries) -> (h_kv, entries): the mean of each group, then `smooth`."""
        return self.smooth(scores.unflatten(0, (h_kv, -1)).mean(1), hi)

    def choose_entries(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        """Which entries stay: slots (n, h_kv, m) ascending, and how many of them per row (the rest of a row is padding).

        Default: sinks and local window by position, then the `k` best of `ranking`; ties go to the earlier token. A row that
        fits its plan keeps everything.
        """
        scores, positions, lengths, plans = prompt.scores, prompt.positions, prompt.lengths, prompt.plans
        h_kv = positions.shape[1]
        rows = []
        for row, (filled, plan) in enumerate(zip(lengths, plans, strict=True)):
            slot = torch.arange(filled, device=positions.device).expand(h_kv, -1)
            if filled <= plan.total:
                rows.append(slot)
                continue
            hi = filled - plan.local  # candidates are the entries between sinks and window
            kept = [slot[:, : plan.sinks], slot[:, hi:]]
            if plan.k > 0 and scores is not None:
                weight = self.ranking(scores[row, :, :filled], h_kv, hi)[:, plan.sinks : hi]
                kept.insert(1, top_tokens(weight[None], [plan.k])[0] + plan.sinks)
            rows.append(torch.cat(kept, dim=-1))
        return join_rows(rows)


def join_rows(rows: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """What `choose_entries` returns, from each row's slots (h_kv, m), ascending."""
    counts = [r.shape[-1] for r in rows]
    if len(rows) == 1:
        return rows[0][None], counts
    slots = rows[0].new_zeros((len(rows), rows[0].shape[0], max(counts)))
    for row, r in enumerate(rows):
        slots[row, :, : r.shape[-1]] = r
    return slots, counts
