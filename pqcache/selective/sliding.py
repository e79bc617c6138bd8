"""SlidingLayer: a layer whose queries see the newest tokens alone. No method serves it; older tokens are dropped.

In models that mix such layers with layers of full attention (Gemma 3, OLMo 3, EXAONE 4), a method serves the latter.
"""

from statistics import fmean

import torch

from pqcache.selective.attention import attend_rows
from pqcache.selective.layer import LayerContext, SelectiveLayer, WatchedCall
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import dense_attention
from pqcache.store.step import Window


class SlidingLayer(SelectiveLayer):
    """Keeps the newest `window` columns of K and V, (n, h_kv, at most window, d), and attends to them.

    Column c is in slot c % window: the token that leaves the window makes room for the one that enters. Keys are stored rotated,
    so their order does not matter.
    """

    per_row = ("k", "v")
    attends_all = True

    def __init__(self, layer_idx: int, shape: ModelShape, window: int) -> None:
        super().__init__(layer_idx, shape)
        self.window = window
        self.clear()

    def clear(self) -> None:
        self.k: torch.Tensor = None  # type: ignore[assignment]
        self.v: torch.Tensor = None  # type: ignore[assignment]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        self.scaling = ctx.scaling
        if not ctx.step.decode:
            self.substitute = None
            out = self.prefill(q, k, v, mask, ctx)
        elif self.substitute is None:
            out = self.decode(q, k, v, ctx)
        else:
            out = self.substitute.run(q, k, v, ctx.scaling)
        for watcher in ctx.cache.watchers:
            if watcher.every_layer:
                watcher.watch(WatchedCall(self, q, k, v, out, ctx))
        return out

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        t = q.shape[2]
        before = self.columns - t
        old = min(before, self.window - 1)
        keys, values = k, v
        if old:
            slots = torch.arange(before - old, before, device=k.device) % self.window
            keys, values = (torch.cat([x[:, :, slots], new], 2) for x, new in ((self.k, k), (self.v, v)))
        if ctx.recorded:
            out = ctx.cache.kernel(ctx.module, q, k, v, None, scaling=ctx.scaling, dropout=0.0)[0]
        else:
            parts = [self._block(q, keys, values, start, old, ctx) for start in range(0, t, self.window)]
            out = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        self._keep(keys, values, ctx.cache.expected)
        return out

    def _block(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, old: int, ctx: LayerContext
    ) -> torch.Tensor:
        """Attention of at most `window` queries from number `start` on. k, v: `old` columns, then those of all queries."""
        block = q[:, :, start : start + self.window]
        end = old + start + block.shape[2]
        first = max(0, old + start - self.window + 1)  # of the keys that the first query sees
        query = torch.arange(old + start, end, device=q.device)[:, None]
        key = torch.arange(first, end, device=q.device)
        seen = (key <= query) & (key > query - self.window)
        pads = [pad - (self.columns - k.shape[2]) for pad in self._pads(ctx)]  # counted as the keys are
        if max(pads) > first:  # padding sees itself: a row of nothing has no softmax
            real = key >= torch.tensor(pads, device=q.device)[:, None, None]
            seen = (seen & real | (key == query))[:, None]
        elif first == 0 and old + start == 0:
            seen = None  # type: ignore[assignment]  # the causal mask
        else:
            seen = seen[None, None]
        attended = k[:, :, first:end], v[:, :, first:end]
        return dense_attention(ctx.module, block, *attended, seen, scaling=ctx.scaling, dropout=0.0)[0]

    def step_parts(self) -> Window | None:
        cache = None if self.owner is None else self.owner()
        assert cache is not None
        return self if max(cache.pads) <= max(0, self.columns - self.window) else None  # no padding in the window

    def note_step(self, ledger: Ledger) -> None:
        """Nothing to count: attended tokens are those of the layers that a method serves."""

    def _pads(self, ctx: LayerContext) -> list[int]:
        """Columns of padding before each row's first token."""
        return [self.columns - total for total in ctx.step.total]

    def _keep(self, k: torch.Tensor, v: torch.Tensor, expected: int) -> None:
        """Store the newest of the columns k, v (n, h_kv, m, d), which end with the newest one of all."""
        count = min(k.shape[2], self.window)
        if self.k is None or self.v is None:
            self.k, self.v = (x.new_zeros((*x.shape[:2], 0, x.shape[3])) for x in (k, v))
        self.reserve(max(self.columns, expected))
        slots = torch.arange(self.columns - count, self.columns, device=k.device) % self.window
        self.k[:, :, slots], self.v[:, :, slots] = k[:, :, -count:], v[:, :, -count:]

    def reserve(self, columns: int) -> None:
        """Make room for the window of so many columns; what is stored stays where it is."""
        slots, room = min(self.window, columns), self.k.shape[2]
        if room < slots:
            more = (0, 0, 0, min(self.window, max(slots, 2 * room)) - room)
            self.k, self.v = (torch.nn.functional.pad(x, more) for x in (self.k, self.v))

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        held = min(self.columns, self.window)
        self.reserve(held)
        slot = (self.columns - 1) % self.window
        self.k[:, :, slot], self.v[:, :, slot] = k[:, :, 0], v[:, :, 0]
        keys, values, pads = self.k[:, :, :held], self.v[:, :, :held], self._pads(ctx)
        oldest = self.columns - held
        if max(pads) <= oldest:
            return attend_rows(q, keys, values, [held] * len(q), ctx.scaling)
        slots = torch.arange(held, device=q.device)
        column = oldest + (slots - oldest) % self.window
        seen = column >= torch.tensor(pads, device=q.device)[:, None, None, None]
        return dense_attention(ctx.module, q, keys, values, seen, scaling=ctx.scaling, dropout=0.0)[0]

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Until a token has left the window: it is not held any more."""
        return self.columns <= self.window

    def truncate(self, tokens: int) -> None:
        """The slots of what is forgotten are written again."""


class WindowedLayer(SlidingLayer):
    """The same where all layers slide and the method keeps all that they see: it serves them, and their tokens are counted."""

    attend = SelectiveLayer.attend
    note_step = SelectiveLayer.note_step

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        attended = fmean(min(total, self.window) for total in ctx.step.total)
        ctx.cache.ledger.attend(self.layer_idx, attended, selecting=False)
        return super().decode(q, k, v, ctx)

    def held_positions(self) -> torch.Tensor | None:
        cache = None if self.owner is None else self.owner()
        if self.k is None or cache is None:
            return None
        slots = torch.arange(min(self.columns, self.window), device=self.k.device)
        oldest = self.columns - len(slots)
        columns = oldest + (slots - oldest) % self.window
        positions = columns - torch.tensor(cache.pads, device=slots.device)[:, None, None]
        return positions.clamp_min(-1).expand(-1, self.shape.h_kv, -1)
