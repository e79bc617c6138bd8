"""ClusterKV: retrieve whole clusters of similar keys (Liu et al., arXiv 2412.03213, sections III and IV).

The prompt's keys are clustered when it ends. Clusters are ranked by q . centroid; the last selected one is cut where the budget
ends. There is no local window: generated tokens are attended, outside the budget, until `window` of them are clustered.

An aligned token budget holds at every step: tokens that wait to be clustered are part of it, and take half of it at most.

Aligned protocol: a budget ratio is of the tokens after the sinks. Paper's protocol: the ratio includes the sinks, as a token
budget always does, and the first two layers are dense (section V-A).

Release protocol: the published code (github.com/sjtu-zhao-lab/ClusterKV). With store=resident its accuracy evaluation: 400
clusters whatever the prompt, k-means++ seeding, generated tokens are never clustered and all attended. With store=host its
efficiency benchmark: 200 clusters, seeded by keys drawn with replacement, 8 clusters for every 320 generated tokens, and
B - 1 tokens beside the sinks.

Deviations:
- K-Means stops after 20 rounds, as in the released code.
- A later turn is clustered like a prompt of its own, together with the generated tokens before it.
- The cache on the device (store=host) holds tokens, not clusters: the last cluster is cut. The released cache does the same.
- Release: RAFT draws several k-means++ seeds at once and stops at a tolerance; here they are drawn one by one, without one.
- Release: the efficiency code sorts at most 256 clusters and can read clusters before they are built. Neither is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from pqcache import kernels
from pqcache.fields import Positive, Whole, added
from pqcache.kernels.scaling import capped
from pqcache.selective.budget import Plan, partition_plan
from pqcache.selective.group import Reduce, group_reduce, per_head, products
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalMethod, RetrievalStore
from pqcache.selective.shape import ModelShape
from pqcache.store.transfer import table

from .clusters import Distance, cluster, initial
from .recent_store import RecentStore


@dataclass(frozen=True)
class ClusterPlan(Plan):
    """A plan with the prompt's length: tokens after it are clustered window by window."""

    s: int  # tokens of the prompt
    window: int  # generated tokens that are clustered together; 0: none are


