"""Index: what ranks the tokens of one layer for a query. A retrieval method writes one, with build, append and score.

    class ExactIndex(Index):                                      # the oracle: nothing to build, it scores the keys themselves
        def score(self, q, lo, hi, ctx):
            keys = self.layer.store.keys(lo, hi)                  # (n, h_kv, hi - lo, d)
            ...                                                   # (n, h, hi - lo)

Shapes: n rows of the batch, h query heads, h_kv KV heads, d head dimension. A position counts a row's own tokens: its first
real token is 0, padding has none.

Most indexes need no more. The methods below `optional` do nothing by default:

an index that ...                           overrides                                        as in
works one layer ahead (choose, send)        on_previous_input, on_layer_input, end_step      baselines/infinigen.py, pq/far.py
does not cover the newest tokens yet        local, max_local                                 baselines/clusterkv/
ranks a shortlist without all scores        score_at, best_at                                baselines/combined/two_stage.py
is built beside the model                   wait                                             pq/index.py
needs more keys than a short prompt has     build_late                                       pq/index.py
has product-quantized keys on the device    pq_codes                                         pq/index.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from pqcache import kernels
from pqcache.kernels.scaling import cap_of, capped, is_plain
from pqcache.selective.attention import Part, merge, row_mask
from pqcache.selective.budget import Plan
from pqcache.selective.group import group_reduce, per_head, products, top_tokens
from pqcache.selective.layer import LayerContext
from pqcache.selective.shape import ModelShape
from pqcache.store.base import RetrievalStore
from pqcache.store.row_state import RowState
from pqcache.store.step import PQCodes
from pqcache.store.transfer import table


@dataclass(frozen=True)
class Candidates:
    """The tokens a step may choose from: positions sinks .. ends[r]-1 of row r. It selects k[r] of them."""

    sinks: int
    ends: list[int]
    k: list[int]
    lengths: list[int]  # tokens stored, the current one included

    def valid(self, device: torch.device) -> torch.Tensor | None:
        """(n, 1, max(ends) - sinks) bool; None if all rows have the same candidates."""
        return row_mask([end - self.sinks for end in self.ends], max(self.ends) - self.sinks, device)

    def select_all(self, device: torch.device) -> Selection:
        """Every candidate of every row, the same for all heads."""
        column = torch.arange(self.sinks, max(self.ends), device=device)
        inside = column[None] < table(self.ends, device)[:, None]
        return Selection(torch.where(inside, column[None], -1)[:, None], padded=len(set(self.ends)) > 1)


@dataclass(frozen=True)
class Selection:
    """What an index chose: positions indices (n, H, k), -1 = padding. H is 1 (all heads alike), h_kv, or h.

    log_weight (n, H or h, k) fp32 is added to the scaled logits of the selected tokens before the softmax; sinks and local
    window have 0. A token sampled with probability p gets -log p, so that the sampled softmax estimates the whole one
    (importance sampling, MagicPIG, arXiv 2410.16179). Where a row selects all of its candidates the weight should be 0.

    share (n, h) and mean (n, h or h_kv, d) estimate the tokens left out: the output becomes share * out + (1 - share) * mean,
    share > 0.

    With weights or an estimate the selected tokens alone do not determine the output: `Method.traceable` is then False.
    """

    estimates: ClassVar[bool] = False  # of a subclass: `with_rest` joins an estimate of its own

    indices: torch.Tensor
    padded: bool = False  # some entries are -1
    share: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    log_weight: torch.Tensor | None = None

    def with_rest(self, part: Part) -> Part:
        """Attention to the selected tokens and those always attended, joined by the estimate of the others."""
        if self.share is None or self.mean is None:
            return part
        others = part.lse + (1 / self.share - 1).log()[..., None].to(part.lse)
        return merge([part, Part(per_head(self.mean, part.out.shape[1])[:, :, None].to(part.out), others)])


@dataclass(frozen=True)
class Selected:
    """One step's choice in one layer, as observers get it."""

    sinks: int  # first tokens attended, at positions 0 .. sinks-1
    indices: torch.Tensor | None  # (n, H, k), None: every candidate
    candidates: Candidates
    local: list[int]  # tokens of the local window per row, the current one not counted


