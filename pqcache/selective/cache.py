"""SelectiveCache: a transformers Cache whose layers own attention, and the bookkeeping of one request."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from pqcache.kernels.scaling import described, is_plain
from pqcache.selective import hybrid
from pqcache.selective.layer import LayerContext, Request, SelectiveLayer, Step
from pqcache.selective.ledger import Ledger, unique_bytes
from pqcache.selective.method import Method
from pqcache.selective.placement import home
from pqcache.selective.shape import ModelShape, NotApplicable, attending, served, windows
from pqcache.selective.sliding import SlidingLayer, WindowedLayer
from pqcache.selective.support import accelerator, attention_kernel, check_architecture, sliding_window
from pqcache.store.base import joined
from pqcache.store.buffer import Buffer
from pqcache.store.lanes import Lanes, lanes_for
from pqcache.store.transfer import table


class SelectiveCache(Request):
    """The cache of one request (a batch of rows) under one method. Use inside `with attach(model):`.

    Without `begin`, the first forward pass is the whole prompt. Rows may be left-padded; the attention mask says where.
    `get_seq_length()` counts columns seen, whatever was evicted.
    """

    layers: list[SelectiveLayer]

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        method: Method,
        attn: str = "auto",
        lanes: Lanes | None = None,
        kernels: str = "torch",
    ) -> None:
        """lanes: what runs copies and index builds beside the model; None chooses by the model's device.

        kernels: what computes decode steps on a CUDA device: torch, or auto (Triton kernels where the method allows it).
        """
        if isinstance(method, str):
            hint = f"pqcache.use(model, {method!r}, budget=0.2) takes a name"
            raise TypeError(f"method={method!r}: SelectiveCache takes an object of a Method; {hint}")
        if not isinstance(method, Method):
            raise TypeError(f"method of type {type(method).__name__}: SelectiveCache takes an object of a Method")
        device = home(model) if isinstance(model, PreTrainedModel) else torch.device("cpu")
        self.lanes = lanes_for(device) if lanes is None else lanes.serve(device)
        config = model if isinstance(model, PreTrainedConfig) else model.config
        check_architecture(config)
        config = config.get_text_config(decoder=True)
        method.check_model(config)
        if isinstance(model, PreTrainedModel):
            method.prepare(model, None, None)
        self.method = method
        self.shape = ModelShape.of(config)
        self.window = sliding_window(config)
        self.attn, self.kernel = attention_kernel(attn)
        self.accelerator = accelerator(kernels, device, getattr(model, "dtype", None))
        self.ledger = Ledger()
        self.observers, self.watchers = [], []
        self.served = method.layers(self.shape)  # the others keep their sliding window
        if self.window is not None and method.serves_windows:
            self.served = [WindowedLayer(i, self.shape, self.window) for i in range(self.shape.n_layers)]
            self.window = None
        every: list[Any] = [hybrid.Absent() for _ in windows(config)]  # what has no attention
        for place in set(attending(config)).difference(served(config)):
            every[place] = SlidingLayer(place, self.shape, windows(config)[place] or 0)
        for place, layer in zip(served(config), self.served, strict=True):
            every[place], layer.model_idx = layer, place
        super().__init__(layers=every)
        self.attending: list[SelectiveLayer] = [every[place] for place in attending(config)]
        self._following = dict(zip(attending(config), self.attending[1:]))  # the last one has none
        self.begins_ahead = any(layer.index is not None and layer.index.ahead for layer in self.attending)
        for layer in self.attending:
            layer.owner = weakref.ref(self)
        self._checking = [layer for layer in self.served if type(layer).check_step is not SelectiveLayer.check_step]
        self._empty_states = partial(hybrid.empty, config)
        self._forget()

    # -- one request ------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.states = self._empty_states()
        self.columns = 0  # seen, padding included
        self.past: list[int] = []  # real tokens seen, per row
        self.pads: list[int] = []  # leading padding columns, per row
        self.prompt_lengths = self.token_ids = None
        self.left_padded = False  # announced: no attention_mask says so
        self.expected = 0
        self._target: int | None = None  # columns at which the prompt or the turn ends
        self._announced = False  # the end of this prompt or turn, by begin or begin_turn
        self._decoded = False  # since the prompt or turn ended
        self._substituted = False  # since then, or since rows moved, the layers have been asked for substitutes
        self._open = False  # a forward pass began and has not ended
        self.recording = False
        self.last_only = False  # the pass under way returns the last token's logits and nothing else; see attach.py
        self.step: Step | None = None
        self.bound = None

    def reset(self) -> None:
        """Forget the request; layers and hyper-parameters stay. What still runs beside the model is stopped first."""
        self.lanes.close()
        super().reset()
        self.ledger.reset()
        self._forget()

    def begin(
        self,
        prompt_lengths: Iterable[int],
        token_ids: torch.Tensor | None = None,
        max_new_tokens: int = 0,
        left_padded: bool = False,
        columns: int | None = None,
    ) -> None:
        """Start a new request and announce where the prompt ends, so that it may arrive in chunks.

        prompt_lengths: real tokens per row. token_ids (n, columns): for methods that look at the tokens themselves.
        columns: tokens and padding of each row; None: the longest row has no padding.
        left_padded: shorter rows begin with padding, and passes have position_ids but no attention_mask: none is built then.
        Raises NotApplicable if prompt + max_new_tokens exceed a sliding window of the model.
        """
        self.reset()
        self.prompt_lengths = list(prompt_lengths)
        if not self.prompt_lengths or min(self.prompt_lengths) < 1:
            raise ValueError(f"prompt_lengths={self.prompt_lengths}: allowed is at least one token per row")
        self.token_ids = token_ids
        self.left_padded = left_padded
        self.method.check_prompt(self.prompt_lengths, token_ids)
        self._announced = True
        self._target = max(self.prompt_lengths) if columns is None else columns
        self.pads = [self._target - length for length in self.prompt_lengths]
        if max_new_tokens:
            self.expected = self._target + max_new_tokens
        self.check_window(self._target + max_new_tokens)

    def begin_turn(self, tokens: int) -> None:
        """Announce a new turn of `tokens` columns, so that it may arrive in chunks. A turn in one pass needs no announcement."""
        if not self.columns or (self._target is not None and self.columns < self._target):
            raise ValueError("begin_turn: the prompt has not ended yet")
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: allowed is an int >= 1")
        self._target = self.columns + tokens
        self._announced = True

    def check_window(self, tokens: int) -> None:
        if self.window is not None and tokens > self.window:
            raise NotApplicable(
                f"{tokens} tokens exceed the model's sliding window of {self.window}: all its layers slide, and beyond it"
                " method=full alone applies"
            )

    # -- one forward pass (called by attach) ------------------------------------------------------------------------

    def open_forward(self, ids: torch.Tensor | None = None) -> None:
        """A pass of tokens ids (n, t) begins. A prompt's are kept, for methods that look at them, if `begin` had none."""
        if self._open:
            raise RuntimeError("the last forward pass did not finish, its layers disagree: begin() or reset() first")
        self.step = None
        self._open = True
        known = 0 if self.token_ids is None else self.token_ids.shape[1]
        inside = self.columns == 0 or (self._target is not None and self.columns < self._target)
        if ids is not None and inside and known == self.columns:
            self.token_ids = ids if not known else torch.cat([self.token_ids, ids], 1)  # type: ignore[list-item]

    def padding_mask(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """(n, columns + t), for inputs (n, t, ...) without a mask: states would take padding for tokens. None: it has none."""
        if max(self.pads, default=0) <= self.columns:
            return None
        columns = torch.arange(self.columns + inputs.shape[1], device=inputs.device)
        return (columns >= table(self.pads, inputs.device)[:, None]).long()

    def plan_step(self, n: int, t: int, mask: torch.Tensor | None) -> Step:
        """What this forward pass is: prefill, extension or decode. Decided for the first layer, reused by the others.

        Everything is checked before any layer has changed, so that a refused pass can be repeated.
        """
        if self.step is not None:
            return self.step
        if self.accelerator is not None and self._decoded and not self.recording:
            self.use_substitutes()
        try:
            step = self._plan(n, t, None if self.recording else mask)  # looking at a mask would wait for the device
            for layer in self._checking:
                layer.check_step(step)
        except ValueError:
            self._open = self.states is not None  # layers before this one may have changed theirs
            self.last_only = False
            raise
        self.step = step
        self.ledger.decoding = self.step.decode
        return self.step

    def use_substitutes(self) -> None:
        """Let the accelerator do the decode steps that it can, from a turn's second one on: what is built beside it has ended.

        None of them while somebody looks on, a gradient is recorded, or the model's softmax has a cap or sinks.
        """
        plain = all(is_plain(layer.scaling) for layer in self.attending)
        if self.observers or self.watchers or torch.is_grad_enabled() or not plain:
            self._substituted = False
            for layer in self.attending:
                layer.substitute = None
        elif not self._substituted and self.accelerator is not None:
            self._substituted = True
            for layer in self.attending:
                layer.substitute = self.accelerator.substitute_for(layer.step_parts())

    def _plan(self, n: int, t: int, mask: torch.Tensor | None) -> Step:
        first = self.columns == 0
        self.check_window(self.columns + t)
        seen = None
        if mask is not None:  # (n, columns) bool: what the last query of the block sees
            seen = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
        if first:
            self.past = [0] * n
            if self.prompt_lengths is None:
                self.pads = [0] * n if seen is None else (t - seen.sum(-1)).tolist()
        if len(self.past) != n or len(self.pads) != n:
            raise ValueError(f"batch of {n} rows, but the cache was begun with {len(self.pads)}")
        if self._target is None or self.columns >= self._target:  # nothing announced: a block is a whole prompt or turn
            in_prompt = first or t > 1
            if in_prompt and not first and not self._announced and not self._decoded:
                raise ValueError(
                    "a second block of several tokens right after the first: tell with begin() where the prompt ends,"
                    " or with begin_turn() that this is a new turn"
                )
            self._target = self.columns + t if in_prompt else self._target
        else:
            in_prompt = True
        assert self._target is not None
        if in_prompt and self.columns + t > self._target:
            raise ValueError(f"a block of {t} tokens crosses the end of the prompt at {self._target} columns")
        self._check_padding(seen, t)
        counts = [t - min(t, max(0, pad - self.columns)) for pad in self.pads]
        return Step(
            decode=not in_prompt,
            t=t,
            past=self.past,
            counts=counts,
            final=[self._target - pad for pad in self.pads],
            ends_prompt=in_prompt and self.columns + t == self._target,
            first=first,
        )

    def _check_padding(self, seen: torch.Tensor | None, t: int) -> None:
        """Only left padding is understood: holes, right padding and custom patterns would silently be attended."""
        if seen is None:
            if any(self.pads) and self.columns == 0 and t > 1 and not self.left_padded:
                raise ValueError("prompt_lengths differ, but no attention_mask says where the padding is")
            return
        column = torch.arange(seen.shape[-1], device=seen.device)
        pads = table(self.pads, seen.device)
        last_real = pads < self.columns + t  # a row that is still all padding sees nothing
        if not torch.equal(seen & last_real[:, None], (column[None] >= pads[:, None]) & last_real[:, None]):
            raise ValueError(
                "attention_mask: allowed is left padding only (zeros before the first real token of a row)"
            )

    def close_forward(self) -> None:
        """After the last layer: the step counter advances, once for all layers."""
        step, self.step, self.bound, self._open = self.step, None, None, False
        if step is None or self.recording:
            return
        self.past = step.total
        self.columns += step.t
        self._decoded = step.decode
        if step.decode:
            self.ledger.end_step(fmean(self.past))
            return
        self._substituted = False
        if step.ends_prompt:
            self._announced = False
            self.ledger.facts |= described(self.attending[-1].scaling)
            self.ledger.note_resident(self.resident_bytes())

    def note_step(self) -> None:
        """A recorded decode step was replayed: advance the host's counters, as a forward pass would have."""
        self.ledger.decoding = True
        for layer in self.attending:
            layer.note_step(self.ledger)
            layer.columns += 1
        self.past = [length + 1 for length in self.past]
        self.columns += 1
        self.ledger.end_step(fmean(self.past))

    def enter_layer(self, ctx: LayerContext) -> None:
        """The attention module of this context is about to run: its layer's index and the next one's may start what they need."""
        self.bound = ctx.layer_idx
        layer, following = self.layers[ctx.layer_idx], self._following.get(ctx.layer_idx)
        if _begins_ahead(layer):
            layer.index.on_layer_input(ctx)
        if following is not None and _begins_ahead(following):
            following.index.on_previous_input(ctx)

    # -- rows -------------------------------------------------------------------------------------------------------

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was, in every layer: beam search, repeat and select are all this."""
        self._substituted = False
        index = index.cpu()  # row counts are Python ints everywhere: one transfer here instead of one per layer
        for layer in self.attending:
            layer.reorder_cache(index)
        if self.states is not None:
            self.states.reorder_cache(index)
        for watcher in self.watchers:
            watcher.map_rows(index)
        rows = index.tolist()
        if self.past:
            self.past = [self.past[i] for i in rows]
            self.pads = [self.pads[i] for i in rows]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.map_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_rows(torch.arange(len(self.past)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_rows(torch.arange(len(self.past), device=indices.device)[indices])

    def crop(self, tokens_to_remove: int) -> None:
        fixed = [layer for layer in self.attending if not layer.is_croppable]
        if tokens_to_remove < 0 and (fixed or self.states is not None):
            raise NotImplementedError(f"{self.method.name} cannot be cropped: what it evicted or indexed is not undone")
        if -tokens_to_remove > min(self.past, default=0):
            raise ValueError(
                f"crop({tokens_to_remove}): allowed is at most the {min(self.past, default=0)} tokens of a row"
            )
        super().crop(tokens_to_remove)
        if tokens_to_remove < 0:
            self.past = [length + tokens_to_remove for length in self.past]
            self.columns += tokens_to_remove
            self._substituted = False
            if self._target is not None:
                self._target = min(self._target, self.columns)

    def wait(self) -> None:
        """Wait for everything that runs beside the model, so that bytes and figures are final."""
        for layer in self.attending:
            layer.wait()

    # -- figures ----------------------------------------------------------------------------------------------------

    def resident_bytes(self) -> dict[str, int]:
        """Tier -> bytes of all state that the served layers keep between steps, each storage once, buffer capacity included."""
        return {tier: unique_bytes(tensors) for tier, tensors in _kept(self.served).items()}

    def other_bytes(self) -> int:
        """Bytes that no method can change: sliding windows, and the states of linear attention and the like."""
        others = [layer for layer in self.attending if layer not in self.served]
        return sum(map(unique_bytes, (*_kept(others).values(), hybrid.tensors(self.states))))

    def content_by_tier(self) -> dict[str, int]:
        """Tier -> resident bytes without the slack of buffers, which grow in steps of many tokens.

        `resident_bytes` is what was allocated, which at short prompts depends on that step; this is what a method needs.
        """
        content = self.resident_bytes()
        kept = _kept(self.served).items()
        tiers = {x.untyped_storage().data_ptr(): tier for tier, tensors in kept for x in tensors}
        for buffer in {id(buffer): buffer for layer in self.served for buffer in _buffers(layer)}.values():
            if (tier := tiers.get(buffer.data.untyped_storage().data_ptr())) is not None:
                content[tier] -= buffer.slack
        return content


def _begins_ahead(layer: Any) -> bool:
    """Whether a layer has an index that starts work before the layer runs. A substitute starts nothing early."""
    return layer.substitute is None and layer.index is not None and layer.index.ahead


class Joint(hybrid.HybridCache):
    """The caches of several members as one, their rows below each other. For one decode step, inside `attach(model)`.

    Their states are copied; `give_back` writes them back after the step.
    """

    def __init__(self, members: Sequence[SelectiveCache], rows: Sequence[int]) -> None:
        super().__init__(layers=members[0].layers)
        self.members, self.rows = list(members), list(rows)
        self.states = hybrid.joined([member.states for member in members])

    def give_back(self) -> None:
        hybrid.give_back(self.states, [member.states for member in self.members])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        parts = zip(self.members, key_states.split(self.rows), value_states.split(self.rows), strict=True)
        for cache, k, v in parts:
            cache.layers[layer_idx].update(k, v)
        return key_states, value_states


def _kept(layers: Sequence[SelectiveLayer]) -> dict[str, list[torch.Tensor]]:
    """Tier -> every tensor that layers and their substitutes keep between steps."""
    substitutes = [layer.substitute for layer in layers if layer.substitute is not None]
    return joined(*(layer.tensors() for layer in layers), *({"device": own.tensors()} for own in substitutes))


def _buffers(thing: object, seen: set[int] | None = None) -> Iterator[Buffer]:
    """Every buffer reachable from a layer's attributes; cache, method and the model's modules are not the layer's."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, torch.Tensor | torch.nn.Module | Method | Cache) or callable(thing):
        return
    seen.add(id(thing))
    if isinstance(thing, Buffer):
        yield thing
        return
    parts = thing if isinstance(thing, list | tuple) else thing.values() if isinstance(thing, dict) else ()
    for part in parts or getattr(thing, "__dict__", {}).values():
        yield from _buffers(part, seen)
