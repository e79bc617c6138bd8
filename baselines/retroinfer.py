"""RetroInfer: a wave index of clusters, in three zones (Chen et al., arXiv 2505.02922, sections 3 and 4).

Keys between sinks and local window, their mean taken away, are clustered by spherical K-Means, 16 to a cluster, in segments of
8192 tokens (section 4.2). A query weighs all clusters by the softmax of its products with their mean keys, summed over its group.
Sinks and local window are the steady zone. The tokens of the best clusters are attended: the retrieval zone. Each of the next
clusters counts as its mean key and mean value, as often as it has tokens: the estimation zone, 23.2 % of all (section 4.3).
Generated tokens join the window, until `update` of them are clustered.

protocol=paper and protocol=release: the ratio is the share of clusters in the retrieval zone, 0.018 in the paper's experiments.
4 sinks, 64 newest tokens and what was generated since come on top. protocol=release counts clusters as the authors' code.

Deviations:
- aligned: the best clusters whose tokens fit the budget. Clusters that are estimated are none of it; their bytes are counted.
- The wave buffer is not rebuilt: store=host fetches tokens, store=block_cache caches blocks of consecutive ones.
- Empty clusters are left out before the softmax, in the release after it.
- Clusters are in fp32 until they are stored; the release computes them in 16 bits.
- Both zones are shares of all clusters. The release adds one cluster at least to each with every 1024 generated tokens.
- A later turn is clustered with all before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from pqcache.fields import Positive, Share
from pqcache.kernels.scaling import capped
from pqcache.pq.kmeans import summed
from pqcache.selective.attention import Part, merge
from pqcache.selective.budget import Plan, floor_share, window_plan
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape

TILE = 1024  # keys whose products with all clusters exist at a time


@dataclass(frozen=True)
class WavePlan(Plan):
    """A plan with the prompt's length: tokens after it are clustered `update` at a time."""

    s: int


@dataclass(frozen=True)
class Zones(Selection):
    """The retrieval zone as positions, and attention to the estimation zone."""

    estimates: ClassVar[bool] = True

    rest: Part | None = None

    def with_rest(self, part: Part) -> Part:
        return part if self.rest is None else merge([part, self.rest])


