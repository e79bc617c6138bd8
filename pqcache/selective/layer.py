"""SelectiveLayer: one transformer layer's cache, which owns attention in all phases; and DenseLayer, which keeps all.

A forward pass reaches a layer twice: transformers calls `update` with the new keys and values, then the attention function
calls `attend` with the queries. Everything happens in `attend`; `update` only remembers that it ran.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from pqcache.selective.attention import attend_one, causal_mask
from pqcache.selective.shape import NotApplicable
from pqcache.selective.substitute import StepParts, Substitute, substitute_for
from pqcache.selective.support import standard_probabilities, weighted_values
from pqcache.store.base import Store
from pqcache.store.resident import ResidentStore

if TYPE_CHECKING:
    from pqcache.selective.cache import SelectiveCache
    from pqcache.selective.ledger import Ledger
    from pqcache.selective.shape import ModelShape


@dataclass(frozen=True)
class Step:
    """One forward pass, the same for every layer. Lists have one entry per row and count real tokens, never padding."""

    decode: bool  # one new token per row after the prompt
    t: int  # columns of this block
    past: list[int]  # tokens seen before
    counts: list[int]  # real tokens in this block: each row's last counts[r] columns
    final: list[int]  # tokens seen when the current prompt or turn will have ended
    ends_prompt: bool  # the block holds the last token of the prompt, or of a new turn
    first: bool  # nothing was seen before
    masks: dict = field(default_factory=dict)  # causal masks of this pass, shared by its layers

    @property
    def total(self) -> list[int]:
        return [a + b for a, b in zip(self.past, self.counts, strict=True)]

    @property
    def padded(self) -> bool:
        """Some row has padding in this block, or rows differ in length."""
        return len(set(self.past)) > 1 or set(self.counts) != {self.t}


@dataclass
class LayerContext:
    """What the attention module knew when it was called; filled by the forward pre-hook."""

    layer_idx: int
    module: nn.Module
    cache: SelectiveCache
    hidden: torch.Tensor  # (n, t, D), after the layer's input norm
    cos: torch.Tensor  # (1 or n, t, rotary)
    sin: torch.Tensor
    position_ids: torch.Tensor | None  # (1 or n, t)
    modules: list[nn.Module]  # the attention modules of all layers, for speculation one layer ahead
    rotary: nn.Module  # the model's rotary embedding: cos, sin for other positions
    step: Step  # what this forward pass is
    last_only: bool = False  # the last layer of a pass for the last token's logits: no other row is used
    scaling: float = field(init=False)  # set by the attention function
    probs: torch.Tensor | None = (
        None  # attn=standard: a whole prompt's probabilities (n, h, t, t), while it is observed
    )


@dataclass(frozen=True)
class WatchedCall:
    """One call of a layer's attention, and its result."""

    layer: SelectiveLayer  # after the call; `layer.selected` is what a decode step chose
    q: torch.Tensor  # (n, h, t, d)
    k: torch.Tensor  # (n, h_kv, t, d) of the new block
    v: torch.Tensor
    out: torch.Tensor  # (n, t, h, d)
    ctx: LayerContext  # `ctx.step` says which phase it was


