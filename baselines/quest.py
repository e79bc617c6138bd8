"""Quest: retrieve pages of consecutive tokens by an upper bound of their scores (Tang et al., arXiv 2406.10774, section 3).

Each page stores the channel-wise minimum and maximum of its keys (Algorithm 1). A budget of B tokens attends floor(B / page)
pages; the page of the newest past token is always among them (`newest`). There are no sinks and no local window.

An aligned token budget holds at every step: beside the newest page, as many whole pages are attended as fit.

Release protocol: the evaluation code of github.com/mit-han-lab/Quest. At least three pages are attended, and the newest one
competes with the others.

Deviations:
- The current token is attended on top of the pages, as for every other method here. The released evaluation attends it only if
  its page is chosen.
- The CUDA code, which always takes the newest page, is what the aligned and the paper's protocol follow there.
- With store=host all chosen pages are fetched at each step; the published system keeps K and V on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pqcache import kernels
from pqcache.fields import Positive, added
from pqcache.kernels.scaling import capped
from pqcache.selective.budget import Plan
from pqcache.selective.group import Reduce, group_reduce, products, top_tokens
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.buffer import Buffer
from pqcache.store.transfer import table


def page_bound(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Upper bound of q . k over each page, sum_c max(q_c low_c, q_c high_c) (Algorithm 1): (n, h, pages) fp32.

    q (n, h, 1, d), low and high (n, h_kv, pages, d). The larger product takes the maximum where q_c > 0, else the minimum.
    """
    q = q.float()
    return products(q.clamp_min(0), high) + products(q.clamp_max(0), low)


class PageIndex(Index):
    """Channel-wise minimum and maximum of the keys of every page of one layer. Page p holds positions p*page .. p*page+page-1."""

    per_row = ("low", "high")
    low: Buffer  # (n, h_kv, capacity, d), as the keys; made by `build`
    high: Buffer

    def __init__(self, method: Quest) -> None:
        self.page, self.reduce, self.newest = method.page, method.reduce, bool(method.newest)

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        self.low, self.high = Buffer.like(k), Buffer.like(k)
        for row, length in enumerate(lengths):  # a row's last page ends with the row, not with the longest one
            whole = length // self.page
            keys = k[row : row + 1, :, : whole * self.page].unflatten(2, (whole, self.page))
            rest = k[row : row + 1, :, whole * self.page : length]
            for buffer, extreme in ((self.low, torch.amin), (self.high, torch.amax)):
                buffer.reserve(-(-max(lengths) // self.page))
                if whole:
                    buffer.data[row, :, :whole] = extreme(keys, 3)[0]
                if rest.shape[2]:
                    buffer.data[row, :, whole] = extreme(rest, 2)[0]
        return [True] * len(lengths)

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        """The new key opens a page or widens the last one at once."""
        new = k[:, :, 0].detach()
        rows = torch.arange(len(lengths), device=k.device)
        page = table([(length - 1) // self.page for length in lengths], k.device)
        opens = table([(length - 1) % self.page == 0 for length in lengths], k.device)[:, None, None]
        for buffer, extreme in ((self.low, torch.minimum), (self.high, torch.maximum)):
            buffer.reserve((max(lengths) - 1) // self.page + 1)
            buffer.data[rows, :, page] = torch.where(opens, new, extreme(buffer.data[rows, :, page], new))

    def _bounds(self, q: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """`page_bound` of pages first .. last-1: (n, h, last - first) fp32."""
        low, high = self.low.data, self.high.data
        if q.dtype == low.dtype == torch.float32 and kernels.native(q, low):
            return kernels.rank.page_bounds(q, low, high, first, last)
        return page_bound(q, low[:, :, first:last], high[:, :, first:last])

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        """The pages of highest bound, the newest past token's among them where `newest` says so, as token positions."""
        size, ends, device = self.page, cand.ends, q.device
        # the first page with a candidate, and how many of its tokens are sinks; a page with sinks counts whole
        first, cut = divmod(cand.sinks, size)
        pages = [-(-end // size) for end in ends]
        counts = [min(page - first, -(-(k + cut) // size)) if k else 0 for page, k in zip(pages, cand.k, strict=True)]
        column = torch.arange(first, max(pages), device=device)
        last = table(pages, device)[:, None, None] - 1
        bound = capped(self._bounds(q, first, max(pages)) * ctx.scaling, ctx.scaling)
        weights = group_reduce(bound, h_kv, self.reduce, None if len(set(pages)) == 1 else column <= last)
        if self.newest:
            weights = weights.masked_fill(column == last, torch.inf)
        chosen = top_tokens(weights, counts)  # (n, H, max(counts)), ascending
        positions = ((chosen + first)[..., None] * size + torch.arange(size, device=device)).flatten(2)
        # only the last page is cut, and it comes last
        if self.newest and cut == 0 and len(set(ends)) == 1 and len(set(counts)) == 1:
            return Selection(positions[..., : positions.shape[2] - (pages[0] * size - ends[0])])
        chosen = chosen[..., None].expand(-1, -1, -1, size).flatten(2)
        inside = (chosen >= 0) & (positions >= cand.sinks) & (positions < table(ends, device)[:, None, None])
        return Selection(torch.where(inside, positions, -1), padded=True)


@dataclass(kw_only=True)
class Quest(RetrievalMethod):
    """Pages with the largest upper bound of q . k. The paper's protocol leaves the first two layers dense (section 4.1)."""

    name: ClassVar[str] = "quest"
    released: ClassVar[str] = "mit-han-lab/Quest: evaluation"
    own_rule: ClassVar[str] = "whole"
    paper_dense_layers: ClassVar[int] = 2
    shared_reduce: ClassVar[str] = "sum_logit"
    n_sink: ClassVar[int] = 0  # type: ignore[misc]
    recent_ratio: ClassVar[float] = 0.0  # type: ignore[misc]

    # none: every query head chooses its own pages, as published; sum_logit: per KV head, by the sum of its group's bounds
    reduce: Reduce = "none"
    # tokens per page (section 3.3)
    page: Positive = 16
    # pages attended, at least; null: 1, in the release's protocol 3
    least_pages: Positive | None = added(None, absent=1)
    # whether the page of the newest past token is always attended; null: true, in the release's protocol false
    newest: bool | None = added(None, absent=True)

    def fill(self) -> None:
        self.by_protocol(least_pages=(1, 1, 3), newest=(True, True, False))

    @property
    def keeps_rule(self) -> bool:
        """The newest page, which is not full, is always attended, and the budget has room for the least pages."""
        least = self.page * (self.least_pages or 1)
        return bool(self.newest) and (self.budget.tokens is None or least <= self.budget.tokens)

    @property
    def slack(self) -> int:
        return 2 * self.page  # the first page may hold sinks, the last one is not full

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        if self.effective_rule == "whole" and self.budget.tokens is not None and s > self.budget.tokens:
            newest = (s - 1) % self.page + 1  # tokens of the newest page
            return Plan(sinks=0, local=0, k=newest + (self.budget.tokens - newest) // self.page * self.page)
        total = self.budget.tokens or self.budget.total(s)  # a token budget beyond the prompt: all pages
        pages = max(self.least_pages or 1, total // self.page)
        return Plan(sinks=0, local=0, k=s if self.budget.is_everything else min(s, pages * self.page))

    def make_index(self, layer_idx: int, shape: ModelShape) -> PageIndex:
        return PageIndex(self)