def wave_clusters(x: torch.Tensor, c: int, segments: int, rounds: int) -> torch.Tensor:
    """Spherical K-Means of x (h, t, d) fp32 from c evenly spaced keys: each key's cluster (h, t).

    c is a multiple of `segments`. The keys that it starts from are compared as they are until their cluster has a member.
    """
    h, t, _ = x.shape
    start = ((torch.arange(c, device=x.device) + 0.5) * (t / c)).long()
    means = x[:, start].reshape(h * segments, c // segments, -1)
    part = x[:, : t // segments * segments].reshape(h * segments, t // segments, -1)
    for _ in range(rounds - 1):
        means = moved(part, means, nearest(part, means), unit=True)
    return nearest(x, means.reshape(h, c, -1))


def nearest(x: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """The mean of largest product with each of x (G, t, d), means (G, C, d): (G, t)."""
    return torch.cat([(tile @ means.mT).argmax(-1) for tile in x.split(TILE, 1)], 1)


def moved(x: torch.Tensor, means: torch.Tensor, codes: torch.Tensor, unit: bool = False) -> torch.Tensor:
    """Each cluster's mean, of length 1 if `unit`; an empty one stays: x (G, t, d), codes (G, t), means (G, C, d)."""
    sums, counts = summed(x, codes, means.shape[1])
    new = sums / counts.clamp_min(1)[..., None]
    return torch.where(counts[..., None] > 0, F.normalize(new, dim=-1) if unit else new, means)


class WaveIndex(Index):
    """Clusters of one layer, row by row. `order` lists positions cluster by cluster."""

    counted = ("centroids", "values", "sizes", "order")
    layer: Any

    def __init__(self, method: RetroInfer) -> None:
        self.method = method
        self.centroids: list[torch.Tensor] = []  # (h_kv, C, d), mean keys
        self.values: list[torch.Tensor] = []  # (h_kv, C, d_v), mean values
        self.sizes: list[torch.Tensor] = []  # (h_kv, C) int32
        self.order: list[torch.Tensor] = []  # (h_kv, tokens) int32
        self.ends: list[int] = []  # positions before this one are sinks or clustered

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        plans, h_kv = self.layer.plans, k.shape[1]
        self.ends = [plan.sinks for plan in plans]
        self.centroids, self.values = ([x.new_zeros((h_kv, 0, x.shape[3])) for _ in plans] for x in (k, v))
        self.sizes, self.order = ([k.new_zeros((h_kv, 0), dtype=torch.int32) for _ in plans] for _ in range(2))
        for row, plan in enumerate(plans):
            at = slice(plan.sinks, max(plan.sinks, plan.s - plan.local))
            self.add(row, k[row, :, at].detach(), v[row, :, at].detach(), plan.s)
        return [end > plan.sinks for end, plan in zip(self.ends, plans, strict=True)]

    def add(self, row: int, k: torch.Tensor, v: torch.Tensor, s: int) -> None:
        """Cluster the row's next tokens, k and v (h_kv, t, d), of a text of s tokens."""
        if not k.shape[1]:
            return
        c, segments = self.method.counts(k.shape[1], s)
        k, v, dtypes = k.to(accumulator_dtype(k)), v.to(accumulator_dtype(v)), (k.dtype, v.dtype)
        codes = wave_clusters((k - k.mean(1, keepdim=True)).float(), c, segments, self.method.rounds)
        sizes = torch.zeros((len(k), c), dtype=torch.int32, device=k.device)
        sizes.scatter_add_(1, codes, torch.ones_like(codes, dtype=torch.int32))
        means, values = (moved(x, x.new_zeros((len(k), c, x.shape[2])), codes).to(d) for x, d in zip((k, v), dtypes))
        order = codes.argsort(dim=1, stable=True).int() + self.ends[row]
        new = (means, values, sizes, order)
        for state, x in zip((self.centroids, self.values, self.sizes, self.order), new, strict=True):
            state[row] = torch.cat([state[row], x], 1)
        self.ends[row] += k.shape[1]

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        update, rows = self.method.update, zip(lengths, self.ends, self.layer.plans, self.layer.dense, strict=True)
        due = [length - 1 - end >= plan.local + update and not dense for length, end, plan, dense in rows]
        if any(due):
            newest = max(length - end for length, end, now in zip(lengths, self.ends, due, strict=True) if now)
            keys, values = self.layer.store.read(0, None, newest)
            for row, now in enumerate(due):
                if now:
                    at = slice(newest - (lengths[row] - self.ends[row]), None)
                    self.add(row, keys[row, :, at][:, :update], values[row, :, at][:, :update], update)

    def local(self, plan: Any, past: int) -> int:
        return plan.local + max(0, past - plan.s) % self.method.update

    def max_local(self, plan: Plan) -> int:
        return plan.local + self.method.update

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Zones:
        rows = [self.zones(q[row : row + 1], row, cand, h_kv, ctx) for row in range(len(q))]
        indices = torch.nn.utils.rnn.pad_sequence([at.T for at, _ in rows], batch_first=True, padding_value=-1).mT
        rest = Part(torch.cat([part.out for _, part in rows]), torch.cat([part.lse for _, part in rows]))
        return Zones(indices, True, rest=rest)

    def zones(
        self, q: torch.Tensor, row: int, cand: Candidates, h_kv: int, ctx: LayerContext
    ) -> tuple[torch.Tensor, Part]:
        """Of a row's query q (1, h, 1, d): positions (h_kv, m), -1 = padding, and attention to the estimation zone."""
        sizes, k, dtype = self.sizes[row].long(), cand.k[row], accumulator_dtype(q)
        keys, values = self.centroids[row].to(dtype), self.values[row].to(dtype)
        if k == cand.ends[row] - cand.sinks:  # all of its candidates; it may have no clusters
            every = torch.arange(cand.sinks, cand.ends[row], device=q.device).expand(h_kv, -1)
            out = values.new_zeros((1, q.shape[1], 1, values.shape[2]))
            return every, Part(out, torch.full_like(out[..., 0], -torch.inf))
        logits = capped(q.to(dtype).view(h_kv, -1, q.shape[3]) @ keys.mT * ctx.scaling, ctx.scaling)  # (h_kv, g, C)
        logits = logits.masked_fill(sizes[:, None] == 0, -torch.inf)
        rank = logits.softmax(-1).sum(1).masked_fill(sizes == 0, -1).argsort(dim=-1, descending=True, stable=True)
        ends = sizes.gather(1, rank).cumsum(-1)  # tokens of the best clusters
        column, c = torch.arange(rank.shape[1], device=q.device), rank.shape[1]
        wanted = self.method.probes(c, self.layer.plans[row])
        taken = (ends <= k) if wanted is None else (column < wanted).expand_as(ends)
        count = taken.sum(-1, keepdim=True)
        nearby = (column >= count) & (column < count + round(self.method.estimation * c))
        zone = torch.zeros_like(nearby).scatter(1, rank, nearby)
        logits = (logits + sizes.log()[:, None]).masked_fill(~zone[:, None], -torch.inf)
        out = logits.softmax(-1).nan_to_num(0) @ values
        rest = Part(out.flatten(0, 1)[None, :, None], logits.logsumexp(-1).flatten()[None, :, None])
        held = ends.masked_fill(~taken, 0).amax(-1, keepdim=True)  # tokens of the retrieval zone
        width = k if wanted is None else self.order[row].shape[1]
        slot = torch.arange(int(held.max()) if q.device.type == "cpu" else width, device=q.device).expand(h_kv, -1)
        at = torch.searchsorted(ends, slot.contiguous(), right=True).clamp_max(c - 1)
        starts, before = sizes.cumsum(-1) - sizes, ends - sizes.gather(1, rank)
        place = starts.gather(1, rank.gather(1, at)) + slot - before.gather(1, at)
        chosen = self.order[row].gather(1, place.clamp_max(self.order[row].shape[1] - 1)).long()
        return torch.where(slot < held, chosen, -1), rest

    def map_rows(self, index: torch.Tensor) -> None:
        for name in (*self.counted, "ends"):
            setattr(self, name, [getattr(self, name)[row] for row in index.tolist() if self.ends])


@dataclass(kw_only=True)
class RetroInfer(RetrievalMethod):
    """Tokens of the best clusters, and the next clusters by their means."""

    name: ClassVar[str] = "retroinfer"
    released: ClassVar[str] = "microsoft/RetrievalAttention: cache_hub/retroinfer_cache.py, cache_hub/kmeans.py"
    own_rule: ClassVar[str] = "prompt"  # the budget is an upper bound
    composable: ClassVar[bool] = False  # its estimate belongs to its choice
    reduce: ClassVar[str] = "sum_softmax"  # type: ignore[misc, assignment]

    # tokens per cluster, in the mean
    tokens_per_cluster: Positive = 16
    # tokens that are clustered apart from others
    segment: Positive = 8192
    # K-Means rounds
    rounds: Positive = 10
    # share of the clusters that is estimated
    estimation: Share = 0.232
    # generated tokens that are clustered together
    update: Positive = 1024
    # tokens of the local window; null: by recent_ratio, in the protocols paper and release 64
    recent: Positive | None = None
    # first tokens, always attended; null: 32 on top of a budget ratio, in the protocols paper and release 4
    n_sink: int | None = None  # type: ignore[assignment]

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 4), recent=(None, 64))

    @property
    def estimates_rest(self) -> bool:
        return not self.budget.is_everything

    def plan(self, s: int, layer_idx: int, n_layers: int) -> WavePlan:
        plan = super().plan(s, layer_idx, n_layers)
        if self.recent is not None:
            plan = window_plan(self.budget, s, self.n_sink or 0, self.recent)
        if self.protocol == "aligned" or self.budget.is_everything:
            return WavePlan(plan.sinks, plan.local, plan.k, s)
        local = min(self.recent or 0, s - plan.sinks)
        share = self.budget.ratio or self.budget.total(s) / s
        return WavePlan(plan.sinks, local, floor_share(s - plan.sinks - local, share), s)

    def probes(self, clusters: int, plan: WavePlan) -> int | None:
        """Clusters of the retrieval zone; None: as many as the budget has room for."""
        share = self.budget.ratio or self.budget.total(plan.s) / plan.s
        return None if self.protocol == "aligned" else max(1, round(clusters * share))

    def counts(self, t: int, s: int) -> tuple[int, int]:
        """Clusters and segments of t tokens, of a text of s."""
        text = s if self.protocol == "release" else t
        segments = max(1, min(round(text / self.segment), t))
        unit = math.lcm(8, segments) if self.protocol == "release" else segments
        c = max(1, round(text / self.tokens_per_cluster / unit)) * unit
        return (c, segments) if c <= t else (t // segments * segments, segments)

    def make_index(self, layer_idx: int, shape: ModelShape) -> WaveIndex:
        return WaveIndex(self)