class IndexedLayer(Protocol):
    """What an index uses of the RetrievalLayer that it serves."""

    layer_idx: int
    shape: ModelShape
    method: Any  # a RetrievalMethod
    store: RetrievalStore  # K and V
    dense: list[bool]  # rows that attend everything
    plans: list[Plan]  # per row
    scaling: float  # of the model's last call of this layer, see LayerContext

    def candidates(self, ahead: bool = False) -> tuple[Candidates, list[int]]: ...


class Index(RowState):
    """Ranks the candidates of one layer. A method writes build, append, score.

    `self.layer` is set before anything is called. State with an entry per row of the batch is named in `per_row`, see RowState.
    """

    layer: IndexedLayer

    reduce: str = "sum_softmax"  # how the scores of a group's query heads become one ranking, see selective.group
    scope: str = "candidates"  # what the softmax of the reduction is taken over: the candidates, or all past tokens
    # whether it may begin a layer ahead; if not, on_previous_input, on_layer_input and end_step are not called
    ahead: bool = True
    lags: bool = True  # whether `local` may differ from the plan's; if not, it is not called

    # -- what a method writes ---------------------------------------------------------------------------------------

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        """Index a prompt: k, v (n, h_kv, >= max(lengths), d), row r's tokens at 0 .. lengths[r]-1.

        Returns which rows have an index; the others attend to everything. Called again after each later turn, with all tokens.
        """
        return [True] * len(lengths)

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        """Index one token per row: k, v (n, h_kv, 1, d), at position lengths[r] - 1, already stored."""

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        """Scaled logits (q . k times ctx.scaling) of q (n, h, 1, d) for positions lo .. hi-1: (n, h, hi - lo) fp32.

        Without a model's cap: it keeps the order of one head's tokens, and `choose` applies it before heads are joined.
        Rows may be shorter than hi: entries beyond their end are ignored.
        """
        raise NotImplementedError

    # -- what is done with the scores -------------------------------------------------------------------------------

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        """The best candidates per KV head: top-k of the group-reduced scores."""
        return self.choose(self.score(q, *self.span(cand), ctx), cand, h_kv)

    def span(self, cand: Candidates) -> tuple[int, int]:
        """The positions lo .. hi-1 that `score` is asked for: every past token if scope is "all", else the candidates."""
        return (0, max(cand.lengths)) if self.scope == "all" else (cand.sinks, max(cand.ends))

    def choose_by_products(
        self, q: torch.Tensor, keys: torch.Tensor, cand: Candidates, h_kv: int, scaling: float
    ) -> Selection:
        """What `choose` returns for the logits q . key times scaling, in q's dtype: q (n, h, 1, r), keys (n, h_kv, m, r).

        The keys are those of `span`'s positions. Where a kernel serves it reads each key once for all query heads of a group, and
        only one KV head's logits exist at a time.
        """
        n, _, _, r = q.shape
        ranked = None
        if q.dtype == keys.dtype == torch.float32 and keys.stride(-1) == 1 and kernels.native(q, keys):
            query = (q * scaling).reshape(n, h_kv, -1, r)
            ranked = self.ranked(lambda *spans: kernels.rank.best_by_products(query, keys, *spans), cand)
        if ranked is not None:
            return ranked
        return self.choose(products(q, keys) * scaling, cand, h_kv)

    def ranked(self, best: Callable[..., torch.Tensor], cand: Candidates) -> Selection | None:
        """The selection by a kernel best(softmax's span per row, lo, hi per row, k), of positions from `span`'s first one on.

        None where `reduce` is not the sum of softmax weights, which is what such kernels rank by, or these weights are of a model
        with soft-capped scores, or with sinks that the softmax includes.
        """
        scaling = self.layer.scaling
        plain = cap_of(scaling) is None and (self.scope != "all" or is_plain(scaling))
        if self.reduce != "sum_softmax" or not plain:
            return None
        base, _ = self.span(cand)
        ends = cand.lengths if self.scope == "all" else cand.ends
        indices = best([(0, end - base) for end in ends], cand.sinks - base, [end - base for end in cand.ends], cand.k)
        return _moved(indices, base, cand)

    def choose(self, logits: torch.Tensor, cand: Candidates, h_kv: int) -> Selection:
        """Top-k of what `score` returned: of every past token if scope is "all", else of the candidates."""
        valid, scaling = cand.valid(logits.device), self.layer.scaling
        logits = capped(logits, scaling)
        if self.scope == "all":
            stored = row_mask(cand.lengths, max(cand.lengths), logits.device)
            weights = group_reduce(logits, h_kv, self.reduce, stored, (cand.sinks, max(cand.ends)), scaling)
            if valid is not None:
                weights = weights.masked_fill(~valid, -torch.inf)
        else:
            weights = group_reduce(logits, h_kv, self.reduce, valid)
        return _moved(top_tokens(weights, cand.k), cand.sinks, cand)

    # == optional =====================================================================================================

    # -- one layer ahead --------------------------------------------------------------------------------------------

    def on_previous_input(self, ctx: LayerContext) -> None:
        """The layer before is about to run, and this is its context: speculate, prefetch."""

    def on_layer_input(self, ctx: LayerContext) -> None:
        """This layer is about to run. The first layer, which has none before it, starts here."""

    def end_step(self) -> None:
        """This decode step has read what it needed: release what only this step used."""

    # -- a window of its own ----------------------------------------------------------------------------------------

    def local(self, plan: Plan, past: int) -> int:
        """Tokens of the local window after `past` tokens. An index that lags behind adds those it does not cover yet."""
        return plan.local

    def max_local(self, plan: Plan) -> int:
        """Upper bound of what `local` returns: stores keep so many of the newest tokens on the device."""
        return plan.local

    # -- ranking a shortlist ----------------------------------------------------------------------------------------

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """Scaled logits of q (n, h, 1, d) for positions indices (n, H, m) after the sinks: (n, h, m) fp32.

        H is 1, h_kv or h. An index of -1 is padding, whose logit may be anything finite. Default: scores all, then gathers.
        """
        lo = self.layer.method.n_sink
        logits = self.score(q, lo, self.layer.store.length, ctx)
        return logits.gather(2, (per_head(indices, q.shape[1]) - lo).clamp_min(0))

    def best_at(
        self, q: torch.Tensor, shortlist: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext
    ) -> torch.Tensor | None:
        """The cand.k[r] best of a shortlist (n, 1 or h_kv, m), ascending, -1 at its end: positions (n, h_kv, k), likewise.

        By a kernel that ranks as `score_at`, group-summed softmax and top-k do. Default, and where no kernel serves: None.
        """
        return None

    # -- work beside the model --------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for what `build` started beside the model, and take over its result."""

    # -- built during the answer ------------------------------------------------------------------------------------

    def build_late(self, lengths: list[int], rows: list[int], ctx: LayerContext) -> list[bool]:
        """Index these rows, which had no index when the prompt ended, from what the store holds: row r's lengths[r] tokens.

        Called where a step's plan leaves out tokens of a row that `build` said has no index. Returns which of `rows` have one
        now. Default: none.
        """
        return [False] * len(rows)

    # -- a decode step by kernels -----------------------------------------------------------------------------------

    def pq_codes(self) -> PQCodes | None:
        """Centroids and codes, so that kernels can do the step. None unless `select` is top-k of their group-summed softmax."""
        return None


def _moved(indices: torch.Tensor, start: int, cand: Candidates) -> Selection:
    """Entries counted from position `start` on, padded where rows have different numbers of them."""
    padded = len(set(cand.k)) > 1
    return Selection(torch.where(indices < 0, indices, indices + start) if padded else indices + start, padded)
