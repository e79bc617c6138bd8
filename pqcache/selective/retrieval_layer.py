"""RetrievalLayer: keeps every token in a store, and attends to those an index picks for each query.

A decode step is `decode`, read top to bottom: store the token, find the candidates, select, attend, note.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from pqcache import kernels
from pqcache.selective.attention import attend_one, attend_rows, partial
from pqcache.selective.budget import Plan
from pqcache.selective.group import per_head
from pqcache.selective.index import Candidates, Index, Selected, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.shape import ModelShape
from pqcache.selective.staged import StagedLayer, exact_copy
from pqcache.selective.substitute import StepParts
from pqcache.store.base import RetrievalStore, Served
from pqcache.store.resident import ResidentStore
from pqcache.store.transfer import table

if TYPE_CHECKING:
    from pqcache.selective.retrieval import RetrievalMethod

Tokens = float | torch.Tensor  # a mean over rows and heads; a tensor where only the device knows it


class RetrievalLayer(StagedLayer):
    """Keeps everything in a store; at decode attends to sinks, selected tokens, local window and the current token."""

    offers_steps = True

    def __init__(self, layer_idx: int, shape: ModelShape, method: RetrievalMethod) -> None:
        self.method = method
        super().__init__(layer_idx, shape)

    def clear(self) -> None:
        super().clear()
        self.store: RetrievalStore | None = None
        self.index = self.new_index()
        self.plans: list[Plan] = []  # per row: of the prompt, or of the current step where the method plans again
        self.first: list[Plan] = []  # per row, of the prompt
        self.room = 0  # tokens of the local window that the store has at hand
        self.dense: list[bool] = []  # rows that attend everything: no index, or nothing to choose from

    # -- the prompt ---------------------------------------------------------------------------------------------------

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.plans = self.first = self.make_plans(lengths, ctx)
        self.room = max(self.index.max_local(plan) for plan in self._widest(lengths, ctx))
        known, self.store = self.store, self.new_store(1 + self.room, ctx)
        self.store.use_lanes(ctx.cache.lanes.on(k.device))
        self.store.expect(ctx.cache.expected)
        if self.store.whole and self.staged is not None:
            self.store = self.staged
        else:
            self.store.load(k, v, lengths, known)
        built, replans = [False] * len(lengths), self.method.replans
        # an index may wait until there is something to leave out
        self.dense = [replans and plan.total >= held for plan, held in zip(self.plans, lengths, strict=True)]
        if not self.method.budget.is_everything:
            built = self.index.build(k, v, lengths, ctx)
        self.dense = [
            not ok or (plan.k + plan.local == 0 and not replans) for ok, plan in zip(built, self.plans, strict=True)
        ]

    def new_index(self) -> Index:
        """An empty index that serves this layer."""
        index = self.method.make_index(self.layer_idx, self.shape)
        index.layer = cast(RetrievalLayer, weakref.proxy(self))  # weak, so that a dropped cache is freed at once
        return index

    def make_plans(self, lengths: list[int], ctx: LayerContext) -> list[Plan]:
        """How each row's budget is spent; row r stores lengths[r] tokens."""
        return [self.method.plan(length, self.layer_idx, self.shape.n_layers) for length in lengths]

    def replan(self, lengths: list[int]) -> list[Plan]:
        """Each row's plan for a step before which it stores lengths[r] tokens."""
        n_layers = self.shape.n_layers
        pairs = zip(self.first, lengths, strict=True)
        return [self.method.replan(first, c, self.layer_idx, n_layers) for first, c in pairs]

    def _widest(self, lengths: list[int], ctx: LayerContext) -> list[Plan]:
        """Plans with the longest local window that any step of the answer has, as far as its length is known."""
        if not self.method.replans:
            return self.plans
        last = max(*lengths, self.method.budget.tokens or ctx.cache.expected)
        return [*self.plans, *self.replan([last] * len(lengths))]

    def new_store(self, n_local: int, ctx: LayerContext) -> RetrievalStore:
        """The store to load a prompt, or everything after a new turn, into; by default the method's."""
        return self.method.make_store(n_local, ctx.cache.ledger.move)

    def unpack(self) -> ResidentStore:
        assert self.store is not None
        return cast(ResidentStore, self.store) if self.store.whole else exact_copy(self.store)

    # -- one decode step ----------------------------------------------------------------------------------------------

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        assert self.store is not None
        self.store.append(k, v)
        if self.method.replans or not all(self.dense):
            self.index.append(k, v, self.store.lengths, ctx)
        if self.method.replans and any(self.dense):
            self._index_late(ctx)
        cand, local = self.candidates()
        selection = None
        if cand.everything and self.store.whole:
            out, tokens = self._attend_all(q, ctx)
        else:
            selection = self._select(q, cand, ctx)
            out, tokens = self._attend(q, selection, cand, local, ctx)
        self.index.end_step()
        self._note(selection, tokens, cand, local, ctx)
        return out

    def _index_late(self, ctx: LayerContext) -> None:
        """Build the index of rows that have none, as soon as their plan leaves tokens out."""
        assert self.store is not None
        lengths = self.store.lengths
        plans = self.replan([length - 1 for length in lengths])
        rows = [r for r, plan in enumerate(plans) if self.dense[r] and plan.total < lengths[r] - 1]
        if rows:
            for row, ok in zip(rows, self.index.build_late(lengths, rows, ctx), strict=True):
                self.dense[row] = not ok

    def candidates(self, ahead: bool = False) -> tuple[Candidates, list[int]]:
        """This step's candidates and local windows; the current token is already stored, or (`ahead`) not yet."""
        assert self.store is not None
        sinks, lengths = self.method.n_sink, [length + ahead for length in self.store.lengths]
        if self.method.replans:
            self.plans = self.replan([length - 1 for length in lengths])
        local = [self.index.local(plan, length - 1) for plan, length in zip(self.plans, lengths, strict=True)]
        if self.method.replans:
            local = [min(newest, self.room) for newest in local]
        ends = [max(sinks, length - 1 - newest) for length, newest in zip(lengths, local, strict=True)]
        k = [
            self._to_select(row, end - sinks, newest) for row, (end, newest) in enumerate(zip(ends, local, strict=True))
        ]
        return Candidates(sinks, ends, k, lengths), local

    def _to_select(self, row: int, candidates: int, newest: int) -> int:
        """Tokens to select of a row's candidates beside a local window of `newest` tokens."""
        plan, dense = self.plans[row], self.dense[row]
        if not self.method.replans:
            return candidates if dense else min(plan.k, candidates)
        if dense and newest <= plan.local:  # nothing is left out, or there is no index that could choose
            return candidates
        # what the index adds to the window is part of the budget
        return max(0, min(plan.k + plan.local - newest, candidates))

    def _select(self, q: torch.Tensor, cand: Candidates, ctx: LayerContext) -> Selection | None:
        """The tokens between sinks and local window that this step attends; None if there are none."""
        if max(cand.k) == 0:
            return None
        if cand.everything:
            return cand.select_all(q.device)
        return self.index.select(q, cand, self.shape.h_kv, ctx)

    def _attend(
        self, q: torch.Tensor, selection: Selection | None, cand: Candidates, local: list[int], ctx: LayerContext
    ) -> tuple[torch.Tensor, Tokens]:
        """Attention over [sinks | selected | local window and current token]: (n, 1, h, d), and the mean number of tokens."""
        store = self.store
        assert store is not None
        sinks, newest = min(cand.sinks, max(cand.lengths)), min(max(local) + 1, max(cand.lengths))
        indices = None if selection is None else selection.indices
        weight = None if selection is None else _weights(selection, sinks, newest, q.shape[1])
        out = valid = None
        if indices is not None and weight is None and not _uneven(newest, cand, local):
            out = self.attend_in_place(q, sinks, indices, newest, ctx)
        if out is None:
            valid = _valid(sinks, selection, newest, cand, local, q.device)
            keys, values = store.read(sinks, indices, newest, self.shape.group)
            out = self.attend_chosen(q, keys, values, valid, ctx, weight)
        if selection is not None:
            if store.served is not None:
                self._note_hits(store.served, cand, ctx)
            out = _with_estimate(out, selection)
        if selection is not None and valid is None and selection.padded:
            return out, sinks + newest + (selection.indices >= 0).sum(-1, dtype=torch.float32).mean()
        return out, _mean_tokens(sinks + newest + (0 if indices is None else indices.shape[2]), valid)

    def _attend_all(self, q: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, Tokens]:
        """Attention over everything stored, in place: (n, 1, h, d), and the mean number of tokens."""
        assert self.store is not None
        keys, values = self.store.view()
        lengths = self.store.lengths
        return attend_rows(q, keys, values, lengths, ctx.scaling), sum(lengths) / len(lengths)

    def attend_in_place(
        self, q: torch.Tensor, sinks: int, indices: torch.Tensor, local: int, ctx: LayerContext
    ) -> torch.Tensor | None:
        """Attention of q (n, h, 1, d) over tokens where they are stored, see RetrievalStore: (n, 1, h, d), or None."""
        assert self.store is not None
        return self.store.attend_in_place(q, sinks, indices, local, ctx.scaling)

    def attend_chosen(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        ctx: LayerContext,
        log_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of q (n, h, 1, d) over the tokens that were read, keys and values (n, h_kv or h, m, d): (n, 1, h, d).

        valid (n, 1 or heads of keys, m) bool: None if every entry is a token. log_weight (n, h, m): added to the scaled logits.
        """
        if log_weight is None and valid is None:
            return attend_rows(q, keys, values, [keys.shape[2]] * len(keys), ctx.scaling)
        if log_weight is None:
            return attend_one(q, keys, values, ctx.scaling, valid)
        mask = None if valid is None else per_head(valid, q.shape[1])[:, :, None]
        part = partial(q, keys, values, ctx.scaling, mask, bias=log_weight[:, :, None])
        return part.out.transpose(1, 2).to(q.dtype)

    def _note(
        self, selection: Selection | None, tokens: Tokens, cand: Candidates, local: list[int], ctx: LayerContext
    ) -> None:
        """Report to ledger and observers what this step attended."""
        union = None
        if selection is not None and self.shape.h_kv < selection.indices.shape[1]:
            union = tokens - selection.indices.shape[2] + self._distinct(selection.indices, max(cand.lengths))
        ctx.cache.ledger.attend(self.layer_idx, tokens, selecting=True, union=union)
        if ctx.cache.observers or ctx.cache.watchers:
            self.selected = Selected(cand.sinks, None if selection is None else selection.indices, cand, local)

    @staticmethod
    def _note_hits(served: Served, cand: Candidates, ctx: LayerContext) -> None:
        """Report the cache's hits to the ledger, and the expected hits of as many tokens chosen at random."""
        rows = zip(served.lookups, served.held, cand.ends, strict=True)
        by_chance = sum(lookups * min(1.0, held / max(1, hi - cand.sinks)) for lookups, held, hi in rows)
        ctx.cache.ledger.look_up(sum(served.lookups), sum(served.hits), by_chance)

    def _distinct(self, indices: torch.Tensor, length: int) -> torch.Tensor:
        """Mean number of distinct positions per KV head in indices (n, h, k), where every query head chose its own."""
        n, h_kv = indices.shape[0], self.shape.h_kv
        if kernels.native(indices):
            return kernels.positions.count_distinct(indices, h_kv, length).float().mean()
        marks = torch.zeros((n, h_kv, length + 1), dtype=torch.bool, device=indices.device)
        marks.scatter_(2, (indices + 1).view(n, h_kv, -1), True)  # padding, -1, marks column 0
        return marks[..., 1:].sum(-1, dtype=torch.float32).mean()

    # -- steps done by a substitute (substitute.py) -------------------------------------------------------------------

    def step_parts(self) -> StepParts | None:
        if type(self) is not RetrievalLayer:  # a subclass changes parts of a step: no substitute knows them
            return None
        assert self.store is not None
        if self.method.replans:
            tokens = self.method.budget.tokens
            if tokens is None or min(self.store.lengths) < tokens:
                return None  # the next step has another plan
            self.plans = self.replan(self.store.lengths)
        codes, n_sink = self.index.pq_codes(), self.method.n_sink
        if codes is None or any(self.dense) or min(plan.k for plan in self.plans) < 1:
            return None
        if any(length < n_sink + plan.local for length, plan in zip(self.store.lengths, self.plans, strict=True)):
            return None  # sinks and local window overlap
        return StepParts(self.store, codes, self.plans, n_sink)

    def selection_of(self, indices: torch.Tensor) -> Selected:
        cand, local = self.candidates()
        return Selected(cand.sinks, indices, cand, local)

    # -- the rest of a layer ------------------------------------------------------------------------------------------

    def on_layer_input(self, ctx: LayerContext) -> None:
        self.index.on_layer_input(ctx)

    def on_previous_input(self, ctx: LayerContext) -> None:
        self.index.on_previous_input(ctx)

    def wait(self) -> None:
        super().wait()
        self.index.wait()
        if self.store is not None:
            self.store.wait()

    def map_rows(self, index: torch.Tensor) -> None:
        super().map_rows(index)
        if self.store is not None and self.store is not self.staged:  # else it has just been mapped
            self.store.map_rows(index)
        self.index.map_rows(index)
        rows = index.tolist()
        self.plans = [self.plans[i] for i in rows] if self.plans else []
        self.first = [self.first[i] for i in rows] if self.first else []
        self.dense = [self.dense[i] for i in rows] if self.dense else []

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        tiers: dict[str, list[torch.Tensor]] = {}
        for part in (super().tensors(), {} if self.store is None else self.store.tensors(), self.index.tensors()):
            for tier, tensors in part.items():
                tiers.setdefault(tier, []).extend(tensors)
        return tiers


def _mean_tokens(read: int, valid: torch.Tensor | None) -> Tokens:
    """Tokens attended per query head: of `read` entries those that are `valid` (n, H, m), all if None."""
    return read if valid is None else valid.sum(-1, dtype=torch.float32).mean()


def _uneven(newest: int, cand: Candidates, local: list[int]) -> bool:
    """Whether rows differ in length, window or number of tokens, or sinks and window overlap (in a short row)."""
    lengths = cand.lengths
    ragged = len(set(lengths)) > 1 or len(set(local)) > 1 or len(set(cand.k)) > 1
    return ragged or lengths[0] < cand.sinks + local[0] + 1 or newest != local[0] + 1


def _valid(
    sinks: int, selection: Selection | None, newest: int, cand: Candidates, local: list[int], device: torch.device
) -> torch.Tensor | None:
    """(n, H, m) bool over [first sinks | selected | `newest` last tokens]: False where padding or repeated. None: all True."""
    lengths = cand.lengths
    if not _uneven(newest, cand, local) and (selection is None or not selection.padded):
        return None
    ends = table(lengths, device)[:, None]
    n_local = table(local, device)[:, None]
    n, heads = len(lengths), 1 if selection is None else selection.indices.shape[1]
    first = torch.arange(sinks, device=device)[None] < ends
    position = ends - newest + torch.arange(newest, device=device)[None]
    last = (position >= cand.sinks) & (position >= ends - 1 - n_local)
    parts = [first[:, None].expand(n, heads, -1), last[:, None].expand(n, heads, -1)]
    if selection is not None:
        parts.insert(1, selection.indices >= 0)
    return torch.cat(parts, dim=2)


def _weights(selection: Selection, sinks: int, newest: int, h: int) -> torch.Tensor | None:
    """The selection's log-weights over [sinks | selected | newest], 0 outside the selection: (n, h, m). None if it has none."""
    if selection.log_weight is None:
        return None
    return F.pad(per_head(selection.log_weight, h), (sinks, newest))


def _with_estimate(out: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The output (n, 1, h, d), mixed with the selection's estimate of the tokens left out if it has one."""
    if selection.share is None or selection.mean is None:
        return out
    share = selection.share[:, None, :, None].to(out.dtype)
    mean = per_head(selection.mean, out.shape[2])[:, None].to(out.dtype)
    return share * out + (1 - share) * mean
