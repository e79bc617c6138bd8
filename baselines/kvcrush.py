"""KVCrush: spend part of an evictor's budget on tokens that represent the evicted ones (arXiv 2503.00022, section III).

A token's signature has one bit per query head: whether it is among the better half of that head's candidates. Candidates
that are not kept are sorted by the Hamming distance of their signature to one anchor and cut into as many buckets of
equal size as there are representatives to keep; one token of each bucket stays.

protocol=paper takes bits and representatives as the paper's text has them. There is no research code; protocol=release follows
the change that was proposed to vLLM (pull request 47967): pages of 16 tokens, the first 32 and the newest 128 beside them,
attention of the last 16 queries, one bit per KV head at the median, evenly spaced representatives, new turns added.

Deviations:
- Buckets hold equally many tokens, where the paper speaks of the nearest bucket: one anchor gives only H + 1 distances.
- Under an aligned token budget it ranks again during the answer, as SnapKV does here. The paper prunes once.
- pick=random is the paper's, pick=even that of the released ports.
- With page=1 the anchor "mean" equals "zeros" while no head has more than half its bits set.
- Pages begin after the sinks. A last page that is not full shortens the window. Where the window is no longer than what would go,
  it is kept whole beside the odd tokens, and the candidates' share pays for them.
- In a new turn, and where it ranks again during an answer, H2O's sums of earlier tokens are the mean over the group.
- The vLLM change bars the pages that KV head 0 finds important for all heads; another head may then keep a page twice. Here every
  head's own important pages are barred, under protocol=release too.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch

from pqcache.fields import Positive, Share, Whole, added
from pqcache.selective.budget import Plan, floor_share
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.evictor import join_rows
from pqcache.selective.method import Method
from pqcache.selective.parts import ComposedMethod
from pqcache.selective.scorer import Prompt, Scorer
from pqcache.selective.shape import ModelShape

RELEASE = {"n_sink": 32, "recent": 128, "w": 16}  # of the base, in the change proposed to vLLM


def top_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """True at the k largest of each row of scores (heads, m), the earlier first among equals."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def kmeans_representatives(keys: torch.Tensor, reps: int, rounds: int = 10) -> torch.Tensor:
    """The members nearest to the centroids of keys (n, d): (min(n, reps),) long, all different.

    Lloyd's rounds from evenly spaced keys; an empty cluster takes the key farthest from its centroid. Where equal keys leave
    clusters empty for good, the earliest keys not chosen yet fill up.
    """
    n = keys.shape[0]
    if n <= reps:
        return torch.arange(n, device=keys.device)
    centroids = keys[torch.arange(reps, device=keys.device) * (n - 1) // max(1, reps - 1)]
    for _ in range(rounds):
        nearest, label = _distances(keys, centroids).min(-1)
        empty = (label.bincount(minlength=reps) == 0).nonzero().flatten()
        label[nearest.sort(descending=True, stable=True).indices[: len(empty)]] = empty
        members = torch.nn.functional.one_hot(label, reps).to(keys.dtype)
        count = members.sum(0)[:, None]
        moved = torch.where(count > 0, members.T @ keys / count.clamp_min(1), centroids)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    nearest, label = _distances(keys, centroids).min(-1)
    order = nearest.sort(stable=True).indices
    order = order[label[order].sort(stable=True).indices]  # cluster after cluster, nearest member first
    starts = torch.ones(n, dtype=torch.bool, device=keys.device)
    starts[1:] = label[order][1:] != label[order][:-1]
    left_over = torch.ones_like(starts).index_fill_(0, order[starts], False).nonzero().flatten()
    return torch.cat([order[starts], left_over])[:reps]


def _distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Squared, x (n, d) to y (m, d): (n, m). By one matrix product: cdist's exact mode is tens of times slower."""
    return ((x * x).sum(-1)[:, None] - 2 * x @ y.T + (y * y).sum(-1)).clamp_min(0)


def ranks_by_scores(cls: type[Any]) -> bool:
    """Whether a method can be the base."""
    return issubclass(cls, EvictionMethod) and cls.ranks_by_scores


@dataclass(kw_only=True)
class KVCrush(ComposedMethod, EvictionMethod):
    """Keeps what `base` keeps with a smaller budget, and representatives of the rest; prunes once, after the prompt.

    The base's window is part of its share. A window that is a share of the budget (H2O) is one of that smaller budget.
    """

    name: ClassVar[str] = "kvcrush"
    # 1: a page that is not full shortens the window; rep_ratio is of the whole budget; inv_mean is strict
    revision: ClassVar[int] = 1
    released: ClassVar[str] = "vLLM pull request 47967: kvcrush.py"
    own_rule: ClassVar[str] = "refreshed"
    ranks_by_scores: ClassVar[bool] = False

    # eviction method that ranks the tokens
    base: str = "snapkv"
    # hyper-parameters of the base; it prunes once here
    base_options: dict = field(default_factory=dict)
    # share of the budget for representatives
    rep_ratio: Share = 0.25
    # number of representatives; null: by rep_ratio
    reps: Whole | None = None
    # signature to which distances are measured: random, mean, alternate, zeros, ones, inv_mean
    anchor: Literal["random", "mean", "alternate", "zeros", "ones", "inv_mean"] = "alternate"
    # share of candidates whose bit is 0; "budget": all that the base would not keep (section III-A); null: 0.5, in the protocol
    # paper budget
    bit_quantile: Share | Literal["budget"] | None = None
    # tokens that are kept or dropped together; scores are summed, signatures joined, budgets counted in whole pages; null: 1, in
    # the protocol release 16
    page: Positive | None = None
    # representatives: even (evenly spaced candidates, first and last included) or random (one of each bucket); null: even, in the
    # protocol paper random
    pick: Literal["even", "random"] | None = None
    # hamming, or kmeans (section IV's comparator): the keys nearest to centroids; anchor, bits and pick then play no part
    grouping: Literal["hamming", "kmeans"] = "hamming"
    # seed of the random anchor and pick, the same for all rows of a batch
    seed: int = 0
    # whose bits make a signature: query (one per query head) or kv (one per KV head, of its group's mean); null: query, in the
    # protocol release kv
    signature: Literal["query", "kv"] | None = added(None, absent="query")
    # K and V once per query head, each of which keeps tokens of its own, as the code in which table III was run
    repeat_kv: bool = added(False, absent=False)

    def fill(self) -> None:
        self.by_protocol(bit_quantile=(0.5, "budget", 0.5), page=(1, 1, 16), pick=("even", "random", "even"))
        self.by_protocol(signature=("query", "query", "kv"))

    def setup(self) -> None:
        self.tokens = self.page or 1  # of a page
        self.require("grouping", self.grouping == "hamming" or self.page == 1, "hamming where page is more than 1")
        cls = self.part_class("base", ranks_by_scores)
        self.base_options = {**cls.static_options, **self.base_options}
        common = {**self.spent(), "dense_layers": self.dense_layers}
        known = {f.name for f in fields(cls)}
        if "repeat_kv" in known:
            common["repeat_kv"] = self.repeat_kv
        defaults = RELEASE if self.protocol == "release" else {}
        defaults = {name: value for name, value in defaults.items() if name in known}
        self.evictor = self.make_part("base_options", cls, common, **defaults)
        self.require("base_options", not self.evictor.is_dynamic, "an evictor that prunes once (mode: static)")

    @property
    def prunes_turns(self) -> bool:
        return self.protocol != "release"

    def parts(self) -> tuple[Method, ...]:
        return (self.evictor,)

    @property
    def aligned_rule(self) -> str:
        return "pooled" if self.evictor.own_rule == "pooled" else self.own_rule

    @property
    def ranks_by_steps(self) -> bool:
        return bool(self.evictor.ranks_by_steps)

    @property
    def needs_probs(self) -> bool:
        return self.refreshes and self.ranks_by_steps

    def allowed(self, c: int) -> int:
        return int(self.evictor.allowed(c))

    def kept(self, filled: int, plan: Plan) -> int:
        """With pages, whole ones of what lies between sinks and window."""
        if filled <= plan.total:
            return filled
        recent = self.recent(filled, plan)
        return plan.sinks + recent + max(0, plan.k - max(0, recent - plan.local)) // self.tokens * self.tokens

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        return self.with_window(self.evictor.plan(s, layer_idx, n_layers), s)

    def at(self, tokens: int) -> Self:
        other = super().at(tokens)
        other.evictor = self.evictor.at(tokens)
        return other

    def level(self, tokens: int, s: int, layer_idx: int, n_layers: int) -> Plan:
        return self.at(tokens).with_window(self.evictor.level(tokens, s, layer_idx, n_layers), s)

    def with_window(self, plan: Plan, s: int) -> Plan:
        """The base's plan for `s` tokens; a window that is a share is one of what representatives leave."""
        if self.evictor.fixed_local or plan.total >= s:
            return plan
        rest = plan.k + plan.local
        local = min(rest, self.evictor.window(max(0, rest - self.reps_wanted(plan))))
        return replace(plan, local=local, k=rest - local)

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        return self.evictor.make_scorer(layer_idx, shape)

    def representatives(self, plan: Plan) -> int:
        """Number of representatives among the plan's k tokens."""
        return min(plan.k, self.reps_wanted(plan))

    def reps_wanted(self, plan: Plan) -> int:
        """Number of representatives that a layer's plan asks for, if there is room. Sinks are part of a token budget alone."""
        whole = plan.total if self.budget.tokens is not None else plan.total - plan.sinks
        return self.reps if self.reps is not None else floor_share(whole, self.rep_ratio)

    def choose_entries(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        kept = [important | representatives for important, representatives in self.divide(prompt)]
        return join_rows([row.nonzero()[:, 1].view(row.shape[0], -1) for row in kept])

    def divide(self, prompt: Prompt) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per row: what stays by importance or position, and the representatives; both (h_kv, entries) bool.

        All heads of a row have equally many of either.
        """
        h_kv = prompt.k.shape[1]
        rows = []
        for row, (filled, plan) in enumerate(zip(prompt.lengths, prompt.plans, strict=True)):
            kept = torch.zeros((h_kv, filled), dtype=torch.bool, device=prompt.k.device)
            representatives = kept.clone()
            rows.append((kept, representatives))
            if filled <= plan.total:
                kept.fill_(True)
                continue
            recent = self.recent(filled, plan)
            sinks, end, room = plan.sinks, filled - recent, plan.k - max(0, recent - plan.local)
            kept[:, :sinks] = kept[:, end:] = True
            if prompt.scores is not None and room > 0:
                scores, smooth_to = prompt.scores[row, :, :filled], max(end, filled - plan.local)
                ranking = self.evictor.ranking(scores, h_kv, smooth_to)[:, sinks:end]
                heads = ranking
                if self.signature == "query":
                    heads = self.evictor.smooth(scores, smooth_to)[:, sinks:end]
                keys = prompt.k[row, :, sinks:end]
                kept[:, sinks:end], representatives[:, sinks:end] = self.choose_candidates(
                    ranking, heads, keys, plan, room, prompt.ctx.layer_idx
                )
        return rows

    def recent(self, filled: int, plan: Plan) -> int:
        """Newest entries that stay by position, so that those between the sinks and them are whole pages.

        The last page's tokens are few: the window is shortened to a page's end. It is lengthened by them instead if the plan has
        room for tokens but not for a page, or if the window would be used up.
        """
        odd = (filled - plan.local - plan.sinks) % self.tokens
        short = self.tokens - odd if odd else 0
        if odd <= plan.k % self.tokens or plan.local <= short:
            return plan.local + min(odd, plan.k)
        return plan.local - short

    def choose_candidates(
        self, ranking: torch.Tensor, heads: torch.Tensor, keys: torch.Tensor, plan: Plan, k: int, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which candidates stay, k of them or the whole pages that fit: the important ones, the others; (h_kv, m) bool.

        ranking (h_kv, m) and heads (h, m): one row's scores of the candidates, per KV head and per query head; keys (h_kv, m, d).
        """
        h_kv, m = ranking.shape
        ranking = ranking.unflatten(-1, (-1, self.tokens)).sum(-1)  # (h_kv, pages)
        pages, room = ranking.shape[1], k // self.tokens
        reps = self.representatives(plan)
        reps = min(room, max(1, reps // self.tokens)) if reps else 0
        important = top_mask(ranking, room - reps)
        others = torch.zeros_like(important)
        if reps and self.grouping == "kmeans":
            for head, taken in enumerate(important):
                free = (~taken).nonzero().flatten()
                own = keys[head, free].to(torch.promote_types(keys.dtype, torch.float32))
                others[head, free[kmeans_representatives(own, reps)]] = True
        elif reps:
            ones = room * self.tokens - reps * self.tokens if self.bit_quantile == "budget" else 0
            if not isinstance(self.bit_quantile, str):
                ones = floor_share(m, 1 - (self.bit_quantile or 0))
            distance = self.distance(top_mask(heads, ones), layer_idx)
            order = distance.expand(h_kv, -1).masked_fill(important, torch.iinfo(torch.int32).max)
            order = order.sort(dim=-1, stable=True).indices  # near before far, early before late, important ones last
            picked = self.spread(pages - (room - reps), reps, layer_idx).to(order.device)
            others.scatter_(-1, order[:, picked], True)
        return important.repeat_interleave(self.tokens, -1), others.repeat_interleave(self.tokens, -1)

    def distance(self, bits: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Hamming distance of each page's signature to the anchor, from the tokens' bits (h, m), bool: (pages,) int32."""
        signature = bits.T.reshape(-1, self.tokens * bits.shape[0])  # token after token, one bit per head
        return (signature ^ self.anchor_bits(signature, layer_idx)).sum(-1, dtype=torch.int32)

    def anchor_bits(self, signature: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """The anchor (H,) bool of signatures (pages, H)."""
        size, device = signature.shape[1], signature.device
        if self.anchor in ("zeros", "ones"):
            return torch.full((size,), self.anchor == "ones", device=device)
        if self.anchor == "alternate":
            return torch.arange(size, device=device) % 2 == 1
        if self.anchor == "random":
            return torch.randint(0, 2, (size,), generator=self.generator(layer_idx)).bool().to(device)
        twice = 2 * signature.sum(0)
        return twice < signature.shape[0] if self.anchor == "inv_mean" else twice > signature.shape[0]

    def spread(self, n: int, reps: int, layer_idx: int) -> torch.Tensor:
        """Which `reps` of n sorted candidates represent them: (min(n, reps),) long."""
        if n <= reps:
            return torch.arange(n)
        i = torch.arange(reps)
        if self.pick == "even":
            return i * (n - 1) // max(1, reps - 1)
        first, last = i * n // reps, (i + 1) * n // reps
        draw = torch.rand(reps, dtype=torch.float64, generator=self.generator(layer_idx + 1_000_000))
        return first + (draw * (last - first)).long()

    def generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 2_000_003 + stream)
