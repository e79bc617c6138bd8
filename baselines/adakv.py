"""Ada-KV: a layer's budget is shared out among its KV heads by their scores (Feng et al., arXiv 2407.11550, section 3).

The k best candidates of all KV heads of a layer together say how many tokens each head deserves (algorithm 1). A safeguard
gives every head the share `floor` of an even division beside 1 - floor of what it deserves (algorithm 2). Each head then keeps
its best. Sinks and local window stay in every head. Scores, window and the layers' budgets are those of `base`.

    python run.py method=adakv method.base=pyramidkv

protocol=release is the authors' code with gqa_support and gqa_func=mean: heads' shares are rounded one by one, so that their sum
may miss the budget by some tokens; floor is 0.5; a new turn is added to what is held.

Deviations:
- One choice per KV head. The paper's own runs repeat K and V, as the authors' code does without gqa_support.
- Shares are rounded by largest remainder: what the heads hold is the budget exactly, except under protocol=release.
- Where an aligned token budget lets its base rank again during the answer, Ada-KV prunes once, as published.
- A new turn prunes again, over heads of different lengths, except under protocol=release.
- Heads of their own length do not carry a model's attention sinks (GPT-OSS).
- Max pooling makes many equal scores; ties go to the earlier token. On SmolLM2 every head keeps as many tokens as under the
  authors' code, of the same scores; which of equals stay differs.
- The press of kvpress has the safeguard as a minimum: each head keeps its best `floor` of an even share, and the rest goes to
  the best of all heads. The paper's algorithm 2 gives a head with little a larger share, and one with much a smaller one.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch

from pqcache.fields import Share
from pqcache.selective.budget import Plan
from pqcache.selective.evictor import share_out
from pqcache.selective.group import top_tokens
from pqcache.selective.method import Method
from pqcache.selective.parts import ComposedMethod
from pqcache.selective.ragged import RaggedMethod
from pqcache.selective.scorer import Scorer
from pqcache.selective.shape import ModelShape

from .kvcrush import ranks_by_scores


def prunes_once(cls: type[Any]) -> bool:
    """Whether a method can be the base: its scores decide, and it keeps none of them after the prompt."""
    return ranks_by_scores(cls) and not cls.static_options


def rounded(shares: list[float]) -> list[int]:
    """Whole numbers of the same sum, by largest remainder; among equals the first."""
    whole = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])
    for i in order[: round(sum(shares)) - sum(whole)]:
        whole[i] += 1
    return whole


@dataclass(kw_only=True)
class AdaKV(ComposedMethod, RaggedMethod):
    """What `base` keeps in a layer, shared out among the KV heads by its scores."""

    name: ClassVar[str] = "adakv"
    released: ClassVar[str] = "FFY0/AdaKV: snapkv_utils.py"

    # eviction method that scores the tokens and divides the budget over the layers
    base: str = "snapkv"
    # hyper-parameters of the base
    base_options: dict = field(default_factory=dict)
    # the safeguard: share of the budget that is divided evenly among the KV heads; null: 0.2, in the protocol release 0.5
    floor: Share | None = None

    def fill(self) -> None:
        self.by_protocol(floor=(0.2, 0.2, 0.5))

    def setup(self) -> None:
        cls = self.part_class("base", prunes_once)
        once = {"budget_rule": "prompt", "budget_of": "prompt", "dense_layers": self.dense_layers}
        if "repeat_kv" in {f.name for f in fields(cls)}:
            once["repeat_kv"] = False
        self.evictor = self.make_part("base_options", cls, {**self.spent(), **once})

    @property
    def prunes_turns(self) -> bool:
        return self.protocol != "release"

    def parts(self) -> tuple[Method, ...]:
        return (self.evictor,)

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        return self.evictor.plan(s, layer_idx, n_layers)

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        return self.evictor.make_scorer(layer_idx, shape)

    def choose_heads(
        self, scores: list[torch.Tensor | None], lengths: list[int], plan: Plan, layer_idx: int
    ) -> list[torch.Tensor]:
        heads = len(lengths)
        if sum(lengths) <= heads * plan.total:
            return [torch.arange(length) for length in lengths]
        starts = [min(plan.sinks, length) for length in lengths]
        ends = [max(start, length - plan.local) for start, length in zip(starts, lengths, strict=True)]
        weights = []  # of the candidates of each head
        for one, start, end in zip(scores, starts, ends, strict=True):
            assert one is not None
            weights.append(self.evictor.ranking(one, 1, end)[0, start:end])
        forced = sum(lengths) - sum(len(weight) for weight in weights)
        counts = self.shares(weights, max(0, heads * plan.total - forced))
        kept = []
        for weight, count, start, end, length in zip(weights, counts, starts, ends, lengths, strict=True):
            best = top_tokens(weight[None, None], [count])[0, 0] + start
            kept.append(torch.cat([torch.arange(start), best.cpu(), torch.arange(end, length)]))
        return kept

    def shares(self, weights: list[torch.Tensor], k: int) -> list[int]:
        """How many candidates each head keeps, k in all, by their weights (m_j,)."""
        heads, held = len(weights), [len(weight) for weight in weights]
        k, floor = min(k, sum(held)), self.floor or 0
        best = top_tokens(torch.cat(weights)[None, None], [k])[0, 0].cpu()
        head = torch.arange(heads).repeat_interleave(torch.tensor(held))[best]
        deserved = torch.bincount(head, minlength=heads).tolist()
        if self.protocol == "release":
            even = int(k // heads * floor)
            return [min(most, round(count * (1 - floor) + even)) for count, most in zip(deserved, held, strict=True)]
        return share_out(rounded([count * (1 - floor) + floor * k / heads for count in deserved]), held)