class Watcher:
    """Sees every attention of every layer and changes nothing: for diagnostics. Put it into `cache.watchers`."""

    def watch(self, call: WatchedCall) -> None:
        """Called after each `attend`."""

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i became what row index[i] was."""


class SelectiveLayer(CacheLayerMixin):
    """Base of all layers. A family writes `prefill`, `finish_prompt` and `decode`; most start from StagedLayer."""

    is_sliding = False
    is_croppable = False
    attends_all = False  # decode attends every token seen, exactly or not: dense layers, quantization
    offers_steps = False  # a substitute may do any decode step; else only those that are to be recorded
    substitute: Substitute | None = None  # does this layer's decode steps, and has its store meanwhile

    def __init__(self, layer_idx: int, shape: ModelShape) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.shape = shape
        self.columns = 0  # columns seen, padding included: what transformers calls the sequence length
        self.owner: weakref.ref[SelectiveCache] | None = (
            None  # set by the cache; weak, so that a dropped cache is freed at once
        )
        self.selected: Any = None  # what the current decode step chose, for observers; retrieval.Selected, or None

    # -- what a family writes ---------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the request: back to the state after __init__."""
        raise NotImplementedError

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        """Attention of a block of the prompt or of a new turn, and storage of its K and V.

        q (n, h, t, d), k and v (n, h_kv, t, d), mask (n, 1, t, columns) bool or None. Returns (n, t, h, d).
        """
        raise NotImplementedError

    def finish_prompt(self, ctx: LayerContext) -> None:
        """The prompt (or a new turn) is complete: evict, build the index, pack."""

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """One new token per row: q (n, h, 1, d), k and v (n, h_kv, 1, d). Returns (n, 1, h, d)."""
        raise NotImplementedError

    def check_step(self, step: Step) -> None:
        """Called before any layer has seen a forward pass: raise ValueError if it cannot be served right."""

    def on_layer_input(self, ctx: LayerContext) -> None:
        """Called before this layer's projections run: the place to start a prefetch."""

    def on_previous_input(self, ctx: LayerContext) -> None:
        """The same moment of the layer before, whose context this is: the place to speculate one layer ahead."""

    def wait(self) -> None:
        """Let everything that runs beside the model (copies, index builds: `cache.lanes`) end."""
        if self.substitute is not None:
            self.substitute.finish()

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was, in every state tensor (beam search, repeat, select)."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tier -> every tensor this layer keeps between steps."""
        raise NotImplementedError

    def step_parts(self) -> StepParts | None:
        """What a decode step depends on. None: nothing may do it in this layer's place."""
        return None

    def selection_of(self, indices: torch.Tensor) -> Any:
        """What observers get of a step in which a substitute chose these positions (n, h_kv, k), -1 = padding."""
        raise NotImplementedError

    def held_positions(self) -> torch.Tensor | None:
        """Positions in the row of the tokens still held: (n, h_kv, m), -1 = padding; None: all. For diagnostics."""
        return None

    def truncate(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens."""
        raise NotImplementedError(f"{type(self).__name__} cannot be cropped: what it evicted or indexed is not undone")

    # -- attention --------------------------------------------------------------------------------------------------

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        """Route one call of the attention function to its phase."""
        if ctx.step.decode:
            out = self._decode(q, k, v, ctx)
            for observer in ctx.cache.observers:
                observer(self, q, self.selected)
            self._show(q, k, v, out, ctx)
            self.selected = None
            return out
        self.take_back()
        out = self.prefill(q, k, v, mask, ctx)
        if ctx.step.ends_prompt:
            ctx.cache.note_resident()  # the peak: this layer's prompt still whole beside what earlier layers settled
            with ctx.cache.ledger.index_timer(q.device):
                self.finish_prompt(ctx)
        self._show(q, k, v, out, ctx)
        return out

    def _show(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, ctx: LayerContext) -> None:
        """Let the watchers see this call."""
        if ctx.cache.watchers:
            call = WatchedCall(self, q, k, v, out, ctx)
            for watcher in ctx.cache.watchers:
                watcher.watch(call)

    # -- steps that a substitute does -------------------------------------------------------------------------------

    def _decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """One step, by a substitute if there is one that serves: see `decode`."""
        if self.substitute is None and self.offers_steps:
            self.substitute = substitute_for(q, self.step_parts, ctx.cache.ledger)
        elif self.substitute is not None and not self.substitute.serves(q):
            self.take_back()
        if self.substitute is None:
            return self.decode(q, k, v, ctx)
        out, indices = self.substitute.run(q, k, v, ctx.scaling)
        if not ctx.cache.recording:
            self.note_step(ctx.cache.ledger)
        if indices is not None and (ctx.cache.observers or ctx.cache.watchers):
            self.selected = self.selection_of(self.substitute.positions(indices))
        return out

    def note_step(self, ledger: Ledger) -> None:
        """A substitute's step has run, or its recording was replayed: the host's share of it."""
        assert self.substitute is not None
        ledger.attend(self.layer_idx, self.substitute.note(), selecting=not self.attends_all)

    def take_back(self) -> None:
        """End the substitute's use of the store: before anything else reads or changes what the layer holds."""
        if self.substitute is not None:
            self.substitute.leave()
            self.substitute = None

    def prepare_capture(self, tokens: int) -> Substitute:
        """Make room for `tokens` tokens per row, so that a decode step can be recorded as a CUDA graph and replayed.

        Returns what does the step: a recording ends with it. Raises NotApplicable where a step depends on more than the
        device's own counters.
        """
        if self.substitute is None:
            raise NotApplicable(
                f"layer {self.layer_idx} ({type(self).__name__}): its decode step cannot be recorded as a CUDA graph"
            )
        self.substitute.reserve(tokens)
        return self.substitute

    # -- the transformers side --------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = None if self.owner is None else self.owner()
        assert cache is not None
        cache.check_bound(self.layer_idx)
        self.is_initialized = True
        self.columns += 0 if cache.recording else key_states.shape[-2]
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Columns seen, whatever was evicted: positions and masks come from it."""
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.columns = 0
        self.is_initialized = False
        if self.substitute is not None:
            self.substitute.finish()
            self.substitute = None
        self.clear()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): allowed is 0 or a negative number of tokens to remove")
        if tokens_to_remove and self.columns:
            self.take_back()
            self.truncate(-tokens_to_remove)
            self.columns += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.columns:
            self.take_back()
            self.map_rows(beam_idx)

    def offload(self) -> None:
        raise NotImplementedError("a selective cache decides itself where its tensors live")

    prefetch = offload


def dense_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    store: ResidentStore | None,
    ctx: LayerContext,
) -> torch.Tensor:
    """Exact causal attention of a block over everything in `store` (None or empty: the block alone). Returns (n, t, h, d).

    With `store`, the block must already be in it. Where only the last token's row is used, the others are zero.
    """
    step = ctx.step
    if store is not None and not step.first:
        keys, values = store.view()
        stored = tuple(length - count for length, count in zip(store.lengths, step.counts, strict=True))
        key = (stored, keys.shape[2], q.device)
        if key not in step.masks:
            step.masks[key] = causal_mask(stored, step.counts, step.t, keys.shape[2], q.device)
        mask = step.masks[key]
        k, v = keys, values
    if not ctx.last_only:
        return ctx.cache.kernel(ctx.module, q, k, v, mask, scaling=ctx.scaling, dropout=0.0)[0]
    out = q.new_zeros((q.shape[0], step.t, q.shape[1], v.shape[3]))
    newest = None if mask is None else mask[:, :, -1:]
    out[:, -1:] = ctx.cache.kernel(ctx.module, q[:, :, -1:], k, v, newest, scaling=ctx.scaling, dropout=0.0)[0]
    return out


class DenseLayer(SelectiveLayer):
    """Keeps everything and attends to everything: the full cache, and the dense first layers of other methods."""

    is_croppable = True
    attends_all = True

    def __init__(self, layer_idx: int, shape: ModelShape, make_store=ResidentStore) -> None:
        super().__init__(layer_idx, shape)
        self.make_store = make_store
        self.clear()

    def clear(self) -> None:
        self.store = self.make_store()

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        self.store.append(k, v, ctx.step.counts)
        return dense_prefill(q, k, v, mask, self.store, ctx)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.store.append(k, v)
        keys, values = self.store.view()
        lengths = self.store.lengths
        ctx.cache.ledger.attend(self.layer_idx, sum(lengths) / len(lengths), selecting=False)
        return attend_one(q, keys, values, ctx.scaling, row_mask(lengths, keys.shape[2], q.device))

    def step_parts(self) -> StepParts:
        return StepParts(self.store)

    def prepare_capture(self, tokens: int) -> Substitute:
        if self.substitute is None:
            self.substitute = substitute_for(self.store.view()[0], self.step_parts)
        return super().prepare_capture(tokens)

    def map_rows(self, index: torch.Tensor) -> None:
        self.store.map_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        return self.store.tensors()

    def truncate(self, tokens: int) -> None:
        self.store.truncate(tokens)


class StagedLayer(SelectiveLayer):
    """Base of layers that treat a prompt as a whole: K and V are staged exactly until the prompt ends, then settled.

    Chunked prefill thus equals one-shot prefill. A new turn unpacks what was kept, attends to it exactly, and settles again.
    `staged` may be the layer's own store (nothing is copied then), so whoever maps rows maps it once.
    """

    def __init__(self, layer_idx: int, shape: ModelShape) -> None:
        super().__init__(layer_idx, shape)
        self.staged: ResidentStore | None = None
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None  # a prompt that came in one unpadded block
        self.clear()

    # -- what a family writes ---------------------------------------------------------------------------------------

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        """Take over the whole prompt: k, v (n, h_kv, >= max(lengths), d), row r's tokens at 0 .. lengths[r]-1."""
        raise NotImplementedError

    def unpack(self) -> ResidentStore:
        """What is kept, exactly attendable, at the start of a new turn; the new tokens are appended to it."""
        raise NotImplementedError

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        """Called per prompt block, before it is settled: q (n, h, t, d) against all staged keys (n, h_kv, length, d).

        Row r holds stored[r] entries, the last ctx.step.counts[r] of them this block's (`causal_mask` wants the difference).
        """

    # -- the flow ---------------------------------------------------------------------------------------------------

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        step = ctx.step
        if step.first and step.ends_prompt and not step.padded:
            self.fresh = (k, v)
            if ctx.cache.attn == "standard":
                ctx.probs = standard_probabilities(q, k, mask, ctx.scaling)
            self.observe(q, k, step.total, ctx)
            if ctx.probs is not None:
                probs, ctx.probs = ctx.probs, None
                return weighted_values(probs, v)
            return dense_prefill(q, k, v, mask, None, ctx)
        if self.staged is None:
            self.staged = ResidentStore() if step.first else self.unpack()
        self.staged.append(k, v, step.counts)
        self.staged.reserve(self.staged.length + max(a - b for a, b in zip(step.final, step.total, strict=True)))
        self.observe(q, self.staged.view()[0], self.staged.lengths, ctx)
        return dense_prefill(q, k, v, mask, self.staged, ctx)

    def finish_prompt(self, ctx: LayerContext) -> None:
        if self.fresh is not None:
            self.settle(*self.fresh, ctx.step.total, ctx)
        else:
            assert self.staged is not None
            self.settle(*self.staged.view(), self.staged.lengths, ctx)
        self.fresh = self.staged = None

    def clear(self) -> None:
        self.fresh = self.staged = None

    def map_rows(self, index: torch.Tensor) -> None:
        if self.staged is not None:
            self.staged.map_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        held = [] if self.staged is None else self.staged.tensors()["device"]
        return {"device": [*held, *(self.fresh or ())]}


def exact_copy(store: Store) -> ResidentStore:
    """Everything a store holds, decoded and on the device."""
    copy = ResidentStore()
    copy.load(*store.view(), store.lengths)
    return copy


def row_mask(lengths: list[int], length: int, device: torch.device) -> torch.Tensor | None:
    """(n, 1, length) bool, True where row r has a token; None if all rows are full."""
    if len(set(lengths)) == 1:
        return None
    return (torch.arange(length, device=device)[None] < torch.tensor(lengths, device=device)[:, None])[:, None]
