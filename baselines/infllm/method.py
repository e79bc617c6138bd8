"""InfLLM: a sliding window and a memory of blocks, already during prefill (Xiao et al., arXiv 2402.04617, section 2)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from baselines.infllm.block_store import BlockStore, Columns, HostBlockStore, block_step
from pqcache.selective import rope
from pqcache.selective.attention import Part, merge, partial
from pqcache.selective.budget import Plan, partition_plan
from pqcache.selective.column_sums import accumulator_dtype, add_column_sums
from pqcache.selective.group import top_tokens
from pqcache.selective.layer import DenseLayer, LayerContext, SelectiveLayer, Step, dense_prefill
from pqcache.selective.method import Method, NotBuilt
from pqcache.selective.retrieval import Candidates, Selected
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.buffer import Buffer
from pqcache.store.resident import ResidentStore

QUERIES = 128  # whose logits exist at a time during prefill
ROTATED, RAW, VALUE, MASS = range(4)  # what `near` holds of a token: K as the model gives it, K before RoPE, V, scores


@dataclass(frozen=True)
class BlockPlan(Plan):
    """A plan in InfLLM's own terms. `local` does not count the current token, which the window does."""

    window: int  # n_local: a query attends exactly to itself and the window - 1 tokens before it
    topk: int  # blocks retrieved
    exc: int  # queries of the prompt that choose their blocks together

    def left(self, length: int) -> int:
        """How many of `length` tokens are outside the window of the last of them."""
        return max(0, length - self.window)