class ClusterIndex(Index):
    """Clusters of one layer's keys after the sinks. `order` lists positions cluster by cluster, ascending inside each."""

    per_row = ("centroids", "sizes", "order", "counts", "ends", "windows", "chosen")
    centroids: torch.Tensor  # (n, h_kv, C, d), fp16 for 16-bit keys, else fp32; made by `build`
    sizes: torch.Tensor  # (n, h_kv, C) int32, 0 behind a row's last cluster
    order: torch.Tensor  # (n, h_kv, tokens) int32

    def __init__(self, method: ClusterKV) -> None:
        self.method = method
        # clusters chosen in the last steps (n, H, C) bool, where a cache holds their tokens
        self.chosen: list[torch.Tensor] = []
        self.counts: list[int] = []  # clusters per row
        self.ends: list[int] = []  # positions before this one are sinks or clustered
        self.windows: list[int] = []  # generated tokens that are clustered together, per row

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        """Cluster the tokens that have no cluster: the prompt, or a later turn and the generated tokens before it."""
        method, n, h_kv, d = self.method, k.shape[0], k.shape[1], k.shape[3]
        if not self.counts:
            dtype = torch.float16 if k.dtype in (torch.float16, torch.bfloat16) else torch.float32
            self.centroids = torch.zeros((n, h_kv, 0, d), dtype=dtype, device=k.device)
            self.sizes = torch.zeros((n, h_kv, 0), dtype=torch.int32, device=k.device)
            self.order = torch.zeros((n, h_kv, 0), dtype=torch.int32, device=k.device)
            self.counts, self.ends = [0] * n, [method.n_sink] * n
        self.windows = [method.window_after(length) for length in lengths]
        fresh = [max(0, length - end) for length, end in zip(lengths, self.ends, strict=True)]
        spans = [t + method.n_sink * (end == method.n_sink) for t, end in zip(fresh, self.ends, strict=True)]  # L
        clusters = [
            min(t, method.clusters or max(1, span // method.tokens_per_cluster))
            for t, span in zip(fresh, spans, strict=True)
        ]
        starts = list(self.ends)
        self._add([k[row, :, start : start + t] for row, (start, t) in enumerate(zip(starts, fresh))], clusters, ctx)
        return [True] * n

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        """Once `window` generated tokens have no cluster they are clustered among themselves (sections III-B, IV-A)."""
        # a row that attends everything needs no clusters, unless it will leave tokens out later (where another index waits)
        needs = [not dense or self.method.replans for dense in self.layer.dense]
        rows = zip(lengths, self.ends, self.windows, needs, strict=True)
        due = [window * (0 < window <= length - 1 - end and need) for length, end, window, need in rows]
        widest = max(due)
        if widest:
            keys = self.layer.store.read(0, None, widest + 1)[0][:, :, :widest]
            blocks = [keys[row, :, widest - window :] for row, window in enumerate(due)]
            self._add(blocks, [self.method.clusters_of(window) for window in due], ctx)

    def _add(self, blocks: list[torch.Tensor], clusters: list[int], ctx: LayerContext) -> None:
        """Give row r's next tokens, keys blocks[r] (h_kv, t, d), clusters[r] clusters of their own."""
        sink, facts = self.method.n_sink, ctx.cache.ledger.facts
        width = max(a + b for a, b in zip(self.counts, clusters, strict=True)) - self.sizes.shape[2]
        longer = max(end - sink + b.shape[1] for end, b in zip(self.ends, blocks, strict=True)) - self.order.shape[2]
        if width > 0:
            self.centroids, self.sizes = F.pad(self.centroids, (0, 0, 0, width)), F.pad(self.sizes, (0, width))
        if longer > 0:
            self.order = F.pad(self.order, (0, longer))
        # row by row: a row's clusters do not depend on its neighbours
        for row, (keys, c) in enumerate(zip(blocks, clusters, strict=True)):
            t, first, end = keys.shape[1], self.counts[row], self.ends[row]
            if not t:
                continue
            method, keys = self.method, keys.detach()
            init = initial(keys, c, method.init or "random", method.kmeans_seed, method.distance)
            centroids, codes, rounds = cluster(keys, init, method.max_iter, method.distance)
            self.centroids[row, :, first : first + c] = centroids.to(self.centroids.dtype)
            self.sizes[row, :, first : first + c] = torch.zeros_like(self.sizes[row, :, :c]).scatter_add_(
                1, codes, torch.ones_like(codes, dtype=torch.int32)
            )
            self.order[row, :, end - sink : end - sink + t] = codes.argsort(dim=1, stable=True) + end
            self.counts[row], self.ends[row] = first + c, end + t
            facts["kmeans_iterations"] = max(rounds, facts.get("kmeans_iterations", 0))

    def local(self, plan: Plan, past: int) -> int:
        """The generated tokens that are not clustered yet."""
        assert isinstance(plan, ClusterPlan)
        generated = max(0, past - max(plan.s, self.method.n_sink))
        return generated % plan.window if plan.window else generated

    def max_local(self, plan: Plan) -> int:
        return self.method.window or 0  # that many keys are read when they are clustered; 0: only a resident store

    def weights(self, q: torch.Tensor, h_kv: int, scaling: float) -> torch.Tensor:
        """Ranking weights of clusters, q . centroid (section III-C): (n, h, C), or (n, h_kv, C) reduced over the group."""
        mode, sizes = str(self.method.reduce), per_head(self.sizes, q.shape[1])
        logits = capped(products(q.float(), self.centroids) * scaling, scaling)
        if mode.endswith("softmax"):  # the weight of one token of the cluster, as if all its keys were the centroid
            logits = (logits - torch.logsumexp(logits + sizes.log(), -1, keepdim=True)).exp()
            mode = mode.replace("softmax", "logit")
        return group_reduce(logits.masked_fill(sizes == 0, -torch.inf), h_kv, mode)

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        """Clusters in descending rank, the last one cut where the budget ends."""
        weights = self.weights(q, h_kv, ctx.scaling)
        n, heads, _ = weights.shape
        rank = weights.argsort(dim=-1, descending=True, stable=True)
        spans = self._spans(cand)
        if isinstance(self.layer.store, RecentStore):
            self._note_clusters(rank, *self._ranked(rank, spans), cand, ctx)
        indices = self._tokens(rank, spans, cand.k)
        whole = [k == hi - cand.sinks for k, hi in zip(cand.k, cand.ends, strict=True)]
        if any(whole):  # rows that attend everything beside rows that do not; a dense row may have no clusters
            everything = table(whole, q.device)[:, None, None]
            slot = torch.arange(max(cand.k), device=q.device)
            indices = torch.where(everything, slot + cand.sinks, indices)
        padded = len(set(cand.k)) > 1
        if padded:
            slot = torch.arange(max(cand.k), device=q.device)
            indices = indices.masked_fill(slot >= table(cand.k, q.device)[:, None, None], -1)
        return Selection(indices, padded)

    @staticmethod
    def _ranked(rank: torch.Tensor, spans: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens before each cluster, and in it, of clusters in descending rank (n, H, C); spans: starts, sizes (n, h_kv, C)."""
        sizes = spans[1].repeat_interleave(rank.shape[1] // spans[1].shape[1], dim=1).gather(2, rank)
        return sizes.cumsum(-1) - sizes, sizes

    def _tokens(self, rank: torch.Tensor, spans: tuple[torch.Tensor, torch.Tensor], k: list[int]) -> torch.Tensor:
        """The tokens of the first clusters in rank, k[r] of row r: (n, H, max(k)), any positions behind a row's last one."""
        if kernels.native(rank, self.order):
            return kernels.positions.cluster_tokens(rank, *spans, self.order, k)
        n, heads, _ = rank.shape
        h_kv = self.order.shape[1]
        before, sizes = self._ranked(rank, spans)
        starts = spans[0].repeat_interleave(heads // h_kv, dim=1).gather(2, rank)
        slot = torch.arange(max(k), device=rank.device).expand(n, heads, -1).contiguous()
        at = torch.searchsorted(before + sizes, slot, right=True).clamp_max(rank.shape[2] - 1)
        place = starts.gather(2, at) + slot - before.gather(2, at)
        place = place.clamp_max(self.order.shape[2] - 1)  # in a row with fewer candidates
        return self.order.gather(2, place.view(n, h_kv, -1)).view(n, heads, -1).long()

    def _spans(self, cand: Candidates) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each cluster's candidates begin in `order`, and how many there are: (n, h_kv, C) int64."""
        sizes = self.sizes.long()
        starts = sizes.cumsum(-1) - sizes
        all_of_them = all(hi == max(end, cand.sinks) for hi, end in zip(cand.ends, self.ends, strict=True))
        if cand.sinks == self.method.n_sink and all_of_them:
            return starts, sizes
        # candidates are only a part of the clustered tokens, where this index makes another one's shortlist
        top = table(cand.ends, sizes.device)[:, None, None]
        below = F.pad((self.order < cand.sinks).cumsum(-1), (1, 0))
        inside = F.pad(((self.order >= cand.sinks) & (self.order < top)).cumsum(-1), (1, 0))
        ends = starts + sizes  # positions ascend inside a cluster, so its candidates are consecutive
        return (
            starts + below.gather(2, ends) - below.gather(2, starts),
            inside.gather(2, ends) - inside.gather(2, starts),
        )

    def _note_clusters(
        self, rank: torch.Tensor, before: torch.Tensor, sizes: torch.Tensor, cand: Candidates, ctx: LayerContext
    ) -> None:
        """Report the share of chosen clusters that a cached step chose, too: mean over heads, rows and steps.

        As in the released simulator, every head counts as many clusters as the head that needs most, and steps count as soon as
        `cache_steps` steps came before them. rank (n, H, C): clusters in descending rank; before, sizes (n, H, C): tokens before
        each of them, and in it.
        """
        requested = table(cand.k, rank.device)[:, None, None]
        count = ((before < requested) & (sizes > 0)).sum(-1).amax(1)[:, None, None]
        column = torch.arange(rank.shape[2], device=rank.device)
        now = torch.zeros_like(rank, dtype=torch.bool).scatter(2, rank, (column < count) & (sizes > 0))
        if len(self.chosen) == self.method.cache_steps:
            known = torch.zeros_like(now)
            for chosen in self.chosen:
                known[..., : chosen.shape[2]] |= chosen
            hits = (now & known).sum(-1) / now.sum(-1).clamp_min(1)
            ctx.cache.ledger.mean("cluster_hit_rate", hits.mean())
        self.chosen = [*self.chosen, now][-self.method.cache_steps :]


@dataclass(kw_only=True)
class ClusterKV(RetrievalMethod):
    """Clusters with the largest q . centroid.

    With store=host, cache_hit_rate counts tokens; cluster_hit_rate counts clusters, as the paper does (section V-C).
    """

    name: ClassVar[str] = "clusterkv"
    revision: ClassVar[int] = 1  # after max_iter rounds, keys belong to the last centroids
    released: ClassVar[str] = (
        "sjtu-zhao-lab/ClusterKV: accuracy (store=resident), efficiency with --offload (store=host)"
    )
    paper_dense_layers: ClassVar[int] = 2
    recent_ratio: ClassVar[float] = 0.0  # type: ignore[misc]

    # first tokens, always attended
    n_sink: int = 16
    # none: every query head chooses, as published; sum_softmax: per KV head, by the softmax weight of a cluster's tokens
    reduce: Reduce = "none"
    # prompt tokens per cluster (C0 = L / 80, section V-B)
    tokens_per_cluster: Positive = 80
    # clusters, whatever the prompt's length; null: by tokens_per_cluster, in the release's protocol 400 (store=host: 200)
    clusters: Positive | None = None
    # generated tokens that are clustered together; 0: none are (store=resident); null: 320, in the release's protocol 0
    # (store=host: 320)
    window: Whole | None = None
    # clusters they get; null: 4, in the release's protocol 8
    window_clusters: Positive | None = None
    # keys the K-Means starts from: random (different ones) | repeated (drawn with replacement) | plusplus (k-means++); null:
    # random, in the release's protocol plusplus (store=host: repeated)
    init: Literal["random", "repeated", "plusplus"] | None = added(None, absent="random")
    # distance of the K-Means: cosine, l2 or ip
    distance: Distance = "cosine"
    # K-Means rounds, at most
    max_iter: Positive = 20
    # seed of the initial centroids
    kmeans_seed: int = 4321
    # with store=host, tokens fetched in this many last steps stay on the device (the paper's R)
    cache_steps: Whole = 1

    def validate(self) -> None:
        super().validate()
        self.require(
            "window", self.window != 0 or self.store == "resident", "null or an int >= 1 with a store on the host"
        )

    def setup(self) -> None:
        resident = self.store == "resident"  # which of the two released programs this is
        self.by_protocol(clusters=(None, None, 400 if resident else 200), window_clusters=(4, 4, 8))
        self.by_protocol(window=(320, 320, 0 if resident else 320))
        self.by_protocol(init=("random", "random", "plusplus" if resident else "repeated"))

    def plan(self, s: int, layer_idx: int, n_layers: int) -> ClusterPlan:
        aligned = partition_plan(self.budget_at(s), s, self.n_sink, 0.0)
        k = aligned.local + aligned.k
        if self.protocol == "release" and self.store != "resident":
            k = min(s - aligned.sinks, max(1, self.budget.total(s) - 1))
        elif self.protocol != "aligned":
            k = min(s - aligned.sinks, max(1, self.budget.total(s) - aligned.sinks))
        return ClusterPlan(aligned.sinks, 0, k, s, self.window_after(s))

    @property
    def keeps_rule(self) -> bool:
        return self.window != 0  # else all generated tokens are attended

    def replan(self, first: Plan, c: int, layer_idx: int, n_layers: int) -> ClusterPlan:
        assert isinstance(first, ClusterPlan)
        return replace(self.plan(c, layer_idx, n_layers), s=first.s, window=first.window)

    def window_after(self, s: int) -> int:
        """Generated tokens that are clustered together after a prompt of `s` tokens.

        Where those that wait are part of the budget they take half of it at most.
        """
        window = self.window or 0
        if not self.replans:
            return window
        shares = partition_plan(self.budget_at(s), max(s, self.budget.tokens or 0), self.n_sink, 0.0)
        return min(window, max(1, (shares.local + shares.k) // 2))

    def clusters_of(self, window: int) -> int:
        """Clusters of `window` generated tokens: window_clusters, or fewer in proportion where the window is shorter."""
        if not self.window or window == 0:
            return 0
        share = (self.window_clusters or 1) * window // self.window
        return min(window, max(1, share))

    def make_index(self, layer_idx: int, shape: ModelShape) -> ClusterIndex:
        return ClusterIndex(self)

    def make_store(self, n_local: int, moved: Callable[[str, int], None]) -> RetrievalStore:
        if self.store == "host" and self.cache_steps:
            return RecentStore(self.n_sink, n_local, moved, self.cache_steps)
        return super().make_store(n_local, moved)
