"""SparQ: retrieve tokens by the query's largest components (Ribar et al., arXiv 2312.04985, section 4, Algorithm 1).

Approximate logits use the r largest components of the query, and the same components of all keys. The query heads of a group
share components. Tokens are ranked by softmax over all past tokens per query head, summed over the group in fp32, as the authors'
formula for one head says. Their library, and its copy in PQCache's released comparison, sum logits: protocol=release.

Deviations:
- SparQ has no sinks. PQCache's comparison adds 32, which is the default here.
- With store=host, sinks and window stay on the device; the comparison's code fetches them again at each step.
- Budgets beyond the prompt are clamped.
- Scores are fp32 under every protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pqcache import kernels
from pqcache.fields import Positive
from pqcache.kernels.scaling import capped
from pqcache.selective.attention import row_mask
from pqcache.selective.budget import Plan, floor_share, partition_plan
from pqcache.selective.group import marks, per_head, top_tokens
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.buffer import Buffer

TURNED = 64  # tokens whose keys are turned at a time: all of them would miss the processor's cache at every number


def largest_components(q: torch.Tensor, h_kv: int, r: int) -> torch.Tensor:
    """The r components of largest |q|, summed over a group's query heads: q (n, h, 1, d) -> (n, h_kv, r), ties to the lower."""
    n, h, _, d = q.shape
    weight = q.float().abs().view(n, h_kv, h // h_kv, d).sum(2)
    return top_tokens(weight, [min(r, d)] * n)


def tempered_query(q: torch.Tensor, components: torch.Tensor, scaling: float) -> torch.Tensor:
    """q[i] / tau with tau = sqrt(d |q[i]|_1 / |q|_1) per query head: (n, h_kv, g, r).

    q (n, h, 1, d), components i (n, h_kv, r). `scaling` is the model's 1 / sqrt(d).
    """
    n, h, _, d = q.shape
    h_kv = components.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).view(n, h_kv, h // h_kv, d)
    kept = grouped.gather(3, components[:, :, None].expand(-1, -1, h // h_kv, -1))
    share = kept.abs().sum(-1) / grouped.abs().sum(-1).clamp_min(torch.finfo(exact).tiny)  # (n, h_kv, g), of |q|_1
    return kept * (scaling * share.clamp_min(torch.finfo(exact).eps).rsqrt())[..., None]  # q = 0 stays 0: uniform


def partial_logits(q: torch.Tensor, components: torch.Tensor, rows: torch.Tensor, scaling: float) -> torch.Tensor:
    """Approximate logits q[i] . K[:, i] / tau: (n, h, m); rows K[:, i] (n, h_kv, r, m), the rest as of `tempered_query`."""
    tempered = tempered_query(q, components, scaling)
    return (tempered @ rows.to(tempered.dtype)).view(q.shape[0], q.shape[1], -1)


class ComponentIndex(Index):
    """A second copy of one layer's keys, component by component, and the mean of all values."""

    per_row = ("components", "written", "mean")
    components: Buffer  # (n, h_kv * d, capacity), as the keys; on the host unless store=resident; made by `build`
    scope = "all"  # the softmax runs over every past token, the current one included

    def __init__(self, method: SparQ) -> None:
        self.method = method
        self.reduce = str(method.reduce)
        self.on_host = () if method.store == "resident" else ("components",)
        self.written: list[int] = []  # columns of it, per row
        self.mean: torch.Tensor | None = None  # (n, h_kv, d) fp32: mean of all values, with reallocate

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        n, h_kv, _, d = k.shape
        where = torch.device("cpu") if self.method.store != "resident" else k.device
        if not self.written:
            self.components = Buffer(n, h_kv * d, (), k.dtype, where, pinned=True)
            self.written = [0] * n
        self.components.reserve(max(lengths) + 1)
        for row, (start, length) in enumerate(zip(self.written, lengths, strict=True)):
            by_component = self.components.data[row].unflatten(0, (h_kv, d))
            for first in range(start, length, TURNED):
                tile = slice(first, min(first + TURNED, length))
                by_component[:, :, tile] = k[row, :, tile].mT
            self._moved(ctx, "write_back", k[row, :, start:length])
        self.written = list(lengths)
        if self.method.reallocate:
            exact = torch.promote_types(v.dtype, torch.float32)
            rows = [v[row, :, :length].to(exact).mean(1) for row, length in enumerate(lengths)]
            self.mean = torch.stack(rows).detach()
        return [True] * n

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        new = k.detach().transpose(2, 3).flatten(1, 2)  # (n, h_kv * d, 1)
        self.components.write(
            new.to(self.components.data.device), [length - 1 for length in lengths], [1] * len(lengths)
        )
        self.written = list(lengths)
        self._moved(ctx, "write_back", new)
        if self.mean is not None:
            count = torch.tensor(lengths, device=v.device)[:, None, None]
            self.mean = self.mean + (v[:, :, 0].detach().to(self.mean.dtype) - self.mean) / count

    def _moved(self, ctx: LayerContext, kind: str, x: torch.Tensor) -> None:
        if self.method.store != "resident":
            ctx.cache.ledger.move(kind, x.numel() * x.element_size())

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        """Unless store=resident, the chosen components of all keys cross from the host: they depend on q."""
        data = self.components.data
        n, h_kv, d = q.shape[0], self.layer.shape.h_kv, q.shape[3]
        chosen = largest_components(q, h_kv, self.method.r)
        line = (chosen + torch.arange(h_kv, device=q.device)[:, None] * d).flatten(1).to(data.device)  # (n, h_kv * r)
        rows = data[:, :, lo:hi][torch.arange(n, device=data.device)[:, None], line]  # (n, h_kv * r, m)
        self._moved(ctx, "selection_keys", rows)
        rows = rows.to(q.device).view(n, h_kv, -1, hi - lo)
        return partial_logits(q, chosen, rows, ctx.scaling)

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """The chosen components of the keys at these positions alone."""
        data = self.components.data
        n, h_kv, d = q.shape[0], self.layer.shape.h_kv, q.shape[3]
        heads = max(h_kv, indices.shape[1])
        chosen = largest_components(q, h_kv, self.method.r)
        line = (chosen + torch.arange(h_kv, device=q.device)[:, None] * d).repeat_interleave(heads // h_kv, dim=1)
        at = line[..., None] * data.shape[2] + indices.clamp_min(0).expand(n, heads, -1)[:, :, None]  # (n, heads, r, m)
        rows = data.flatten(1).gather(1, at.flatten(1).to(data.device))
        self._moved(ctx, "selection_keys", rows)
        rows = rows.to(q.device).view(at.shape)
        return partial_logits(q, chosen.repeat_interleave(heads // h_kv, dim=1), rows, ctx.scaling)

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        """Top-k of the approximate weights; with reallocation also their sum over what is attended, per query head."""
        if self.mean is None and (chosen := self._by_kernel(q, cand, h_kv, ctx)) is not None:
            return chosen
        logits = self.score(q, 0, max(cand.lengths), ctx)
        chosen = self.choose(logits, cand, h_kv)
        if self.mean is None:
            return chosen
        n, h, m = logits.shape
        stored, logits = row_mask(cand.lengths, m, q.device), capped(logits, ctx.scaling)
        probs = (logits if stored is None else logits.masked_fill(~stored, -torch.inf)).softmax(-1)
        ends = torch.tensor(cand.ends, device=q.device)[:, None, None]
        column = torch.arange(m, device=q.device)
        forced = ((column < cand.sinks) | (column >= ends)).expand(n, h, m)
        attended = forced | per_head(marks(chosen.indices, m), h)
        share = probs.masked_fill(~attended, 0).sum(-1)
        whole = torch.tensor([k == hi - cand.sinks for k, hi in zip(cand.k, cand.ends, strict=True)], device=q.device)
        return Selection(chosen.indices, chosen.padded, torch.where(whole[:, None], 1.0, share), self.mean)

    def _by_kernel(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection | None:
        """The top-k where a kernel reads the components from where they are stored; None if none serves."""
        data = self.components.data
        if self.method.store != "resident" or not q.dtype == data.dtype == torch.float32:
            return None
        if not kernels.native(q, data):
            return None
        chosen = largest_components(q, h_kv, self.method.r)
        query = tempered_query(q, chosen, ctx.scaling)
        places = chosen + torch.arange(h_kv)[:, None] * q.shape[3]
        return self.ranked(lambda *spans: kernels.rank.best_by_lines(query, data, places, *spans), cand)


@dataclass(kw_only=True)
class SparQ(RetrievalMethod):
    """Tokens with the largest approximate softmax weight.

    Aligned protocol: sinks, window and k are PQCache's. The others: window and k are shares of the prompt or of a token budget,
    as in PQCache's experiments with SparQ; sinks come on top. The authors' own sweeps are
    protocol=paper n_sink=0 recent_ratio=0.25 budget=128 with r = 8 to 64.
    """

    name: ClassVar[str] = "sparq"
    released: ClassVar[str] = "HugoZHL/PQCache: vq_method/retrieval_based/sparq.py"
    ranks_shortlists: ClassVar[bool] = True

    # how the scores of a group's query heads become one ranking: sum_softmax | max_softmax | sum_logit | max_logit | mean_logit
    # | none (every query head has its own); null: sum_softmax, under protocol=release sum_logit
    reduce: str | None = None  # type: ignore[assignment]
    # components of the query that are used, at most the head dimension (PQCache, section 4.2.1, uses 1: 1/128 of K)
    r: Positive = 1
    # give the softmax mass of the tokens left out to the mean value (section 4, step 3)
    reallocate: bool = False

    @property
    def estimates_rest(self) -> bool:
        return self.reallocate

    def fill(self) -> None:
        self.by_protocol(reduce=("sum_softmax", "sum_softmax", "sum_logit"))

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        aligned = partition_plan(self.budget_at(s), s, self.n_sink, self.recent_ratio)
        if self.protocol == "aligned" or self.budget.is_everything:
            return aligned
        total = min(s - aligned.sinks, self.budget.total(s))
        local = min(s - aligned.sinks, max(1, floor_share(total, self.recent_ratio)))
        return Plan(aligned.sinks, local, max(0, total - local))

    def make_index(self, layer_idx: int, shape: ModelShape) -> ComponentIndex:
        return ComponentIndex(self)
