"""SelectiveLayer: one transformer layer's cache, which owns attention in all phases.

A forward pass reaches a layer twice: transformers calls `update` with the new keys and values, then the attention function
calls `attend` with the queries. Everything happens in `attend`; `update` counts the new columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from pqcache.selective.hybrid import HybridCache
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from pqcache.store.lanes import Lanes
from pqcache.store.row_state import RowState
from pqcache.store.step import StepParts, Substitute, Window


class Request(HybridCache):
    """What layers use of the cache that they are part of; see SelectiveCache, which fills it."""

    method: Any  # the Method
    shape: ModelShape
    ledger: Ledger
    lanes: Lanes  # what runs copies and index builds beside the model
    attn: str
    accelerator: Any  # does decode steps in the place of layers, see support.accelerator; None: torch does everything
    kernel: Callable  # dense attention of a prompt, as transformers' attention functions
    expected: int  # tokens of the longest row when the request ends; 0 = unknown
    prompt_lengths: list[int] | None  # real tokens per row
    pads: list[int]  # leading padding columns, per row
    token_ids: torch.Tensor | None  # (n, columns)
    begins_ahead: bool  # some layer's index may start work before its layer runs
    recording: bool  # the pass is being recorded, not run: nothing advances (see captured.py)
    bound: int | None  # the layer whose attention module is running
    # Called as observer(layer, q, selected) after each layer's decode step: q (n, h, 1, d), selected a
    # index.Selected, or None where the layer attends to everything it holds. For diagnostics and tests.
    observers: list[Callable[[SelectiveLayer, torch.Tensor, Any], None]]
    watchers: list[Watcher]  # see every attention, prompt blocks included

    def resident_bytes(self) -> dict[str, int]:
        raise NotImplementedError


@dataclass(frozen=True)
class Step:
    """One forward pass, the same for every layer. Lists have one entry per row and count real tokens, never padding."""

    decode: bool  # one new token per row after the prompt
    t: int  # columns of this block
    past: list[int]  # tokens seen before
    counts: list[int]  # real tokens in this block: each row's last counts[r] columns
    final: list[int]  # tokens seen at the end of the current prompt or turn
    ends_prompt: bool  # the block holds the last token of the prompt, or of a new turn
    first: bool  # nothing was seen before
    masks: dict = field(default_factory=dict)  # masks and rotations of this pass, shared by its layers

    @cached_property
    def total(self) -> list[int]:
        """Tokens seen after this block."""
        return [a + b for a, b in zip(self.past, self.counts, strict=True)]

    @cached_property
    def padded(self) -> bool:
        """Some row has padding in this block, or rows differ in length."""
        return len(set(self.past)) > 1 or set(self.counts) != {self.t}


@dataclass
class LayerContext:
    """The inputs of one call of an attention module; filled by the forward pre-hook."""

    layer_idx: int  # among all layers of the model
    module: nn.Module
    cache: Request
    hidden: torch.Tensor  # (n, t, D), after the layer's input norm
    cos: torch.Tensor  # (1 or n, t, rotary)
    sin: torch.Tensor
    position_ids: torch.Tensor | None  # (1 or n, t)
    modules: list[nn.Module]  # the attention modules of the served layers, for speculation one layer ahead
    # the model's rotary embedding: cos, sin for other positions
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    step: Step  # what this forward pass is
    rotary_ahead: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None  # that of the next layer
    last_only: bool = False  # the last layer of a pass for the last token's logits: no other row is used
    recorded: bool = False  # the block's exact attention was computed before; see shared_prefill.py
    # of a recorded prompt: what one of the methods that are fed has computed for the others, by name
    kept: dict[str, torch.Tensor] | None = None
    scaling: float = field(init=False)  # set by the attention function; a `Scaling` where the softmax has more to it
    # attn=standard: a whole prompt's probabilities (n, h, t, t), while it is observed
    probs: torch.Tensor | None = None
    # where a layer's `sums_from` asked for them: sums over a whole prompt's last queries, while it is observed
    column_sums: ColumnSums | None = None
    # a complete prompt's values (n, h_kv, >= the longest row, d), as stored, while it is settled
    values: torch.Tensor | None = None


class ColumnSums(NamedTuple):
    """What each key of a whole prompt received from its queries number `first` and later."""

    first: int
    sums: torch.Tensor  # (n, h, t), fp32 or wider


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
    """Sees every attention of every served layer and changes nothing: for diagnostics. Put it into `cache.watchers`."""

    every_layer = False  # those with a sliding window, too

    def watch(self, call: WatchedCall) -> None:
        """Called after each `attend`."""

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i became what row index[i] was."""


