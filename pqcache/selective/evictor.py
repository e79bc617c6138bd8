"""Which tokens stay: an eviction method's policy, and its choices in one layer.

`eviction.py` frees the memory of what is dropped; compositions apply the same choices to other stores (baselines/combined).
"""

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from pqcache.selective.attention import row_mask
from pqcache.selective.budget import Allowance, Plan, refreshed_to
from pqcache.selective.group import top_tokens
from pqcache.selective.layer import LayerContext
from pqcache.selective.method import Method
from pqcache.selective.scorer import Prompt, Scorer
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.buffer import Buffer
from pqcache.store.resident import ResidentStore
from pqcache.store.row_state import RowState
from pqcache.store.transfer import send, table


@dataclass(kw_only=True)
class EvictionPolicy(Method):
    """What an eviction method decides, wherever K and V are stored: how many tokens stay, and which."""

    kind: ClassVar[str] = "evict"
    # what compositions read (baselines/kvcrush.py, baselines/combined):
    composable: ClassVar[bool] = True  # its choice works in another method's layer
    ragged: ClassVar[bool] = False  # KV heads keep different numbers of tokens
    ranks_by_scores: ClassVar[bool] = True  # `ranking` of its head scores alone decides which candidates stay
    static_options: ClassVar[dict[str, Any]] = {}  # hyper-parameters under which it prunes once, after the prompt

    @property
    def fixed_local(self) -> bool:
        """Whether its local window is a number of tokens; else it is a share of the budget."""
        return True

    @property
    def repeats_kv(self) -> bool:
        """Whether K and V are stored once per query head, so that every query head keeps tokens of its own."""
        return bool(getattr(self, "repeat_kv", False))

    @property
    def prunes_turns(self) -> bool:
        """Whether the end of a later turn prunes again; else its tokens are added to what is held."""
        return True

    def window(self, total: int) -> int:
        """Tokens of the local window where `total` tokens beside the sinks are kept. Asked where `fixed_local` is false."""
        raise NotImplementedError

    @property
    def is_dynamic(self) -> bool:
        """Whether decode steps evict, too: unless `mode` is static or there is none."""
        return getattr(self, "mode", "static") != "static"

    @property
    def keeps_rule(self) -> bool:
        return self.is_dynamic or not hasattr(self, "mode")

    @property
    def needs_probs(self) -> bool:
        """Whether the scorer uses each decode step's attention probabilities."""
        return self.is_dynamic and self.ranks_by_steps and not self.budget.is_everything

    @property
    def ranks_by_steps(self) -> bool:
        """Whether ranking again in the middle of an answer takes the attention probabilities of its steps."""
        return False

    @property
    def refreshes(self) -> bool:
        """Whether it ranks what it holds again during the answer, whenever that is more than the budget."""
        return self.replans and self.aligned_rule in ("refreshed", "pooled")

    def allowed(self, c: int) -> int:
        """Tokens that a layer may hold after `c` tokens, where `refreshes`; the mean of layers that differ."""
        return self.budget.tokens if self.budget.tokens is not None else self.plan(c, 0, 1).total

    def kept(self, filled: int, plan: Plan) -> int:
        """How many of `filled` entries `choose_entries` keeps."""
        return min(filled, plan.total)

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        """What accumulates importance in one layer."""
        return Scorer()

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        """Tokens kept of a prompt (or prompt + turns) of `s` tokens."""
        raise NotImplementedError

    def check_budget(self) -> None:
        self.require_room(self.hyper_parameters().get("recent") or 0)

    def require_room(self, window: int) -> None:
        """Raise NotApplicable for a token budget that sinks and local window use up."""
        sinks = self.hyper_parameters().get("n_sink") or 0
        if self.budget.tokens is not None and self.budget.tokens <= sinks + window:
            also = f" and its window of {window}" if window else ""
            raise NotApplicable(
                f"budget={self.budget.tokens}: {self.name} needs more tokens than its {sinks} sinks{also}"
            )

    def at(self, tokens: int) -> Self:
        """This method with a budget of `tokens`, however few: for plans alone."""
        other = copy.copy(self)
        other.__dict__.pop("replans", None)
        other.budget = Allowance(tokens=tokens)
        return other

    def level(self, tokens: int, s: int, layer_idx: int, n_layers: int) -> Plan:
        """A plan of `tokens` tokens in this very layer, whatever the others keep."""
        return self.at(tokens).plan(s, layer_idx, n_layers)

    def published_ratio(self, tokens: int, shape: ModelShape) -> float | None:
        """Prompt tokens over tokens kept (mean of the layers that drop some), as papers count eviction."""
        layers = range(self.dense_layers or 0, shape.n_layers)
        kept = [self.plan(tokens, i, shape.n_layers).total for i in layers]
        return tokens * len(kept) / sum(kept) if kept and sum(kept) else None

    def smooth(self, scores: torch.Tensor, hi: int) -> torch.Tensor:
        """One row's scores (heads, entries), smoothed for ranking. The local window begins at entry `hi`. Default: no change."""
        return scores

    def ranking(self, scores: torch.Tensor, h_kv: int, hi: int) -> torch.Tensor:
        """One row's scores per query head (h, entries) -> (h_kv, entries): the mean of each group, then `smooth`."""
        return self.smooth(scores.unflatten(0, (h_kv, -1)).mean(1), hi)

    def choose_entries(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        """Which entries stay: slots (n, h_kv, m) ascending, and how many of them per row (the rest of a row is padding).

        Default: sinks and local window by position, then the `k` best of `ranking`; ties go to the earlier token. A row that
        fits its plan keeps everything.
        """
        scores, positions, lengths, plans = prompt.scores, prompt.positions, prompt.lengths, prompt.plans
        h_kv = positions.shape[1]
        rows = []
        for row, (filled, plan) in enumerate(zip(lengths, plans, strict=True)):
            slot = torch.arange(filled, device=positions.device).expand(h_kv, -1)
            if filled <= plan.total:
                rows.append(slot)
                continue
            hi = filled - plan.local  # candidates are the entries between sinks and window
            kept = [slot[:, : plan.sinks], slot[:, hi:]]
            if plan.k > 0:
                if scores is None:
                    raise ValueError(
                        f"{self.name} plans {plan.k} ranked tokens, but no head_scores of a scorer ranks them"
                    )
                weight = self.ranking(scores[row, :, :filled], h_kv, hi)[:, plan.sinks : hi]
                kept.insert(1, top_tokens(weight[None], [plan.k])[0] + plan.sinks)
            rows.append(torch.cat(kept, dim=-1))
        return join_rows(rows)


def join_rows(rows: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """What `choose_entries` returns, from each row's slots (h_kv, m), ascending."""
    counts = [r.shape[-1] for r in rows]
    if len(rows) == 1:
        return rows[0][None], counts
    slots = rows[0].new_zeros((len(rows), rows[0].shape[0], max(counts)))
    for row, r in enumerate(rows):
        slots[row, :, : r.shape[-1]] = r
    return slots, counts


class Evictor(RowState):
    """An eviction method's choice in one layer, wherever K and V are stored: which entries stay, and their positions."""

    per_row: ClassVar[tuple[str, ...]] = ("scorer", "seen", "kept", "noted", "plans", "pool", "grown", "positions")
    least = 0  # entries that are kept at least, of those there are

    def __init__(self, method: EvictionPolicy, layer_idx: int, shape: ModelShape) -> None:
        self.method, self.layer_idx, self.shape = method, layer_idx, shape
        self.forget()

    def forget(self) -> None:
        """Back to the state before a request."""
        # (n, h_kv, capacity) int32: position of each entry's token in its row. A method that drops no generated tokens stores
        # those of the prompt or turn only: in row r the positions of entries from noted[r] on are consecutive.
        self.positions: Buffer = None  # type: ignore[assignment]
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
        wanted = n, h_kv * (self.shape.h // self.shape.h_kv), max(lengths)
        if scores is not None and (scores.shape[:2] != wanted[:2] or scores.shape[2] < wanted[2]):
            name = type(self.scorer).__name__
            raise ValueError(f"{name}.head_scores: {tuple(scores.shape)}, expected {wanted}: row, query head, entry")
        if is_turn and not self.method.prunes_turns:
            slots, counts = torch.arange(max(lengths), device=k.device).expand(n, h_kv, -1), list(lengths)
        else:
            slots, counts = self.pick(Prompt(k, scores, positions, lengths, self.plans, ctx))  # (n, h_kv, m)
        return self._keep(positions, slots, counts)

    def _keep(
        self, positions: torch.Tensor, slots: torch.Tensor, counts: list[int]
    ) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
        """Those in `slots` are the entries from here on."""
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
        return self._keep(positions, *self.pick(Prompt(k, scores, positions, lengths, plans, ctx)))

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
