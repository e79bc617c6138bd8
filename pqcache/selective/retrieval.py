"""Family: keep every token, pick the ones a query attends to.

A method writes an `Index` (index.py) with build, append and score, and a RetrievalMethod with make_index:

    @dataclass(kw_only=True)
    class MyMethod(RetrievalMethod):
        name: ClassVar[str] = "mymethod"
        rank: int = 8  # each hyper-parameter is a field

        def validate(self) -> None:
            super().validate()
            self.require("rank", self.rank >= 1, "an int >= 1")

        def make_index(self, layer_idx: int, shape: ModelShape) -> MyIndex:
            return MyIndex(self)

RetrievalLayer stores K and V, keeps sinks and local window, masks, gathers, attends and counts. A decode step is its `decode`,
read top to bottom: store the token, find the candidates, select, attend, note.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F

from pqcache.fields import Positive, Share, Whole
from pqcache.selective.attention import Part, attend_one, attend_rows, partial, with_sinks
from pqcache.selective.budget import Plan, partition_plan
from pqcache.selective.group import Reduce, marks, per_head
from pqcache.selective.index import Candidates, Index, Selected, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.method import Method
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.selective.staged import StagedLayer, exact_copy
from pqcache.store.base import RetrievalStore, Served
from pqcache.store.resident import ResidentStore
from pqcache.store.step import StepParts
from pqcache.store.transfer import table

Tokens = float | torch.Tensor  # a mean over rows and heads; a tensor where only the device knows it


@dataclass(kw_only=True)
class RetrievalMethod(Method):
    """Base of retrieval methods: sinks + local window + top-k of an index, over a store. A subclass writes make_index.

    The cache_* options are those of store=block_cache (PQCache, section 3.4).
    """

    kind: ClassVar[str] = "retrieve"
    own_rule: ClassVar[str] = "exact"
    # what compositions read (baselines/combined):
    composable: ClassVar[bool] = True  # its index works in another method's layer, and over another store
    shortens: ClassVar[bool] = True  # its index can select any number of any candidates within a step
    ranks_shortlists: ClassVar[bool] = False  # its index can score some positions without the others (`score_at`)
    shared_reduce: ClassVar[str] = "sum_softmax"  # a `reduce` under which the query heads of a group choose together

    # first tokens, always attended, on top of a budget ratio
    n_sink: Whole = 32
    # share of the budget that is the local window
    recent_ratio: Share = 0.5
    # resident (K and V on the device) | host (sinks and window on the device, the rest fetched) | block_cache (host, with
    # blocks of tokens on the device)
    store: Literal["resident", "host", "block_cache"] = "resident"
    # how the scores of a group's query heads become one ranking: sum_softmax | max_softmax | sum_logit | max_logit | mean_logit
    # | none (every query head has its own)
    reduce: Reduce = "sum_softmax"
    # store=block_cache: tokens per block
    cache_block: Positive = 128
    # store=block_cache: tokens on the device, per layer and row
    cache_tokens: int = 4096
    # store=block_cache: blocks that the policy sees per step, those with the most selected tokens
    cache_topk: Positive = 32
    # store=block_cache: which blocks stay: lru | lfu | none (nothing is cached) | paying (no blocks: rows that a step fetched
    # anyway, by how often they were read, so that nothing is refilled; cache_block and cache_topk have no effect)
    cache_policy: Literal["lru", "lfu", "none", "paying"] = "lru"

    @property
    def estimates_rest(self) -> bool:
        """Whether selections also estimate the tokens they leave out, which needs the weight of every token."""
        return False

    @property
    def slack(self) -> int:
        """Tokens by which its index may select fewer than it was asked for, as the last page is not full."""
        return 0

    @property
    def traceable(self) -> bool:
        return not self.estimates_rest  # else the output is more than attention to the selected tokens

    def validate(self) -> None:
        self.require("cache_tokens", self.cache_tokens >= self.cache_block, f"an int >= cache_block={self.cache_block}")

    def check_budget(self) -> None:
        if self.budget.tokens is not None and self.budget.tokens <= self.n_sink + 1:
            raise NotApplicable(
                f"budget={self.budget.tokens}: {self.name} needs more than {self.n_sink} sinks + 1 token"
            )

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        return partition_plan(self.budget_at(s), s, self.n_sink, self.recent_ratio)

    def make_index(self, layer_idx: int, shape: ModelShape) -> Index:
        """The index of one layer."""
        raise NotImplementedError

    def make_store(self, n_local: int, moved: Callable[[str, int], None]) -> RetrievalStore:
        """Where one layer's K and V live; sinks and the `n_local` newest tokens are attended at every step."""
        if self.store == "resident":
            return ResidentStore()
        # a module is loaded by who uses it
        from pqcache.store.host import HostStore

        if self.store == "host" or self.cache_policy == "none":
            return HostStore(self.n_sink, n_local, moved)
        from pqcache.store.block_cache import BlockCacheStore
        from pqcache.store.row_cache import RowCacheStore

        if self.cache_policy == "paying":
            return RowCacheStore(self.n_sink, n_local, moved, self.cache_tokens)
        slots = self.cache_tokens // self.cache_block
        return BlockCacheStore(self.n_sink, n_local, moved, self.cache_block, slots, self.cache_topk, self.cache_policy)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> RetrievalLayer:
        return RetrievalLayer(layer_idx, shape, self)