class InfLLMLayer(SelectiveLayer):
    """Positions of a row: [init | blocks | remainder | window]. The first three are far: one constant distance, or true.

    `near` holds remainder and window of all rows; the rest of the state is per row, in Python integers.
    """

    def __init__(self, layer_idx: int, shape: ModelShape, method: InfLLM) -> None:
        super().__init__(layer_idx, shape)
        self.method = method
        self.far = ROTATED if method.true_positions else RAW  # the form in which far keys are kept
        self.units = shape.h if method.per_head else 1
        self.clear()

    def clear(self) -> None:
        self.lengths: list[int] = []
        self.final: list[int] = []  # the prompt lengths that `plans` were made for
        self.plans: list[BlockPlan] = []
        self.left: list[int] = []  # tokens that have left the window, for good
        self.near: Columns | None = None
        self.init: list[torch.Tensor] = []  # K, V (n, h_kv, n_init, d)
        self.blocks: BlockStore | None = None
        self.reps: Buffer | None = None  # (n, h, blocks, d)
        self.staged: ResidentStore | None = None  # dense_prefill: the whole prompt, until it ends

    # -- where tokens are -------------------------------------------------------------------------------------------

    def _starts(self) -> list[int]:
        """Per row, the position behind the last block."""
        assert self.blocks is not None
        return [self.method.init_tokens + self.method.block * count for count in self.blocks.counts]

    def _oldest(self) -> int:
        """The first column that `near` must still hold."""
        assert self.near is not None
        held = [min(start, left) for start, left in zip(self._starts(), self.left, strict=True)]
        return min(self.near.end - length + first for length, first in zip(self.lengths, held, strict=True))

    def check_step(self, step: Step) -> None:
        """The blocks of an execution chunk are chosen by the mean of its queries, so all of them must be there."""
        if step.decode or self.method.dense_prefill:
            return
        for row, (total, final) in enumerate(zip(step.total, step.final, strict=True)):
            plan = self.method.plan(final, self.layer_idx, self.shape.n_layers)
            left = max(plan.left(final), self.left[row] if self.left and not step.first else 0)
            chooses = left >= self.method.init_tokens + self.method.block * (plan.topk + 1)
            if chooses and 0 < total < final and total % plan.exc:
                raise ValueError(
                    f"a chunk of the prompt ends at token {total} of row {row}, inside one of infllm's execution chunks of"
                    f" {plan.exc} queries: allowed are multiples of {plan.exc} in every row (or method.exc_block=1, or"
                    " method.dense_prefill=true, under which any chunks do)"
                )

    def _begin(self, k: torch.Tensor, ctx: LayerContext) -> None:
        """Plan a prompt or a new turn when its first block arrives; make the state of a new request."""
        step, method, n = ctx.step, self.method, k.shape[0]
        if self.final != step.final:
            self.final = step.final
            self.plans = [method.plan(s, self.layer_idx, self.shape.n_layers) for s in step.final]
        if self.near is None:
            sums = k.new_zeros((n, self.shape.h, 0), dtype=accumulator_dtype(k))
            self.near = Columns([k, k, k, sums])
            self.init = [k.new_zeros((n, k.shape[1], method.init_tokens, k.shape[3])) for _ in range(2)]
            self.lengths, self.left = [0] * n, [0] * n
            self.reps = Buffer(n, self.shape.h, k.shape[3:], k.dtype, k.device, step=block_step(method.block))
            self.blocks = BlockStore(n, k, method.block)
            if method.store == "host":
                assert method.max_cached_blocks is not None
                self.blocks = HostBlockStore(
                    n, k, method.block, self.units, method.max_cached_blocks, ctx.cache.ledger.move
                )
        assert self.blocks is not None and self.reps is not None
        ends = [max(left, plan.left(s)) for left, plan, s in zip(self.left, self.plans, step.final, strict=True)]
        blocks = max(0, max(ends) - method.init_tokens) // method.block
        self.blocks.reserve(blocks)
        self.reps.reserve(blocks)

    def _append(self, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> None:
        """Store a pass's tokens: k, v (n, h_kv, t, d)."""
        assert self.near is not None
        step, t = ctx.step, k.shape[2]
        cos, sin = self._tables(ctx)
        raw = rope.rotate(ctx.module, k.to(cos.dtype), cos, -sin).to(k.dtype)
        sums = k.new_zeros((k.shape[0], self.shape.h, t), dtype=accumulator_dtype(k))
        self.near.append((k, raw, v, sums), step.counts, self._oldest())
        if min(step.past) < self.method.init_tokens:
            for row, (past, count) in enumerate(zip(step.past, step.counts, strict=True)):
                end = min(past + count, self.method.init_tokens)
                for x, init in zip((k if self.far == ROTATED else raw, v), self.init, strict=True):
                    init[row, :, past:end] = x[row, :, t - count : t - count + max(0, end - past)].detach()
        self.lengths = step.total

    def _advance(self, row: int, length: int) -> None:
        """`length` tokens of a row are processed: what has left the window for good may form blocks."""
        assert self.near is not None and self.blocks is not None and self.reps is not None
        method, block, first = self.method, self.method.block, self.blocks.counts[row]
        self.left[row] = max(self.left[row], self.plans[row].left(length))
        m = (self.left[row] - method.init_tokens) // block - first
        if m <= 0:
            return
        assert method.reps is not None
        lo = self.near.end - self.lengths[row] + method.init_tokens + block * first
        raw, far, value, mass = (
            self.near.view(i, lo, lo + m * block, slice(row, row + 1))[0] for i in (RAW, self.far, VALUE, MASS)
        )
        h, (h_kv, _, d) = self.shape.h, raw.shape
        top = top_tokens(mass.unflatten(1, (m, block)), [method.reps] * h)
        share = mass.new_zeros((h, m, block)).scatter_(2, top, 1 / method.reps)
        keys = raw.to(share.dtype).unflatten(1, (m, block))
        rep = share.view(h_kv, h // h_kv, m, 1, block) @ keys[:, None]
        self.reps.reserve(first + m)
        self.reps.data[row, :, first : first + m] = rep.view(h, m, d).to(self.reps.data.dtype)
        self.blocks.put(row, far, value)

    # -- rotations --------------------------------------------------------------------------------------------------

    def _tables(self, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        """This pass's cos and sin in fp32, scaled to a pure rotation: a model's attention scaling stays in its keys."""
        key = ("infllm",)
        if key not in ctx.step.masks:
            ctx.step.masks[key] = _unit(ctx.cos, ctx.sin)
        return ctx.step.masks[key]

    def _far_query(self, q: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """q (n, h, t, d), rotated as the model did, at the constant distance from keys before RoPE instead: fp32."""
        windows = tuple(
            min(plan.window, length) for plan, length in zip(self.plans, self.lengths, strict=True)
        )  # where it is longer, nothing is far
        key = ("infllm", windows)
        cos, sin = self._tables(ctx)
        if key not in ctx.step.masks:
            at = torch.tensor(windows, device=q.device)[:, None] - 1
            c, s = _unit(*rope.tables(ctx.rotary, cos, at))
            ctx.step.masks[key] = (c * cos + s * sin, s * cos - c * sin)
        return rope.rotate(ctx.module, q.to(cos.dtype), *ctx.step.masks[key])

    # -- attention --------------------------------------------------------------------------------------------------

    def _choose(self, q: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
        """Blocks for far queries q (n', h, d) of `rows`: (n', 1 or h, k) ascending, -1 = padding; None if there are none."""
        assert self.blocks is not None and self.reps is not None
        counts = [self.blocks.counts[row] for row in rows]
        k = [min(self.plans[row].topk, count) for row, count in zip(rows, counts, strict=True)]
        if not max(k):
            return None
        column = torch.arange(max(counts), device=q.device)
        ragged = len(set(counts)) > 1
        valid = None
        if ragged:
            valid = (column[None] < torch.tensor(counts, device=q.device)[:, None])[:, None]
        if k == counts:
            ids = column.expand(len(rows), self.units, -1)
            return ids if valid is None else torch.where(valid, ids, -1)
        reps = self.reps.data[rows[0] : rows[-1] + 1, :, : max(counts)].to(q.dtype)
        scores = (reps @ q[..., None])[..., 0]
        if not self.method.per_head:
            scores = scores.sum(1, keepdim=True)
        return top_tokens(scores if valid is None else scores.masked_fill(~valid, -torch.inf), k)

    def _attend(
        self,
        rows: Sequence[int],
        q: torch.Tensor,
        far_q: torch.Tensor | None,
        at: Sequence[int],
        ids: torch.Tensor | None,
        fetched: tuple[torch.Tensor, torch.Tensor] | None,
        scaling: float,
    ) -> torch.Tensor:
        """Queries q (n', h, t, d) of consecutive `rows`, row i's at positions at[i], at[i] + 1, ...: (n', h, t, d) fp32.

        ids, fetched: the blocks they chose, and K, V of these. Adds what keys inside the window received to their scores.
        """
        near, t, device = self.near, q.shape[2], q.device
        assert near is not None
        span = slice(rows[0], rows[-1] + 1)
        pads = [near.end - self.lengths[row] for row in rows]
        left, starts = [self.left[row] for row in rows], [self._starts()[row] for row in rows]
        windows = [self.plans[row].window for row in rows]
        # the first position inside the window, of the first and of the last query
        edges = [max(x, a - w + 1) for x, a, w in zip(left, at, windows, strict=True)]
        last = [max(x, a + t - w) for x, a, w in zip(left, at, windows, strict=True)]
        lo, hi = (
            min(p + e for p, e in zip(pads, edges, strict=True)),
            max(p + a + t for p, a in zip(pads, at, strict=True)),
        )
        behind = [(p + start, p + e) for p, start, e in zip(pads, starts, last, strict=True) if e > start]  # remainders
        first, end = (min(a for a, _ in behind), max(b for _, b in behind)) if behind else (lo, lo)
        init = min(self.method.init_tokens, max(last))
        ragged = ids is not None and len({self.blocks.counts[row] for row in rows}) > 1  # type: ignore[union-attr]
        masked = t > 1 or ragged or len(set(zip(pads, edges, starts, strict=True))) > 1

        local_mask = far_mask = None
        if masked:
            pad, start = (torch.tensor(x, device=device)[:, None, None] for x in (pads, starts))
            position = torch.tensor(at, device=device)[:, None] + torch.arange(t, device=device)
            edge = torch.tensor(left, device=device)[:, None]
            edge = torch.maximum(edge, position + 1 - torch.tensor(windows, device=device)[:, None])[..., None]
            column = torch.arange(lo, hi, device=device) - pad
            local_mask = ((column >= edge) & (column <= position[..., None]))[:, None]
            column = torch.arange(first, end, device=device) - pad
            parts = [
                (torch.arange(init, device=device) < edge)[:, None],
                ((column >= start) & (column < edge))[:, None],
            ]
            if ids is not None:
                chosen = (ids >= 0).repeat_interleave(self.method.block, -1)[:, :, None].expand(-1, -1, t, -1)
                parts = [x.expand(-1, self.units, -1, -1) for x in parts]
                parts.insert(1, chosen)
            far_mask = torch.cat(parts, -1)

        keys, values = near.view(ROTATED, lo, hi, span), near.view(VALUE, lo, hi, span)
        local = joint = partial(q, keys, values, scaling, local_mask, probs=True)
        if far_q is not None and (init or behind or ids is not None):
            far = []
            for x, i, form in zip(self.init, range(2), (self.far, VALUE), strict=True):
                pieces = [x[span, :, :init], near.view(form, first, end, span)]
                if fetched is not None:
                    if self.units > 1:
                        pieces = [piece.repeat_interleave(self.shape.group, 1) for piece in pieces]
                    pieces.insert(1, fetched[i])
                far.append(torch.cat(pieces, 2))
            joint = merge([local, partial(q if self.far == ROTATED else far_q, far[0], far[1], scaling, far_mask)])
        self._note(local, joint, near.view(MASS, lo, hi, span))
        return joint.out

    @staticmethod
    def _note(local: Part, joint: Part, sums: torch.Tensor) -> None:
        """Add the probabilities, of the joint softmax, that the window's keys received."""
        assert local.probs is not None
        sums += (local.probs * torch.exp(local.lse - joint.lse)[..., None]).sum(2).detach()

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        self._begin(k, ctx)
        assert self.near is not None
        out = self._exact(q, k, v, mask, ctx) if self.method.dense_prefill else self._sparse(q, k, v, ctx)
        self.near.compact(self._oldest())
        return out

    def finish_prompt(self, ctx: LayerContext) -> None:
        self.staged = None

    def load(self, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> None:
        """A whole prompt k, v (n, h_kv, t, d) without its attention, as benchmarks have it: no token was ever scored."""
        self._begin(k, ctx)
        self._append(k, v, ctx)
        for row, length in enumerate(self.lengths):
            self._advance(row, length)
        assert self.near is not None
        self.near.compact(self._oldest())

    def _sparse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """The published prefill, row by row: execution chunks end at the same positions however the prompt arrives."""
        self._append(k, v, ctx)
        step, t = ctx.step, q.shape[2]
        out = torch.zeros_like(q)
        far_q = None
        if any(plan.left(x) or left for plan, x, left in zip(self.plans, step.total, self.left, strict=True)):
            far_q = self._far_query(q, ctx)
        for row, (at, total) in enumerate(zip(step.past, step.total, strict=True)):
            exc = self.plans[row].exc
            while at < total:
                stop = min(total, (at // exc + 1) * exc)
                chunk = slice(t - total + at, t - total + stop)
                far = None if far_q is None else far_q[row : row + 1, :, chunk]
                out[row, :, chunk] = self._chunk(row, q[row : row + 1, :, chunk], far, at, ctx).to(q.dtype)
                self._advance(row, stop)
                at = stop
        return out.transpose(1, 2)

    def _chunk(self, row: int, q: torch.Tensor, far_q: torch.Tensor | None, at: int, ctx: LayerContext) -> torch.Tensor:
        """One execution chunk, queries (1, h, t, d) from position `at` on: (h, t, d) fp32."""
        assert self.blocks is not None
        ids = None if far_q is None else self._choose(far_q.mean(2), [row])
        fetched = None if ids is None else self.blocks.take(ids, [row], self.shape.h)
        out = []
        for start in range(0, q.shape[2], QUERIES):
            some = slice(start, start + QUERIES)
            far = None if far_q is None else far_q[:, :, some].contiguous()
            out.append(self._attend([row], q[:, :, some].contiguous(), far, [at + start], ids, fetched, ctx.scaling)[0])
        return torch.cat(out, 1)

    def _exact(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        """Dense attention over everything; only the scores are those of the window."""
        assert self.near is not None
        step, keys, stored = ctx.step, k, ctx.step.total
        if step.first and step.ends_prompt and not step.padded:
            out = dense_prefill(q, k, v, mask, None, ctx)
        else:
            if self.staged is None:
                self.staged = ResidentStore() if step.first else self._everything(ctx)
            self.staged.append(k, v, step.counts)
            out = dense_prefill(q, k, v, mask, self.staged, ctx)
            keys = self.staged.view()[0]
        self._append(k, v, ctx)
        sums = k.new_zeros((k.shape[0], self.shape.h, max(stored)), dtype=accumulator_dtype(k))
        windows = [plan.window for plan in self.plans]
        add_column_sums(sums, q, keys, stored, step.counts, ctx.scaling, windows=windows)
        for row, length in enumerate(stored):
            pad = self.near.end - length
            lo = max(self.left[row], self.near.base - pad)
            self.near.view(MASS, pad + lo, pad + length, slice(row, row + 1))[0] += sums[row, :, lo:length]
            self._advance(row, length)
        return out

    def _everything(self, ctx: LayerContext) -> ResidentStore:
        """All tokens of all rows with K at their true rotation, for a new turn's exact attention."""
        assert self.near is not None and self.blocks is not None
        near, n, longest = self.near, len(self.lengths), max(self.lengths)
        both = [x.new_zeros((n, x.shape[1], longest, x.shape[3])) for x in self.init]
        for row, (length, start) in enumerate(zip(self.lengths, self._starts(), strict=True)):
            cut, pad = min(start, self.left[row]), near.end - length
            early = [x[row, :, :cut] for x in self.init]
            if self.blocks.counts[row]:
                early = [torch.cat(pair, 1) for pair in zip(early, self.blocks.whole(row), strict=True)]
            if cut and self.far == RAW:
                at = torch.arange(cut, device=early[0].device)[None]
                if ctx.position_ids is not None:  # a caller may count padding columns as positions
                    at = at + ctx.position_ids[-1 if len(ctx.position_ids) == 1 else row, -1] - ctx.step.total[row] + 1
                wide = early[0][None].to(accumulator_dtype(early[0]))
                early[0] = rope.rotate(ctx.module, wide, *_unit(*rope.tables(ctx.rotary, wide, at)))[0]
            for x, part, form in zip(both, early, (ROTATED, VALUE), strict=True):
                x[row, :, :cut] = part
                x[row, :, cut:length] = near.view(form, pad + cut, near.end, slice(row, row + 1))[0]
        store = ResidentStore()
        store.load(both[0], both[1], self.lengths)
        return store

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self._append(k, v, ctx)
        assert self.blocks is not None
        rows, at = range(len(self.lengths)), [length - 1 for length in self.lengths]
        edges = [max(x, plan.left(length)) for x, plan, length in zip(self.left, self.plans, self.lengths, strict=True)]
        far_q = ids = fetched = None
        if max(edges):
            far_q = self._far_query(q, ctx)
            ids = self._choose(far_q[:, :, 0], rows)
            if ids is not None:
                fetched = self.blocks.take(ids, rows, self.shape.h)
                if isinstance(self.blocks, HostBlockStore):
                    ctx.cache.ledger.look_up(*self.blocks.served)
        out = self._attend(rows, q, far_q, at, ids, fetched, ctx.scaling)
        self._report(edges, ids, ctx)
        for row, length in enumerate(self.lengths):
            self._advance(row, length)
        return out.to(q.dtype).transpose(1, 2)

    def _report(self, edges: list[int], ids: torch.Tensor | None, ctx: LayerContext) -> None:
        """Tell ledger and observers what this step attended; nothing has advanced yet."""
        assert self.blocks is not None
        init, block, starts = self.method.init_tokens, self.method.block, self._starts()
        taken = [min(plan.topk, count) * block for plan, count in zip(self.plans, self.blocks.counts, strict=True)]
        attended = [
            min(init, edge) + max(0, edge - start) + k + length - edge
            for edge, start, k, length in zip(edges, starts, taken, self.lengths, strict=True)
        ]
        tokens = sum(attended) / len(attended)
        union = None
        if ids is not None and self.units > 1:
            marks = ids.new_zeros((len(edges), self.shape.h_kv, 1 + max(self.blocks.counts)))
            marks.scatter_(2, (ids + 1).view(len(edges), self.shape.h_kv, -1), 1)  # -1, padding, falls on column 0
            distinct = marks[..., 1:].sum(-1, dtype=torch.float32).mean() * block
            union = tokens - sum(taken) / len(taken) + distinct
        ctx.cache.ledger.attend(self.layer_idx, tokens, selecting=True, union=union)
        if ctx.cache.observers or ctx.cache.watchers:
            indices = None
            if ids is not None:
                indices = init + ids[..., None] * block + torch.arange(block, device=ids.device)
                indices = torch.where(ids[..., None] < 0, -1, indices).flatten(2)
            local = [max(0, length - 1 - start) for length, start in zip(self.lengths, starts, strict=True)]
            self.selected = Selected(init, indices, Candidates(init, starts, taken, self.lengths), local)

    # -- rows -------------------------------------------------------------------------------------------------------

    def map_rows(self, index: torch.Tensor) -> None:
        if self.near is None or self.blocks is None or self.reps is None:
            return
        for part in (self.near, self.blocks, self.reps, *((self.staged,) if self.staged is not None else ())):
            part.map_rows(index)
        self.init = [x.index_select(0, index.to(x.device)) for x in self.init]
        rows = index.tolist()
        self.lengths, self.final, self.left = ([x[i] for i in rows] for x in (self.lengths, self.final, self.left))
        self.plans = [self.plans[i] for i in rows]

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        if self.near is None or self.blocks is None or self.reps is None:
            return {}
        tiers = self.blocks.tensors()
        staged = [] if self.staged is None else self.staged.tensors()["device"]
        device = [*tiers.get("device", ()), *self.near.tensors(), *self.init, self.reps.data, *staged]
        return {**tiers, "device": device}


def _unit(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin as a pure rotation, in fp32: 16-bit tables are not one, and some families scale theirs."""
    cos, sin = (x.to(accumulator_dtype(x)) for x in (cos, sin))
    norm = (cos**2 + sin**2).sqrt()
    return cos / norm, sin / norm


@dataclass(kw_only=True)
class InfLLM(Method):
    """n_init: first tokens, attended for good once they have left the window. n_local: the window, the query's own token
    included. block: tokens of a block. reps: its tokens that received most attention inside the window; the mean of their
    keys represents it. topk: blocks retrieved. exc_block: at most so many queries of a prompt choose blocks together, by
    their mean. store, max_cached_blocks: with host, blocks live there and so many of them also on the device (LRU).
    per_head: every query head chooses its own blocks.

    dense_prefill: the prompt is attended to exactly, blocks are for decode only. true_positions: far tokens keep their true
    distance instead of n_local - 1. Both together isolate the quality of the selection.

    Aligned: n_local is recent_ratio of the budget (of the tokens after n_init, which come on top of a ratio), topk blocks
    the rest, rounded up; n_init 32, one representative. Up to a block of tokens that have left the window and are not in a
    block yet come on top. Paper: the fixed sizes of the released configuration, whatever the budget. Budget 1.0 is dense.

    Deviations: the current token is inside the window, as published. Keys are un-rotated after projection. A prompt of at
    most n_init tokens, and one that a token budget covers, is dense until more tokens than that were generated. A new turn
    plans anew; tokens that have left the window stay out. With topk > max_cached_blocks, topk blocks are cached. During
    prefill, chunks that cut an execution chunk are refused: its queries choose together.
    """

    name: ClassVar[str] = "infllm"

    n_init: int | None = None
    n_local: int | None = None
    topk: int | None = None
    reps: int | None = None
    recent_ratio: float = 0.5
    block: int = 128
    exc_block: int = 512
    max_cached_blocks: int = 32
    policy: str = "lru"
    store: str = "resident"
    per_head: bool = False
    dense_prefill: bool = False
    true_positions: bool = False

    def validate(self) -> None:
        paper = self.protocol == "paper"
        if self.n_init is None:
            self.n_init = 128 if paper else 32
        if self.reps is None:
            self.reps = 4 if paper else 1
        if paper:
            self.n_local = 4096 if self.n_local is None else self.n_local
            self.topk = 16 if self.topk is None else self.topk
        self.require("n_init", self.n_init >= 0, "an int >= 0")
        self.require("n_local", self.n_local is None or self.n_local >= 1, "null or an int >= 1")
        self.require("topk", self.topk is None or self.topk >= 0, "null or an int >= 0")
        self.require("recent_ratio", 0 <= self.recent_ratio <= 1, "a float in [0, 1]")
        for name in ("block", "exc_block", "max_cached_blocks"):
            self.require(name, getattr(self, name) >= 1, "an int >= 1")
        self.require("reps", 1 <= self.reps <= self.block, f"an int in 1..{self.block}, the tokens of a block")
        self.require_one_of("store", ("resident", "host", "block_cache"))
        self.require_one_of("policy", ("lru", "lru-s"))
        if self.store == "block_cache":
            raise NotBuilt("store=block_cache: not built yet; store=host keeps max_cached_blocks on the device")
        if self.policy != "lru":
            raise NotBuilt("policy=lru-s: not built yet; built is lru")

    @property
    def traceable(self) -> bool:
        """Only then do the tokens attended determine the output: else far ones are attended at another distance."""
        return self.dense_prefill and self.true_positions

    @property
    def init_tokens(self) -> int:
        assert self.n_init is not None
        return self.n_init

    def check_budget(self) -> None:
        if self.budget.tokens is not None and self.n_local is None and self.budget.tokens <= self.init_tokens + 1:
            raise NotApplicable(
                f"budget={self.budget.tokens}: infllm needs more than {self.n_init} init tokens + 1 token"
            )

    def plan(self, s: int, layer_idx: int, n_layers: int) -> BlockPlan:
        shares = partition_plan(self.budget, s, self.init_tokens, self.recent_ratio)
        window, total = shares.local, shares.local + shares.k
        if self.n_local is not None:
            window = self.n_local
        elif s <= self.init_tokens:
            window = sys.maxsize
        elif self.budget.tokens is not None and self.budget.tokens >= s:
            window = self.budget.tokens
        blocks = self.topk if self.topk is not None else -(-max(0, total - window) // self.block)
        k = min(blocks * self.block, max(0, s - shares.sinks - window))
        return BlockPlan(
            shares.sinks,
            max(0, min(s - shares.sinks, window) - 1),
            k,
            window=window,
            topk=blocks,
            exc=min(self.exc_block, window),
        )

    def make_layer(self, layer_idx: int, shape: ModelShape) -> SelectiveLayer:
        return DenseLayer(layer_idx, shape) if self.budget.is_everything else InfLLMLayer(layer_idx, shape, self)

    @classmethod
    def noop(cls, **hyper: Any) -> Self:
        """A window that holds everything, through all the machinery; budget 1.0 is the plain dense layer."""
        from pqcache.selective.budget import Budget

        return cls(**{"budget": Budget(ratio=0.5), **hyper, "n_local": sys.maxsize})
