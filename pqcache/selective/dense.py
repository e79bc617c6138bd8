"""Exact attention over everything: of a prompt's blocks, and DenseLayer, which keeps and attends every token."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean

import torch

from pqcache.kernels.scaling import is_plain
from pqcache.selective.attention import attend_rows
from pqcache.selective.blocks import lower_right, row_by_row
from pqcache.selective.column_sums import attend_and_sum, together
from pqcache.selective.layer import LayerContext, SelectiveLayer
from pqcache.selective.shape import ModelShape
from pqcache.store.resident import ResidentStore
from pqcache.store.step import StepParts


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
    counts, ends = step.counts, step.counts
    if store is None or step.first:
        if not ctx.last_only and (ctx.recorded or not (step.padded and mask is None)):
            return ctx.cache.kernel(ctx.module, q, k, v, mask, scaling=ctx.scaling, dropout=0.0)[0]
        # the block's own rows, as a store holds them: padding left out
        if step.padded:
            k, v = (_to_the_left(x, counts) for x in (k, v))
    else:
        k, v = store.view()
        ends = store.lengths
    attend = partial(_attend_end, ctx=ctx)
    same = len(set(ends)) == 1 and set(counts) == {step.t}
    if not ctx.last_only:
        return attend(q, k, v) if same else row_by_row(q, k, v, ends, counts, attend)
    out = q.new_zeros((q.shape[0], step.t, q.shape[1], v.shape[3]))
    newest = q[:, :, -1:]
    out[:, -1:] = attend(newest, k, v) if same else row_by_row(newest, k, v, ends, [min(1, c) for c in counts], attend)
    return out


def prefill_and_sum(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    ctx: LayerContext,
    windows: Sequence[int] | None = None,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`dense_prefill` of a whole prompt in one unpadded block, and column sums (n, h, t), from the same logits.

    The sums are over queries `first` and later; those before only attend. windows as in `add_column_sums`. None: both apart are
    not slower, or the attention is known or needed for one token only.
    """
    if ctx.recorded or ctx.last_only or mask is not None or ctx.cache.attn != "sdpa" or not together(q):
        return None
    out, sums = attend_and_sum(q[:, :, first:], k, v, ctx.scaling, windows)
    if first:
        head, keys, values = (x[:, :, :first] for x in (q, k, v))
        early = ctx.cache.kernel(ctx.module, head, keys, values, None, scaling=ctx.scaling, dropout=0.0)[0]
        out = torch.cat([early, out], 1)
    return out, sums


def _attend_end(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
    """Causal attention of q (n, h, t, d) over k, v (n, h_kv, m, d), the last t of them the queries' own: (n, t, h, d)."""
    # these two are aligned to the lower right themselves; sdpa, also as flash-attn's stand-in for fp32, is not
    own = ctx.cache.attn == "standard" or (ctx.cache.attn == "flash_attention_2" and q.dtype != torch.float32)
    if own or q.shape[2] in (1, k.shape[2]) or not is_plain(ctx.scaling):
        return ctx.cache.kernel(ctx.module, q, k, v, None, scaling=ctx.scaling, dropout=0.0)[0]
    return lower_right(q, k, v, ctx.scaling)


def _to_the_left(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """x (n, h_kv, t, d), row r's last counts[r] columns real, with these at 0 .. counts[r] - 1."""
    return torch.stack(
        [row.roll(count, 1) if count < row.shape[1] else row for row, count in zip(x, counts, strict=True)]
    )


class DenseLayer(SelectiveLayer):
    """Keeps everything and attends to everything: the full cache, and the dense first layers of other methods."""

    per_row = ("store",)
    is_croppable = True
    attends_all = True

    def __init__(self, layer_idx: int, shape: ModelShape) -> None:
        super().__init__(layer_idx, shape)
        self.clear()

    def clear(self) -> None:
        self.store = ResidentStore()

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
        return attend_rows(q, keys, values, lengths, ctx.scaling)

    def step_parts(self) -> StepParts:
        return StepParts(self.store)

    def truncate(self, tokens: int) -> None:
        self.store.truncate(tokens)