class SelectiveLayer(CacheLayerMixin, RowState):
    """Base of all layers. A family writes `prefill`, `finish_prompt` and `decode`; most start from StagedLayer.

    What it keeps is named in `per_row`, see RowState.
    """

    is_sliding = False
    is_croppable = False
    attends_all = False  # whether decode attends every token seen, exactly or not: dense layers, quantization
    drops_first = False  # whether a decode step drops tokens before it attends, not after
    # does this layer's decode steps, until anything else changes what it holds; see SelectiveCache.use_substitutes
    substitute: Substitute | None = None
    index: Any = None  # of the family that retrieves: selective.index.Index, which may start its work a layer ahead

    def __init__(self, layer_idx: int, shape: ModelShape) -> None:
        super().__init__()
        self.layer_idx = layer_idx  # among the layers that the method serves
        self.model_idx = layer_idx  # among all layers of the model; set by the cache
        self.shape = shape  # of what is stored
        self.model_shape = shape  # of what the model hands over
        self.scaling = 1.0  # of the last call, see LayerContext
        self.columns = 0  # columns seen, padding included: what transformers calls the sequence length
        # set by the cache; weak, so that a dropped cache is freed at once
        self.owner: weakref.ref[Request] | None = None
        self.selected: Any = None  # what the current decode step chose, for observers: index.Selected, or None

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
        """Called before any layer has seen a forward pass: raise ValueError if the pass cannot be computed correctly."""

    def wait(self) -> None:
        """Wait for everything that runs beside the model (copies, index builds: `cache.lanes`)."""

    def step_parts(self) -> StepParts | Window | None:
        """What the decode steps to come depend on, for a substitute. None: no substitute can do them."""
        return None

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
        self.scaling = ctx.scaling
        if ctx.step.decode:
            cache = ctx.cache
            if self.substitute is None:
                out = self.decode(q, k, v, ctx)
            else:
                out = self.substitute.run(q, k, v, ctx.scaling)
                if not cache.recording:
                    self.note_step(cache.ledger)
            if cache.observers or cache.watchers:
                for observer in cache.observers:
                    observer(self, q, self.selected)
                self._show(q, k, v, out, ctx)
            self.selected = None
            return out
        self.substitute = None
        self.model_shape.check(q, k, v)
        out = self.prefill(q, k, v, mask, ctx)
        if ctx.step.ends_prompt:
            # the peak: this layer still holds its whole prompt, earlier layers have evicted, indexed or packed theirs
            ctx.cache.ledger.note_resident(ctx.cache.resident_bytes())
            with ctx.cache.ledger.index_timer(q.device):
                self.finish_prompt(ctx)
        if ctx.cache.watchers:
            self._show(q, k, v, out, ctx)
        return out

    def _show(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, ctx: LayerContext) -> None:
        """Let the watchers see this call."""
        call = WatchedCall(self, q, k, v, out, ctx)
        for watcher in ctx.cache.watchers:
            watcher.watch(call)

    def note_step(self, ledger: Ledger) -> None:
        """Update the host's counters after a substitute's step has run or was replayed."""
        assert self.substitute is not None
        ledger.attend(self.layer_idx, self.substitute.note(), selecting=not self.attends_all)

    # -- the transformers side --------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = None if self.owner is None else self.owner()
        assert cache is not None
        if cache.bound != self.model_idx:
            raise RuntimeError(
                "a SelectiveCache works inside `with attach(model):` only; outside, attention would see one block"
            )
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
        self.substitute = None
        self.clear()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): allowed is 0 or a negative number of tokens to remove")
        if tokens_to_remove and self.columns:
            self.substitute = None
            self.truncate(-tokens_to_remove)
            self.columns += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.columns:
            self.substitute = None
            self.map_rows(beam_idx)

    def offload(self) -> None:
        raise NotImplementedError("a selective cache decides itself where its tensors live")

    prefetch = offload
