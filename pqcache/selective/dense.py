"""Exact attention over everything: of a prompt's blocks, and DenseLayer, which keeps and attends every token."""

from __future__ import annotations

from statistics import fmean

import torch

from pqcache.selective.attention import attend_one, causal_mask, row_mask
from pqcache.selective.layer import LayerContext, SelectiveLayer
from pqcache.selective.shape import ModelShape
from pqcache.selective.substitute import StepParts, Substitute, substitute_for
from pqcache.store.resident import ResidentStore


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
        self.store.expect(ctx.cache.expected)
        self.store.append(k, v, ctx.step.counts)
        return dense_prefill(q, k, v, mask, self.store, ctx)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.store.append(k, v)
        keys, values = self.store.view()
        lengths = self.store.lengths
        ctx.cache.ledger.attend(self.layer_idx, fmean(lengths), selecting=False)
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