class RetrievalLayer(StagedLayer):
    """Keeps everything in a store; at decode attends to sinks, selected tokens, local window and the current token."""

    per_row: ClassVar[tuple[str, ...]] = ("staged", "store", "index", "plans", "first", "dense")
    observes = False  # whether every step is attended by torch, and shown to `observe_step`

    def __init__(self, layer_idx: int, shape: ModelShape, method: RetrievalMethod) -> None:
        self.method, self.replans = method, method.replans
        super().__init__(layer_idx, shape)

    def clear(self) -> None:
        super().clear()
        self.store: RetrievalStore = ResidentStore()  # empty until the prompt ends
        self.index = self.new_index()
        self.plans: list[Plan] = []  # per row: of the prompt, or of the current step where the method plans again
        self.first: list[Plan] = []  # per row, of the prompt
        self.room = 0  # tokens of the local window that the store has at hand
        self.dense: list[bool] = []  # rows that attend everything: no index, or nothing to choose from

    # -- the prompt ---------------------------------------------------------------------------------------------------

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.plans = self.first = self.make_plans(lengths, ctx)
        widest = self.plans
        if self.replans:  # the longest local window of any step of the answer, as far as its length is known
            last = max(*lengths, self.method.budget.tokens or ctx.cache.expected)
            widest = [*self.plans, *self.replan([last] * len(lengths))]
        self.room = max(map(self.index.max_local, widest))
        known, self.store = self.store, self.new_store(1 + self.room, ctx)
        if not self.store.whole:
            self.store.use_lanes(ctx.cache.lanes.on(k.device))
        self.store.expect(ctx.cache.expected)
        if self.store.whole and self.staged is not None:
            self.store = self.staged
        else:
            self.store.load(k, v, lengths, known if known.lengths else None)
        built, replans = [False] * len(lengths), self.replans
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

    def new_store(self, n_local: int, ctx: LayerContext) -> RetrievalStore:
        """The store to load a prompt, or everything after a new turn, into; by default the method's."""
        return self.method.make_store(n_local, ctx.cache.ledger.move)

    def unpack(self) -> ResidentStore:
        return cast(ResidentStore, self.store) if self.store.whole else exact_copy(self.store)

    # -- one decode step ----------------------------------------------------------------------------------------------

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.store.append(k, v)
        if self.replans or not all(self.dense):
            self.index.append(k, v, self.store.lengths, ctx)
        if self.replans and any(self.dense):
            self._index_late(ctx)
        cand, local = self.candidates()
        everything = cand.k == [end - cand.sinks for end in cand.ends]
        selection = None  # the tokens between sinks and local window that this step attends
        if everything and self.store.whole:
            keys, values = self.store.view()
            out = attend_rows(q, keys, values, cand.lengths, ctx.scaling)
            tokens: Tokens = sum(cand.lengths) / len(cand.lengths)
        else:
            if everything and max(cand.k):
                selection = cand.select_all(q.device)
            elif max(cand.k) or self.method.estimates_rest:  # an estimate counts where nothing is chosen, too
                selection = self.index.select(q, cand, self.shape.h_kv, ctx)
            out, tokens = self._attend(q, selection, cand, local, ctx)
        if self.index.ahead:
            self.index.end_step()
        self._note(selection, tokens, cand, local, ctx)
        return out

    def _index_late(self, ctx: LayerContext) -> None:
        """Build the index of rows that have none, as soon as their plan leaves tokens out."""
        lengths = self.store.lengths
        plans = self.replan([length - 1 for length in lengths])
        rows = [r for r, plan in enumerate(plans) if self.dense[r] and plan.total < lengths[r] - 1]
        if rows:
            for row, ok in zip(rows, self.index.build_late(lengths, rows, ctx), strict=True):
                self.dense[row] = not ok

    def candidates(self, ahead: bool = False) -> tuple[Candidates, list[int]]:
        """This step's candidates and local windows; the current token is already stored, or (`ahead`) not yet."""
        sinks, lengths = self.method.n_sink, [length + ahead for length in self.store.lengths]
        if self.replans:
            self.plans = self.replan([length - 1 for length in lengths])
        local, ends, k = [], [], []
        for plan, length, dense in zip(self.plans, lengths, self.dense, strict=True):
            newest = self.index.local(plan, length - 1) if self.index.lags else plan.local
            if self.replans and newest > self.room:  # an answer longer than was expected, or a later turn's
                self.room = newest
                self.store.widen(1 + newest)
            end = max(sinks, length - 1 - newest)
            count = end - sinks
            if self.replans and not (dense and newest <= plan.local):
                # what the index adds to the window is in the budget
                count = max(0, min(plan.k + plan.local - newest, count))
            elif not dense:  # else nothing is left out, or there is no index that could choose
                count = min(plan.k, count)
            local.append(newest)
            ends.append(end)
            k.append(count)
        return Candidates(sinks, ends, k, lengths), local

    def _attend(
        self, q: torch.Tensor, selection: Selection | None, cand: Candidates, local: list[int], ctx: LayerContext
    ) -> tuple[torch.Tensor, Tokens]:
        """Attention over [sinks | selected | local window and current token]: (n, 1, h, d), and the mean number of tokens."""
        store, lengths, longest = self.store, cand.lengths, max(cand.lengths)
        sinks, newest = min(cand.sinks, longest), min(max(local) + 1, longest)
        # rows differ, or sinks and window overlap (in a short row)
        uneven = len(set(lengths)) > 1 or len(set(local)) > 1 or len(set(cand.k)) > 1
        uneven = uneven or longest < cand.sinks + local[0] + 1 or newest != local[0] + 1
        out: torch.Tensor
        indices = weight = part = valid = None
        estimates = self.observes
        if selection is not None:
            indices, estimates = selection.indices, estimates or selection.estimates or selection.share is not None
            if selection.log_weight is not None:
                weight = per_head(selection.log_weight, q.shape[1])
            if not uneven:
                found = store.attend_in_place(q, sinks, indices, newest, ctx.scaling, weight)
                part = None if found is None else Part(*found)
        if part is None:
            if uneven or (selection is not None and selection.padded):
                valid = _valid(sinks, indices, newest, cand, local, q.device)
            keys, values = store.read(sinks, indices, newest, self.shape.group)  # (n, h_kv or h, m, d)
            plain = weight is None and not estimates
            if plain and valid is None:
                out = attend_rows(q, keys, values, [keys.shape[2]] * len(keys), ctx.scaling)
            elif plain:
                out = attend_one(q, keys, values, ctx.scaling, valid)
            else:
                mask = None if valid is None else per_head(valid, q.shape[1])[:, :, None]
                bias = None if weight is None else F.pad(weight, (sinks, newest))[:, :, None]  # 0 outside the selection
                part = partial(q, keys, values, ctx.scaling, mask, bias=bias)
                self.observe_step(q, with_sinks(part, ctx.scaling).lse, ctx)
        if part is not None:
            if estimates and selection is not None:
                part = selection.with_rest(part)
            part = part if type(ctx.scaling) is float else with_sinks(part, ctx.scaling)
            out = part.out.transpose(1, 2).to(q.dtype)
        tokens: Tokens = sinks + newest
        if valid is not None:
            tokens = valid.sum(-1, dtype=torch.float32).mean()
        elif selection is not None and selection.padded:
            tokens = tokens + (selection.indices >= 0).sum(-1, dtype=torch.float32).mean()
        elif selection is not None:
            tokens += selection.indices.shape[2]
        if selection is not None and store.served is not None:
            self._note_hits(store.served, cand, ctx)
        return out, tokens

    def observe_step(self, q: torch.Tensor, lse: torch.Tensor, ctx: LayerContext) -> None:
        """A step attended to the tokens that it read, lse (n, h, 1) over them. Called of every step where `observes`."""

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
        chosen = marks(indices.reshape(len(indices), self.shape.h_kv, -1), length)
        return chosen.sum(-1, dtype=torch.float32).mean()

    # -- steps done by a substitute (store/step.py) -------------------------------------------------------------------

    def step_parts(self) -> StepParts | None:
        if type(self) is not RetrievalLayer:  # a subclass changes parts of a step: no substitute knows them
            return None
        if self.replans:
            tokens = self.method.budget.tokens
            if tokens is None or min(self.store.lengths) < tokens:
                return None  # the next step has another plan
            self.plans = self.replan(self.store.lengths)
        codes, n_sink = self.index.pq_codes(), self.method.n_sink
        if codes is None or any(self.dense) or min(plan.k for plan in self.plans) < 1:
            return None
        if any(length < n_sink + plan.local for length, plan in zip(self.store.lengths, self.plans, strict=True)):
            return None  # sinks and local window overlap
        plans = self.plans
        return StepParts(cast(ResidentStore, self.store), codes, [p.k for p in plans], [p.local for p in plans], n_sink)

    # -- the rest of a layer ------------------------------------------------------------------------------------------

    def wait(self) -> None:
        self.index.wait()
        if not self.store.whole:
            self.store.wait()


def _valid(
    sinks: int, indices: torch.Tensor | None, newest: int, cand: Candidates, local: list[int], device: torch.device
) -> torch.Tensor:
    """(n, H, m) bool over [first sinks | selected `indices` | `newest` last tokens]: False where padding or repeated."""
    ends, n_local = table(cand.lengths, device)[:, None], table(local, device)[:, None]
    n, heads = len(local), 1 if indices is None else indices.shape[1]
    first = torch.arange(sinks, device=device)[None] < ends
    position = ends - newest + torch.arange(newest, device=device)[None]
    last = (position >= cand.sinks) & (position >= ends - 1 - n_local)
    parts = [first[:, None].expand(n, heads, -1), last[:, None].expand(n, heads, -1)]
    if indices is not None:
        parts.insert(1, indices >= 0)
    return torch.cat(parts, dim=2)
