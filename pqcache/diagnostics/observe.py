"""Measures of every layer, head and step of a running request.

    measures = Measures()
    generate(model, method, ids, max_new_tokens=64, watchers=[measures])
    arrays = measures.arrays()          # name -> (layers, rows, h, steps)
    summarize([arrays])                 # means, 5th percentile, by layer

Truth is full attention of the run's own queries over every token seen so far. It is read from the layer's own store where that
holds all K and V exactly and on the device. Else an exact copy is stored beside it, since what is offloaded, evicted or packed
cannot show what was lost; this doubles the memory of the cache. Neither is counted in the layer's bytes.
"""

from typing import Any

import torch
import torch.nn.functional as F

from pqcache.diagnostics import measures as m
from pqcache.selective.attention import row_mask
from pqcache.selective.dense import DenseLayer
from pqcache.selective.group import group_reduce, per_head
from pqcache.selective.index import Selected
from pqcache.selective.layer import LayerContext, SelectiveLayer, WatchedCall, Watcher
from pqcache.selective.retrieval import RetrievalLayer
from pqcache.store.resident import ResidentStore
from pqcache.store.row_state import RowState, map_state

# Array -> its meaning, per layer, row, query head and step; NaN where it is not defined.
ARRAYS = {
    "recall_q": "share of the query head's own top tokens among the candidates that was selected",
    "recall_kv": "the same against the exact oracle's top tokens of the KV head",
    "recall_budget": "the same over the whole prompt, sinks and window included (ClusterKV's definition)",
    "hit_top10": "share of the 10 heaviest past tokens that was attended (Quest's definition)",
    "selected": "tokens selected among the candidates",
    "candidates": "tokens it could choose from",
    "attended": "tokens attended, the current one included",
    "mass": "softmax weight of what was attended, under full attention",
    "lost": "1 - mass, without its rounding",
    "set_error": "|o - o_S|: full attention's output against exact attention to the attended set",
    "bound": "2 (1 - mass) max|v|, which set_error cannot exceed",
    "output_error": "|o - out| / |o| of the layer's real output, whatever the method does to keys, values and weights",
    "top_stay": "share of the prompt's 64 heaviest tokens at the first step that still are",
}
# ClusterKV's Figure 3b: tokens per page, and how many pages of each head are shown.
PAGE = 16
PAGES = 12
# Tokens that top_stay follows, and that hit_top10 counts.
TOP_STAY = 64
TOP_HIT = 10


class Shadow(RowState):
    """All K and V of one layer, exactly: of its store if that has them, else of a copy."""

    per_row = ("copy",)

    def __init__(self) -> None:
        self.copy: ResidentStore | None = None

    def add(self, call: WatchedCall) -> None:
        """One block, after the layer has stored it."""
        step = call.ctx.step
        if self.store_of(call.layer, step.total) is not None:
            self.copy = None
            return
        if self.copy is None:
            self.copy = ResidentStore()
            if not step.first:
                raise RuntimeError("a watcher has to see a request from its first token on")
        elif self.copy.lengths != step.past:
            raise RuntimeError("a watcher has missed tokens of this request")
        self.copy.append(call.k, call.v, step.counts)

    def view(self, layer: SelectiveLayer, total: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, h_kv, m, d), m = max(total)."""
        store = self.copy or self.store_of(layer, total)
        assert store is not None
        return store.view()

    @staticmethod
    def store_of(layer: SelectiveLayer, total: list[int]) -> ResidentStore | None:
        """The layer's own store if it holds every token unchanged, else None. Families that change keys never do."""
        if not isinstance(layer, RetrievalLayer | DenseLayer) or layer.held_positions() is not None:
            return None
        store = layer.store
        return store if type(store) is ResidentStore and store.lengths == total else None


