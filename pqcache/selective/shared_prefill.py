"""One dense prefill that serves several methods.

Most methods attend to the prompt exactly and differ only in what they do with its K and V afterwards. A prompt that many methods
answer then needs one forward pass. `record` stores the inputs and the output of every attention module; `feed` gives them to
another cache's layers, which evict, pack or index as after a forward pass of their own.

    prefill = record(model, input_ids)
    for method in methods:
        result = generate(model, method, input_ids, max_new_tokens=32, prefill=prefill)

Scores and bytes equal those of a run with a prefill of its own; where that takes attention and column sums from one pass
(`dense.prefill_and_sum`: H2O and MiKV, prompts of 1024 tokens or more, fp32 on a CPU), up to the order of additions. Times of
the prompt do not exist, so none are reported.
A batch of left-padded prompts is recorded as one; `generate_batch` feeds it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from pqcache.selective import hybrid
from pqcache.selective.attach import attach
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.dense import DenseLayer, dense_prefill
from pqcache.selective.layer import LayerContext, SelectiveLayer, WatchedCall, Watcher
from pqcache.selective.method import Method
from pqcache.selective.placement import home
from pqcache.selective.shape import ModelShape


class OwnPrefill(ValueError):
    """This method does not attend to the prompt exactly: it needs a forward pass of its own."""


@dataclass
class Call:
    """One attention module's call with the whole prompt; n = 1, or the prompts of a batch."""

    q: torch.Tensor  # (n, h, s, d)
    k: torch.Tensor  # (n, h_kv, s, d)
    v: torch.Tensor
    out: torch.Tensor  # (n, s, h, d)
    ctx: LayerContext  # of the recording: a feed gives it a cache and a step of its own
    device: torch.device  # where the layer computes

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.out, self.ctx.hidden

    def moved(self, device: torch.device | str) -> Call:
        """The same call with its tensors on a device."""
        ctx = copy.copy(self.ctx)
        ctx.hidden, ctx.cos, ctx.sin = (x.to(device) for x in (ctx.hidden, ctx.cos, ctx.sin))
        ctx.position_ids = None if ctx.position_ids is None else ctx.position_ids.to(device)
        q, k, v, out = (x.to(device) for x in (self.q, self.k, self.v, self.out))
        return Call(q, k, v, out, ctx, self.device)

    def kernel(self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple:
        """Returns the recorded output in place of dense attention; refuses any block but the recorded one."""
        same = [a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in ((q, self.q), (k, self.k), (v, self.v))]
        if module is not self.ctx.module or not all(same):
            raise OwnPrefill("attends to something else than the prompt's own keys and values")
        return self.out, None


@dataclass
class Prefill:
    """A prompt's dense prefill: one Call per layer, and the logits (n, vocabulary) of the last token.

    tokens: columns. pads: of each row, the columns of left padding.
    """

    tokens: int
    attn: str
    logits: torch.Tensor
    calls: list[Call]
    pads: list[int]
    states: Cache | None = None  # of a hybrid model; see hybrid.py
    _versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._versions = self._count()

    def _count(self) -> list[int]:
        return [tensor._version for call in self.calls for tensor in call.tensors()]

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a method wrote into the recorded tensors, which other methods read as well."""
        if self._count() != self._versions:
            raise RuntimeError("a method changed the recorded prefill in place")


class _Tape(Watcher):
    every_layer = True

    def __init__(self, device: str | None) -> None:
        self.calls: list[Call] = []
        self.device = device
        # of a prompt that arrives in blocks, per layer: q, output, input, cos, sin and positions of all its tokens
        self.parts: dict[int, list[_Whole]] = {}

    def watch(self, call: WatchedCall) -> None:
        ctx, step, k, v, out, q = copy.copy(call.ctx), call.ctx.step, call.k, call.v, call.out, call.q
        if not (step.first and step.ends_prompt):
            whole = self.parts.setdefault(
                ctx.layer_idx, [_Whole(axis, self.device) for axis in (2, 1, 1, 1, 1, 1, 2, 2)]
            )
            passing = isinstance(call.layer, _Passing)  # it holds K and V itself, until the prompt ends
            kv = (None, None) if passing else (k, v)
            blocks = (q, out, ctx.hidden, ctx.cos, ctx.sin, ctx.position_ids, *kv)
            for one, tensor in zip(whole, blocks, strict=True):
                one.add(tensor, step.past[0], step.final[0])
            if not step.ends_prompt:
                return
            every: list[Any] = [one.tensor for one in self.parts.pop(ctx.layer_idx)]
            q, out, ctx.hidden, ctx.cos, ctx.sin, ctx.position_ids, k, v = every
            if isinstance(call.layer, _Passing):
                k, v = call.layer.give_up()
        ctx.cache = ctx.step = None  # type: ignore[assignment]  # the recording's, which are dropped
        ctx.kept = {}
        made = Call(q, k, v, out, ctx, call.q.device)
        self.calls.append(made if self.device is None else made.moved(self.device))


@dataclass
class _Whole:
    """A tensor of all tokens of a prompt, of which blocks arrive along one axis."""

    axis: int
    device: str | None  # where it is kept; None: with its blocks
    tensor: torch.Tensor | None = None

    def add(self, block: torch.Tensor | None, start: int, length: int) -> None:
        if block is None:
            return
        if self.tensor is None:
            shape = (*block.shape[: self.axis], length, *block.shape[self.axis + 1 :])
            self.tensor = torch.empty(shape, dtype=block.dtype, device=self.device or block.device)
        self.tensor.narrow(self.axis, start, block.shape[self.axis]).copy_(block)


class _Passing(DenseLayer):
    """Attends to the prompt and keeps nothing; of a prompt in blocks, K and V until its end."""

    def give_up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the prompt, which this layer forgets."""
        k, v = self.store.view()
        self.clear()
        return k, v

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        if not (ctx.step.first and ctx.step.ends_prompt):
            return super().prefill(q, k, v, mask, ctx)
        return dense_prefill(q, k, v, mask, None, ctx)


class _Recording(Method):
    name: ClassVar[str] = "recording"
    ignores_budget: ClassVar[bool] = True

    def make_layer(self, layer_idx: int, shape: ModelShape) -> SelectiveLayer:
        return _Passing(layer_idx, shape)


@torch.no_grad()
def record(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attn: str = "auto",
    device: str | None = None,
    prefill_chunk: int | None = None,
    pads: Sequence[int] | None = None,
) -> Prefill:
    """The dense prefill of input_ids (n, s). Holds q, k, v, the output and the input of every layer.

    device: where they are kept; None: where they were computed. `feed` moves one layer at a time back. prefill_chunk: tokens
    that are computed at a time. pads: columns of left padding per row; prompts with padding are computed in one block.
    """
    pads = list(pads or [0] * len(input_ids))
    if any(pads) and prefill_chunk is not None and prefill_chunk < input_ids.shape[1]:
        raise OwnPrefill(f"prefill_chunk={prefill_chunk}: prompts of several lengths are recorded in one block")
    cache = SelectiveCache(model, _Recording(), attn=attn)
    tape = _Tape(device)
    cache.watchers.append(tape)
    ids = input_ids.to(home(model))
    cache.begin([ids.shape[1] - pad for pad in pads], token_ids=ids, left_padded=True)
    cache.expected = ids.shape[1]
    size = prefill_chunk or ids.shape[1]
    positions = (torch.arange(ids.shape[1]) - torch.tensor(pads)[:, None]).clamp_min(0).to(ids.device)
    with attach(model):
        for block, at in zip(ids.split(size, dim=1), positions.split(size, dim=1), strict=True):
            out = model(input_ids=block, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return Prefill(
        ids.shape[1],
        cache.attn,
        out.logits[:, -1],
        tape.calls,
        pads,
        hybrid.copied(cache.states, host=device is not None),
    )


@torch.no_grad()
def feed(cache: SelectiveCache, prefill: Prefill) -> torch.Tensor:
    """Give a begun cache its prompt from a recording, inside attach(model). Returns the logits (n, vocabulary).

    Raises OwnPrefill if the method does not attend to the prompt exactly; `begin` makes the cache usable again.
    """
    if cache.attn != prefill.attn:
        raise OwnPrefill(f"attn={cache.attn}, but the recording was made with {prefill.attn}")
    kernel = cache.kernel
    cache.open_forward()
    try:
        for index, recorded in enumerate(prefill.calls):
            call = recorded.moved(recorded.device)  # a copy, its context too
            layer, ctx = cache.attending[index], call.ctx
            ctx.cache, ctx.step = cache, cache.plan_step(len(prefill.logits), prefill.tokens, None)
            ctx.recorded, ctx.last_only = True, False
            cache.enter_layer(ctx)
            layer.update(call.k, call.v)
            cache.kernel = call.kernel
            out = layer.attend(call.q, call.k, call.v, None, ctx)
            if out is not call.out:
                raise OwnPrefill("returns something else than exact attention")
    finally:
        cache.kernel = kernel
    cache.states = hybrid.copied(prefill.states)
    cache.close_forward()
    return prefill.logits
