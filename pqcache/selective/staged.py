"""StagedLayer: base of the layers that treat a prompt as a whole."""

from typing import ClassVar

import torch

from pqcache.selective.dense import dense_prefill, prefill_and_sum
from pqcache.selective.layer import ColumnSums, LayerContext, SelectiveLayer
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import standard_probabilities, weighted_values
from pqcache.store.base import Store
from pqcache.store.resident import ResidentStore


class StagedLayer(SelectiveLayer):
    """Stages K and V exactly until the prompt ends, then settles them: chunked prefill equals prefill in one block.

    A new turn unpacks what was kept, attends to it exactly, and settles again. `staged` may be the layer's own store, which saves
    a copy.
    """

    per_row: ClassVar[tuple[str, ...]] = ("staged",)
    counted = ("fresh",)

    def __init__(self, layer_idx: int, shape: ModelShape) -> None:
        super().__init__(layer_idx, shape)
        self.staged: ResidentStore | None = None
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None  # a prompt that came in one unpadded block
        self.clear()

    # -- what a family writes ---------------------------------------------------------------------------------------

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        """The prompt is complete: evict, index or pack it.

        k, v (n, h_kv, >= max(lengths), d): row r's tokens are at 0 .. lengths[r]-1.
        """
        raise NotImplementedError

    def unpack(self) -> ResidentStore:
        """At the start of a new turn: everything kept, decoded. The turn's tokens are appended to it."""
        raise NotImplementedError

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        """Called per prompt block, before it is settled: q (n, h, t, d) against all staged keys (n, h_kv, length, d).

        Row r holds stored[r] entries; the last ctx.step.counts[r] of them are this block's.
        """

    def sums_from(self, lengths: list[int]) -> int | None:
        """The query from which on `observe` wants to know what each key receives from a whole prompt's (`ctx.column_sums`).

        lengths: of the prompts, all rows' alike. 0: from every query; None: from none.
        """
        return None

    # -- the flow ---------------------------------------------------------------------------------------------------

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        step = ctx.step
        if step.first and step.ends_prompt and not step.padded:
            self.fresh = (k, v)
            if ctx.cache.attn == "standard":
                ctx.probs = standard_probabilities(q, k, mask, ctx.scaling)
            first = self.sums_from(step.total)
            both = None if first is None else prefill_and_sum(q, k, v, mask, ctx, first=first)
            ctx.column_sums = None if first is None or both is None else ColumnSums(first, both[1])
            self.observe(q, k, step.total, ctx)
            ctx.column_sums = None
            if both is not None:
                return both[0]
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
            (k, ctx.values), lengths = self.fresh, ctx.step.total
        else:
            assert self.staged is not None
            (k, ctx.values), lengths = self.staged.view(), self.staged.lengths
        self.settle(k, ctx.values, lengths, ctx)
        self.fresh = self.staged = ctx.values = None

    def clear(self) -> None:
        self.fresh = self.staged = None


def exact_copy(store: Store) -> ResidentStore:
    """Everything a store holds, decoded, on the device."""
    copy = ResidentStore()
    copy.load(*store.view(), store.lengths)
    return copy