class Measures(Watcher):
    """Collects ARRAYS, and ranks of a few tokens, for the first `max_steps` decode steps of one request.

    tracked: how many prompt tokens, evenly spaced, are followed through the ranking (ClusterKV, Figure 3a).
    """

    def __init__(self, max_steps: int = 1024, tracked: int = 8) -> None:
        self.max_steps, self.tracked = max_steps, tracked
        self.shadows: dict[int, Shadow] = {}
        self.held: dict[int, torch.Tensor | None] = {}  # what each layer kept when its last call ended
        self.prompt: list[int] = []  # tokens before the first decode step
        self.positions: torch.Tensor = None  # type: ignore[assignment]  # (n, tracked) positions that are followed
        self.first_top: dict[int, torch.Tensor] = {}  # (n, h, m) the prompt's heaviest tokens at the first step
        self.measured: dict[int, list[dict[str, torch.Tensor]]] = {}  # layer -> per step, name -> (n, h)
        self.ranks: dict[int, list[torch.Tensor]] = {}  # layer -> per step (n, h, tracked)
        # layer -> the prompt's heaviest pages at the first step (n, h, PAGES), and their tokens' weights (n, h, PAGES, PAGE)
        self.pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(self, call: WatchedCall) -> None:
        layer, ctx = call.layer, call.ctx
        at = layer.layer_idx
        if len(self.measured.get(at, ())) >= self.max_steps:
            return
        shadow = self.shadows.setdefault(at, Shadow())
        shadow.add(call)
        if ctx.step.decode:
            self._measure(call, shadow.view(layer, ctx.step.total))
        # Some methods drop tokens of all layers when the last one has the prompt.
        last = not ctx.step.decode and layer is ctx.cache.served[-1]
        for one in ctx.cache.served if last else [layer]:
            kept = one.held_positions()
            self.held[one.layer_idx] = None if kept is None else kept.clone()
        if len(self.measured.get(at, ())) >= self.max_steps:
            shadow.copy = None

    def _measure(self, call: WatchedCall, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Everything about one decode step of one layer; kv (n, h_kv, m, d): exact K and V of all tokens."""
        layer, q, ctx, (k, v) = call.layer, call.q, call.ctx, kv
        at, lengths = layer.layer_idx, ctx.step.total
        n, h, _, _ = q.shape
        h_kv, length = k.shape[1], max(lengths)
        if not self.prompt:
            self.prompt = list(ctx.step.past)
        column = torch.arange(length, device=q.device)[None, None]
        ends = torch.tensor(lengths, device=q.device)[:, None, None]
        past = (column < ends - 1).expand(n, 1, -1)
        prompt = column < torch.tensor(self.prompt, device=q.device)[:, None, None]
        stored = row_mask(lengths, length, q.device)
        logits = m.exact_logits(q, k, ctx.scaling)
        order = m.heaviest(logits if stored is None else logits.masked_fill(~stored, -torch.inf))

        here: dict[str, torch.Tensor] = {}
        attended, choice = self._attended(layer, h, length, ctx)
        if attended is not None:
            here["attended"] = attended.sum(-1).float()
            full, here["lost"], here["set_error"], here["bound"] = m.output(logits, v, stored, attended)
            here["mass"] = 1 - here["lost"]
            if choice is not None:
                chosen, inside = choice
                here["selected"] = chosen.sum(-1).float()
                here["candidates"] = inside.sum(-1).float().expand(n, h)
                here["recall_q"] = m.recall(order, inside, chosen)
                weights = per_head(m.heaviest(group_reduce(logits, h_kv, "sum_softmax", stored)), h)
                here["recall_kv"] = m.recall(weights, inside, chosen)
            here["recall_budget"] = m.recall(order, prompt, attended)
            here["hit_top10"] = m.recall(order, past, attended, TOP_HIT)
        else:
            everything = torch.ones((n, h, length), dtype=torch.bool, device=q.device)
            full = m.output(logits, v, stored, everything).full
        real = call.out[:, 0].float()
        here["output_error"] = (real - full).norm(dim=-1) / full.norm(dim=-1)
        self._follow(at, logits, order, prompt, here)
        self.measured.setdefault(at, []).append(here)

    def _follow(
        self, at: int, logits: torch.Tensor, order: torch.Tensor, prompt: torch.Tensor, here: dict[str, torch.Tensor]
    ) -> None:
        """Ranks of the tracked tokens, and the share of the first step's heaviest tokens that still are."""
        if self.positions is None:
            # Neither the first token nor the last.
            share = torch.linspace(0, 1, self.tracked + 2)[1:-1]
            self.positions = torch.stack([(share * (s - 1)).round().long() for s in self.prompt]).to(logits.device)
        self.ranks.setdefault(at, []).append(m.ranks(logits, prompt, self.positions.to(logits.device)).int())
        first = self.first_top.get(at)
        if first is None:
            inside = prompt.expand(order.shape).gather(2, order)
            top = inside & (inside.cumsum(-1) <= TOP_STAY)
            self.first_top[at] = first = torch.zeros_like(top).scatter_(2, order, top)
            probs = logits.masked_fill(~prompt, -torch.inf).softmax(-1)
            self.pages[at] = m.heavy_pages(probs, PAGE, PAGES)
        grown = torch.zeros_like(order, dtype=torch.bool)
        grown[..., : first.shape[2]] = first
        here["top_stay"] = m.recall(order, prompt, grown, TOP_STAY)

    def _attended(
        self, layer: SelectiveLayer, h: int, length: int, ctx: LayerContext
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """The set that this step attended, (n, h, length), and (chosen, candidates) if it selected.

        None for the set if the layer does not report what it attends.
        """
        n, device = len(ctx.step.total), ctx.hidden.device
        selected: Any = layer.selected
        now = isinstance(selected, Selected) or layer.drops_first
        kept = layer.held_positions() if now else self.held.get(layer.layer_idx)
        if isinstance(selected, Selected):
            chosen, inside, forced = _sets(selected, h, device)
            # Positions are those of the entries that are left, not of the row.
            if kept is not None:
                chosen, inside, forced = (_place(x, kept, h, length) for x in (chosen, inside, forced))
            chosen, inside, forced = (F.pad(x, (0, length - x.shape[2])) for x in (chosen, inside, forced))
            return chosen | forced, (chosen, inside)
        column = torch.arange(length, device=device)
        ends = torch.tensor(ctx.step.total, device=device)[:, None, None]
        # What was held before this step, less what it dropped first, and the current token.
        if kept is not None:
            return per_head(m.marks(kept, length), h) | (column == ends - 1), None
        if layer.attends_all:
            return (column < ends).expand(n, h, -1), None
        return None, None

    def map_rows(self, index: torch.Tensor) -> None:
        map_state(self, ("shadows", "pages", "held", "first_top", "prompt", "positions"), index)

    def arrays(self) -> dict[str, torch.Tensor]:
        """ARRAYS as (layers, n, h, steps) fp32 on the CPU; "ranks" (layers, n, h, steps, tracked) and "positions" (n, tracked);
        "pages" (layers, n, h, PAGES) and "page_weights" (layers, n, h, PAGES, PAGE) of the first step.

        Empty if there was no decode step.
        """
        if not self.measured:
            return {}
        layers = sorted(self.measured)
        # each layer's on its own device until here
        out = {name: torch.stack([self._steps(at, name).cpu() for at in layers]) for name in ARRAYS}
        out["ranks"] = torch.stack([torch.stack(self.ranks[at], 2).cpu() for at in layers])
        out["positions"] = self.positions.int().cpu()
        out["pages"] = torch.stack([self.pages[at][0].int().cpu() for at in layers])
        out["page_weights"] = torch.stack([self.pages[at][1].float().cpu() for at in layers])
        return out

    def _steps(self, at: int, name: str) -> torch.Tensor:
        """One of ARRAYS of a layer, (n, h, steps); NaN where a step has none."""
        nothing = torch.full_like(self.measured[at][0]["output_error"], torch.nan)
        return torch.stack([step.get(name, nothing) for step in self.measured[at]], -1)


def _sets(selected: Selected, h: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step's choice as sets over what the store holds: chosen (n, h, m), candidates (n, 1, m), always attended (n, 1, m)."""
    cand = selected.candidates
    column = torch.arange(max(cand.lengths), device=device)
    stored = column < torch.tensor(cand.lengths, device=device)[:, None, None]
    inside = (column >= cand.sinks) & (column < torch.tensor(cand.ends, device=device)[:, None, None]) & stored
    # Without indices all candidates are selected, or none.
    if selected.indices is None:
        whole = [k == hi - cand.sinks for k, hi in zip(cand.k, cand.ends, strict=True)]
        chosen = inside & torch.tensor(whole, device=device)[:, None, None]
    else:
        chosen = m.marks(selected.indices, max(cand.lengths)) & inside
    return per_head(chosen, h), inside, stored & ~inside


def _place(x: torch.Tensor, positions: torch.Tensor, h: int, length: int) -> torch.Tensor:
    """A set over entries, (n, 1 or h, entries), as a set over the positions (n, h_kv, entries) they stand for."""
    at = per_head(positions, h)
    chosen = x[..., : at.shape[2]].expand(-1, h, -1)
    return m.marks(torch.where(chosen, at, -1), length)
