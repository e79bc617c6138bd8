"""EvictionLayer: frees what an eviction method drops. Evictor: the choice alone, wherever K and V are stored."""

from __future__ import annotations

import copy
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pqcache.selective.attention import attend_adding, attend_rows, row_mask
from pqcache.selective.budget import Plan, refreshed_to
from pqcache.selective.group import per_head
from pqcache.selective.layer import LayerContext
from pqcache.selective.scorer import Prompt
from pqcache.selective.shape import ModelShape
from pqcache.selective.staged import StagedLayer
from pqcache.selective.substitute import StepParts, Substitute, substitute_for
from pqcache.store.buffer import Buffer, dense, take_tokens
from pqcache.store.drop import drop
from pqcache.store.resident import ResidentStore
from pqcache.store.transfer import send, table

if TYPE_CHECKING:
    from pqcache.selective.eviction import EvictionMethod
    from pqcache.selective.ledger import Ledger


class Evictor:
    """An eviction method's choice in one layer, wherever K and V are stored: which entries stay, and their positions."""

    least = 0  # entries that are kept at least, of those there are

    def __init__(self, method: EvictionMethod, layer_idx: int, shape: ModelShape) -> None:
        self.method, self.layer_idx, self.shape = method, layer_idx, shape
        self.forget()

    def forget(self) -> None:
        """Back to the state before a request."""
        # (n, h_kv, capacity) int32: position of each entry's token in its row. A method that drops no generated tokens stores
        # those of the prompt or turn only: in row r the positions of entries from noted[r] on are consecutive.
        self.positions: Buffer | None = None
        self.noted: list[int] = []  # entries per row whose positions are stored
        self.seen: list[int] = []  # tokens seen per row
        self.kept: list[int] = []  # entries held when the current turn began
        self.plans: list[Plan] = []
        # of a method that ranks again: entries that each layer of a row held when it last ranked, and tokens stored since. Every
        # layer counts for all, so that all rank at the same step.
        self.pool: list[list[int]] = []
        self.grown: list[int] = []
        self.scorer = self.method.make_scorer(self.layer_idx, self.shape)

    def choose(self, k: torch.Tensor, lengths: list[int], ctx: LayerContext) -> tuple[torch.Tensor, list[int]]:
        """A prompt or turn is complete: choose which of all entries k (n, h_kv, >= max(lengths), d) stay.

        Returns what `EvictionMethod.choose_entries` returns. Those are the entries from here on; scorer and positions follow.
        """
        n, h_kv = k.shape[:2]
        is_turn = self.positions is not None
        positions = self._extended_positions(n, h_kv, lengths, ctx)
        self.seen = ctx.step.total
        self.plans = [self.plan_of(s) for s in self.seen]
        if self.method.refreshes:
            self._count_layers(lengths, is_turn)
        scores = self.scorer.head_scores(k, lengths, ctx)
        if is_turn and not self.method.prunes_turns:
            slots, counts = torch.arange(max(lengths), device=k.device).expand(n, h_kv, -1), list(lengths)
        else:
            slots, counts = self.pick(Prompt(k, scores, positions, lengths, self.plans, ctx))  # (n, h_kv, m)
        self._note(positions.gather(-1, slots), counts)
        self.scorer.retain(slots, counts)
        return slots, counts

    def plan_of(self, s: int) -> Plan:
        """The method's plan for `s` tokens in this layer, of `least` tokens at least."""
        plan = self.method.plan(s, self.layer_idx, self.shape.n_layers)
        if plan.total < min(self.least, s):
            return self.method.level(self.least, s, self.layer_idx, self.shape.n_layers)
        return plan

    # -- ranking again in the middle of an answer ---------------------------------------------------------------------

    @property
    def choosing(self) -> range:
        """The layers that are not dense."""
        return range(self.method.dense_layers or 0, self.shape.n_layers)

    def held_now(self, row: int) -> list[int]:
        """Entries that each layer of `choosing` holds."""
        return [held + self.grown[row] for held in self.pool[row]]

    def is_over(self) -> list[bool]:
        """Rows whose layers hold more than the budget, in the mean."""
        if not self.method.refreshes:
            return [False] * len(self.seen)
        return [
            sum(self.held_now(row)) > self.method.allowed(seen) * len(self.choosing)
            for row, seen in enumerate(self.seen)
        ]

    def choose_again(
        self, k: torch.Tensor, lengths: list[int], over: list[bool], ctx: LayerContext
    ) -> tuple[torch.Tensor, list[int]]:
        """Rank what the flagged rows hold, k (n, h_kv, >= max(lengths), d), and choose what stays; see `choose`."""
        plans = [self._lower_plan(r) if flag else Plan(0, 0, lengths[r]) for r, flag in enumerate(over)]
        positions = self._positions(lengths)
        scores = self.scorer.scores_now(k, positions, lengths, self.seen, ctx.scaling)
        slots, counts = self.pick(Prompt(k, scores, positions, lengths, plans, ctx))
        self._note(positions.gather(-1, slots), counts)
        self.scorer.retain(slots, counts)
        return slots, counts

    def _lower_plan(self, row: int) -> Plan:
        """This layer's plan for a row that ranks again. Notes what all layers keep."""
        seen, held, n_layers = self.seen[row], self.held_now(row), self.shape.n_layers
        lower = self.method.at(refreshed_to(self.method.allowed(seen)))
        plans = [lower.plan(seen, layer, n_layers) for layer in self.choosing]
        totals = share_out([plan.total for plan in plans], held)
        plans = [
            replace(plan, k=plan.k + max(0, total - plan.total)) for plan, total in zip(plans, totals, strict=True)
        ]
        self.pool[row] = [self.method.kept(filled, plan) for filled, plan in zip(held, plans, strict=True)]
        self.grown[row] = 0
        return plans[self.choosing.index(self.layer_idx)]

    def _count_layers(self, lengths: list[int], is_turn: bool) -> None:
        """Note what every layer keeps of a prompt, or of what it held and a new turn: lengths[r] entries of row r in this one."""
        pool = []
        for row, (seen, length) in enumerate(zip(self.seen, lengths, strict=True)):
            held = [length] * len(self.choosing)
            if is_turn:
                held = [count + length - self.kept[row] for count in self.held_now(row)]
            plans = [self.method.plan(seen, layer, self.shape.n_layers) for layer in self.choosing]
            pool.append([self.method.kept(filled, plan) for filled, plan in zip(held, plans, strict=True)])
        self.pool, self.grown = pool, [0] * len(pool)

    # -- entries ------------------------------------------------------------------------------------------------------

    def pick(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        """Slots (n, h_kv, m) that stay, in the order in which they will be stored, and how many of them per row."""
        return self.method.choose_entries(prompt)

    def _extended_positions(self, n: int, h_kv: int, lengths: list[int], ctx: LayerContext) -> torch.Tensor:
        """Row positions of all staged entries: those kept before, then the new block's. (n, h_kv, max(lengths)) int32."""
        device = ctx.hidden.device
        if self.positions is None and lengths == ctx.step.total:  # nothing was evicted before, nothing cropped
            return torch.arange(max(lengths), dtype=torch.int32, device=device).expand(n, h_kv, -1)
        out = torch.zeros((n, h_kv, max(lengths)), dtype=torch.int32, device=device)
        if self.positions is not None:
            held = self._positions(self.kept)
            out[:, :, : held.shape[2]] = held
        for row, (length, total) in enumerate(zip(lengths, ctx.step.total, strict=True)):
            before = self.kept[row] if self.positions is not None else 0
            out[row, :, before:length] = torch.arange(total - (length - before), total, device=device)
        return out

    def _positions(self, lengths: list[int]) -> torch.Tensor:
        """Row positions of all entries, lengths[r] of row r: (n, h_kv, max(lengths)) int32; undefined past a row's end."""
        assert self.positions is not None
        longest = max(lengths)
        noted = self.positions.view(min(longest, self.positions.capacity))
        if self.method.is_dynamic or longest <= min(self.noted):
            return noted
        entry = torch.arange(longest, dtype=torch.int32, device=noted.device)
        # generated tokens: position minus entry is the number of tokens that the row dropped
        dropped = [seen - length for seen, length in zip(self.seen, lengths, strict=True)]
        consecutive = entry + send(dropped, torch.int32, noted.device)[:, None, None]
        is_noted = entry < table(self.noted, noted.device)[:, None, None]
        noted = torch.nn.functional.pad(noted, (0, longest - noted.shape[2]))
        return torch.where(is_noted, noted, consecutive)

    def place(self, lengths: list[int], like: torch.Tensor) -> None:
        """One token per row, like (n, h_kv, 1, d), is about to become entry lengths[r]: record its position."""
        if self.method.is_dynamic:  # entries do not stay in order
            assert self.positions is not None
            if len(set(lengths)) == len(set(self.seen)) == 1:  # the same number in the same place: no table to send
                self.positions.reserve(lengths[0] + 1)
                self.positions.data[:, :, lengths[0]] = self.seen[0]
            else:
                position = send(self.seen, torch.int32, like.device)[:, None, None]
                self.positions.write(position.expand(-1, like.shape[1], 1), lengths, [1] * len(self.seen))
        self.seen = [s + 1 for s in self.seen]
        self.grown = [count + 1 for count in self.grown]
        if self.method.replans and self.method.is_dynamic:
            self.plans = [self.plan_of(s) for s in self.seen]

    def where(self, lengths: list[int]) -> torch.Tensor | None:
        """Positions of the entries, lengths[r] of row r: (n, h_kv, max(lengths)), -1 = padding. None before there are any."""
        if self.positions is None:
            return None
        position = self._positions(lengths)
        valid = row_mask(lengths, position.shape[2], position.device)
        return position if valid is None else position.masked_fill(~valid, -1)

    def sort(self, store: ResidentStore) -> None:
        """Sort a store's entries, with their scores, by position."""
        lengths = store.lengths
        position = self._positions(lengths)
        valid = row_mask(lengths, position.shape[2], position.device)
        if valid is not None:
            position = position.masked_fill(~valid, torch.iinfo(torch.int32).max)
        position, order = position.sort(-1)
        store.retain(order, lengths)
        self._note(position, lengths)
        self.scorer.retain(order, lengths)

    def _note(self, positions: torch.Tensor, counts: list[int]) -> None:
        """Record that entries 0 .. counts[r]-1 of row r have the positions `positions` (n, h_kv, m)."""
        self.positions = Buffer.like(positions)
        self.positions.write(positions, [0] * len(counts), [positions.shape[2]] * len(counts))
        self.noted = list(counts)

    def follow_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was."""
        if self.positions is not None:
            self.positions.map_rows(index)
        self.scorer.map_rows(index)
        rows = index.tolist()
        self.seen = [self.seen[i] for i in rows] if self.seen else []
        self.kept = [self.kept[i] for i in rows] if self.kept else []
        self.noted = [self.noted[i] for i in rows] if self.noted else []
        self.plans = [self.plans[i] for i in rows] if self.plans else []
        self.pool = [list(self.pool[i]) for i in rows] if self.pool else []
        self.grown = [self.grown[i] for i in rows] if self.grown else []

    def own_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tier -> tensors kept between steps, K and V apart."""
        tiers = {tier: list(tensors) for tier, tensors in self.scorer.tensors().items()}
        if self.positions is not None:
            tiers.setdefault("device", []).append(self.positions.data)
        return tiers


class Repeated:
    """An attention module whose K and V come once per query head: transformers' kernels repeat them no more."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class EvictionLayer(Evictor, StagedLayer):
    """Keeps `plan.total` tokens per KV head after the prompt; a dynamic method then drops one per generated token.

    Where the method repeats K and V, what is kept has h heads: the prompt is staged as it comes, and repeated when it is settled.
    """

    def __init__(self, layer_idx: int, shape: ModelShape, method: EvictionMethod) -> None:
        self.method = method
        StagedLayer.__init__(self, layer_idx, replace(shape, h_kv=shape.h) if method.repeats_kv else shape)
        self.model_shape = shape

    def clear(self) -> None:
        super().clear()
        self.store = ResidentStore()
        self.forget()

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        if self.method.repeats_kv and self.positions is not None:  # a later turn: what is held has h heads
            k, v, ctx = per_head(k, self.shape.h), per_head(v, self.shape.h), copy.copy(ctx)
            ctx.module = Repeated(ctx.module)  # type: ignore[assignment]
        return super().prefill(q, k, v, mask, ctx)

    def sums_from(self, lengths: list[int]) -> int | None:
        return 0 if self.scorer.needs_sums else None

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        self.scorer.observe(q, keys, stored, ctx)

    def unpack(self) -> ResidentStore:
        self.kept = list(self.store.lengths)
        if self.method.is_dynamic and self.positions is not None:  # drops have shuffled the entries
            self.sort(self.store)
        return self.store

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        if self.method.repeats_kv:
            k, v = per_head(k, self.shape.h), per_head(v, self.shape.h)
        slots, counts = self.choose(k, lengths, ctx)
        self.take_over(k, v, lengths, slots, counts)

    def take_over(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        """Store of all staged entries k, v (n, h_kv, max(lengths), d) those at `slots` (n, h_kv, m), row r's first counts[r]."""
        self.store = kept_of(k, v, slots, counts)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.add(k, v, ctx)
        q, keys, values = self.rotated(q, ctx)
        lengths = self.store.lengths
        if self.method.needs_probs:
            out = attend_adding(q, keys, values, lengths, ctx.scaling, self.scorer.received(lengths))
        else:
            out = attend_rows(q, keys, values, lengths, ctx.scaling)
        ctx.cache.ledger.attend(self.layer_idx, fmean(lengths), selecting=True)
        self.evict_surplus()
        self.refresh(q, ctx)
        return out

    def refresh(self, q: torch.Tensor, ctx: LayerContext) -> None:
        """After a step with queries q (n, h, 1, d): rank again, where the method does and the rows hold too much."""
        if not self.method.refreshes:
            return
        self.scorer.observe_query(q)
        over = self.is_over()
        if any(over):
            entries = self.unpack()
            keys, values = entries.view()
            slots, counts = self.choose_again(keys, entries.lengths, over, ctx)
            self.take_again(keys, values, entries.lengths, slots, counts)

    def take_again(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        """In the middle of an answer, store of all entries those at `slots`; arguments as of `take_over`."""
        self.take_over(k, v, lengths, slots, counts)

    # -- steps that are recorded --------------------------------------------------------------------------------------

    def step_parts(self) -> StepParts | None:
        """An evictor that drops nothing after the prompt attends to all it holds; a subclass may do more."""
        method = self.method
        if type(self) is not EvictionLayer or method.is_dynamic or method.needs_probs or method.repeats_kv:
            return None
        if method.refreshes:  # some steps drop tokens
            return None
        return StepParts(self.store)

    def prepare_capture(self, tokens: int) -> Substitute:
        """tokens: per row as seen by the model, of which the store holds fewer."""
        if self.substitute is None and self.step_parts() is not None:
            self.substitute = substitute_for(self.store.view()[0], self.step_parts)
        dropped = min((seen - held for seen, held in zip(self.seen, self.store.lengths, strict=True)), default=0)
        return super().prepare_capture(tokens - dropped)

    def note_step(self, ledger: Ledger) -> None:
        super().note_step(ledger)
        self.seen = [s + 1 for s in self.seen]

    def add(self, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> None:
        """Store the new token, k and v (n, h_kv, 1, d), with its position."""
        if self.method.repeats_kv:
            k, v = per_head(k, self.shape.h), per_head(v, self.shape.h)
        self.place(self.store.lengths, k)
        self.store.append(k, v)

    def evict_surplus(self) -> None:
        """A dynamic method drops one entry per head in every row that holds more than its capacity."""
        over = [
            self.method.is_dynamic and length > self.method.capacity(plan)
            for length, plan in zip(self.store.lengths, self.plans, strict=True)
        ]
        if any(over):
            assert self.positions is not None
            buffers = [self.positions, *self.scorer.buffers, *self.store.buffers]
            drop(buffers, self.method.victim(self), self.store.lengths, over)
            self.scorer.note_drop(self.store.lengths, over)
            self.store.note_drop(over)

    def rotated(self, q: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, K, V as attention sees them; a method that keeps keys un-rotated overrides this."""
        return q, *self.store.view()

    def held_positions(self) -> torch.Tensor | None:
        return self.where(self.store.lengths)

    def map_rows(self, index: torch.Tensor) -> None:
        super().map_rows(index)
        if self.store is not self.staged:
            self.store.map_rows(index)
        self.follow_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        tiers = {"device": list(super().tensors()["device"])}
        tiers["device"] += self.store.tensors()["device"]
        for tier, tensors in self.own_tensors().items():
            tiers.setdefault(tier, []).extend(tensors)
        return tiers


def share_out(wanted: list[int], held: list[int]) -> list[int]:
    """Tokens that each layer keeps: what it wants, as far as it holds it; the rest of what all want goes to the next ones.

    From the last layer the rest begins anew with the first. The sum is that of `wanted`, or of `held` where that is less.
    """
    kept, rest = [0] * len(held), 0
    for more in (wanted, [0] * len(held)):
        for i, count in enumerate(more):
            goal = kept[i] + count + rest
            kept[i] = min(held[i], goal)
            rest = goal - kept[i]
    return kept


def kept_of(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, counts: list[int]) -> ResidentStore:
    """A store with entries `slots` (n, h_kv, m), row r's first counts[r], of k, v (n, h_kv, t, d)."""
    store = ResidentStore()
    store.load(take_tokens(dense(k), slots), take_tokens(dense(v), slots), counts)
    return store
