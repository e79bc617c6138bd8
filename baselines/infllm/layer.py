"""InfLLM's layer: attention to a window exactly and to retrieved blocks at one distance, in prefill and decode."""

from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from pqcache.selective import rope
from pqcache.selective.attention import Part, merge, partial, with_sinks
from pqcache.selective.column_sums import accumulator_dtype, add_column_sums
from pqcache.selective.dense import dense_prefill, prefill_and_sum
from pqcache.selective.group import marks
from pqcache.selective.index import Candidates, Selected
from pqcache.selective.layer import LayerContext, SelectiveLayer, Step
from pqcache.selective.shape import ModelShape
from pqcache.store.resident import ResidentStore
from pqcache.store.transfer import table

from .block_store import HostBlockStore
from .in_place import attend_in_place
from .memory import MASS, ROTATED, VALUE, BlockMemory, BlockPlan, Sizes, pure_rotation

QUERIES = 128  # queries whose logits exist at a time during prefill


class InfLLMLayer(SelectiveLayer):
    """One transformer layer under InfLLM. Its tokens are in `memory`, made when the first block of a prompt arrives.

    plan: of a prompt, or of a step after so many tokens, where the method `replans`. dense_prefill: as the method's option.
    most: tokens that a step may attend, with whole blocks; None: as planned.
    """

    per_row = ("memory", "staged", "final")

    def __init__(
        self,
        layer_idx: int,
        shape: ModelShape,
        sizes: Sizes,
        plan: Callable[[int], BlockPlan],
        *,
        dense_prefill: bool,
        replans: bool,
        most: int | None,
    ) -> None:
        super().__init__(layer_idx, shape)
        self.sizes, self.plan, self.dense_prefill, self.replans, self.most = sizes, plan, dense_prefill, replans, most
        self.clear()

    def clear(self) -> None:
        self.memory: BlockMemory | None = None
        self.final: list[int] = []  # the prompt lengths that the memory's plans were made for
        self.staged: ResidentStore | None = None  # dense_prefill: the whole prompt, until it ends

    def check_step(self, step: Step) -> None:
        """Refuse a pass that ends inside an execution chunk: the mean of the chunk's queries chooses its blocks."""
        if step.decode or self.dense_prefill:
            return
        for row, (total, final) in enumerate(zip(step.total, step.final, strict=True)):
            plan = self.plan(final)
            left = max(plan.left(final), self.memory.left[row] if self.memory is not None and not step.first else 0)
            chooses = left >= self.sizes.n_sink + self.sizes.block * (plan.topk + 1)
            if chooses and 0 < total < final and total % plan.exc:
                raise ValueError(
                    f"a chunk of the prompt ends at token {total} of row {row}, inside one of infllm's execution chunks of"
                    f" {plan.exc} queries: allowed are multiples of {plan.exc} in every row (or method.exc_block=1, or"
                    " method.dense_prefill=true, under which any chunks do)"
                )

    # -- prefill ----------------------------------------------------------------------------------------------------

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor:
        memory = self._begin(k, ctx)
        if self.dense_prefill:
            out = self._dense_prefill(q, k, v, mask, memory, ctx)
        else:
            out = self._sparse_prefill(q, k, v, memory, ctx)
        memory.near.compact(memory.oldest())
        return out

    def finish_prompt(self, ctx: LayerContext) -> None:
        self.staged = None

    def load(self, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> None:
        """Store a prompt k, v (n, h_kv, t, d) without attending, for benchmarks: all scores stay 0."""
        memory = self._begin(k, ctx)
        self._append(k, v, memory, ctx)
        for row, length in enumerate(memory.lengths):
            memory.advance(row, length)
        memory.near.compact(memory.oldest())

    def _begin(self, k: torch.Tensor, ctx: LayerContext) -> BlockMemory:
        """Plan a prompt or a new turn when its first block arrives; make the memory of a new request."""
        final = ctx.step.final
        if self.memory is None:
            self.memory = BlockMemory(self.sizes, self.shape, k, ctx.cache.ledger.move)
        if self.final != final:
            self.final = final
            self.memory.plans = [self.plan(s) for s in final]
            self.memory.cut = [0] * len(final)
        self.memory.reserve(final)
        return self.memory

    def _sparse_prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memory: BlockMemory, ctx: LayerContext
    ) -> torch.Tensor:
        """The published prefill, row by row. Execution chunks end at the same positions however the prompt is fed."""
        self._append(k, v, memory, ctx)
        step, t = ctx.step, q.shape[2]
        out = torch.zeros_like(q)
        far_q = None
        if any(plan.left(x) or left for plan, x, left in zip(memory.plans, step.total, memory.left, strict=True)):
            far_q = self._far_query(q, memory, ctx)
        for row, (at, total) in enumerate(zip(step.past, step.total, strict=True)):
            exc = memory.plans[row].exc
            while at < total:
                stop = min(total, (at // exc + 1) * exc)
                chunk = slice(t - total + at, t - total + stop)
                far = None if far_q is None else far_q[row : row + 1, :, chunk]
                part = self._attend_chunk(memory, row, q[row : row + 1, :, chunk], far, at, ctx.scaling)
                out[row, :, chunk] = part.to(q.dtype)
                memory.advance(row, stop)
                at = stop
        return out.transpose(1, 2)

    def _attend_chunk(
        self, memory: BlockMemory, row: int, q: torch.Tensor, far_q: torch.Tensor | None, at: int, scaling: float
    ) -> torch.Tensor:
        """One execution chunk of a row, queries (1, h, t, d) from position `at` on: (h, t, d) fp32."""
        ids = None if far_q is None else memory.choose_blocks(far_q.mean(2), [row])
        fetched = None if ids is None else memory.blocks.take(ids, [row], self.shape.h)
        out = []
        for start in range(0, q.shape[2], QUERIES):
            some = slice(start, start + QUERIES)
            far = None if far_q is None else far_q[:, :, some].contiguous()
            part = self._attend(memory, [row], q[:, :, some].contiguous(), far, [at + start], ids, fetched, scaling)
            out.append(part[0])
        return torch.cat(out, 1)

    def _dense_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        memory: BlockMemory,
        ctx: LayerContext,
    ) -> torch.Tensor:
        """Dense attention over everything; the scores are those that keys receive inside the window."""
        step, keys, stored = ctx.step, k, ctx.step.total
        windows = [plan.window for plan in memory.plans]
        whole = step.first and step.ends_prompt and not step.padded
        both = prefill_and_sum(q, k, v, mask, ctx, windows) if whole else None
        if both is not None:
            out = both[0]
        elif whole:
            out = dense_prefill(q, k, v, mask, None, ctx)
        else:
            if self.staged is None:
                self.staged = ResidentStore() if step.first else memory.exact_copy(ctx)
            self.staged.append(k, v, step.counts)
            out = dense_prefill(q, k, v, mask, self.staged, ctx)
            keys = self.staged.view()[0]
        self._append(k, v, memory, ctx)
        if both is not None:
            sums = both[1]
        else:
            sums = k.new_zeros((k.shape[0], self.shape.h, max(stored)), dtype=accumulator_dtype(k))
            add_column_sums(sums, q, keys, stored, step.counts, ctx.scaling, windows=windows)
        for row, length in enumerate(stored):
            pad = memory.near.end - length
            lo = max(memory.left[row], memory.near.base - pad)
            memory.near.view(MASS, pad + lo, pad + length, slice(row, row + 1))[0] += sums[row, :, lo:length]
            memory.advance(row, length)
        return out

    # -- decode -----------------------------------------------------------------------------------------------------

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        memory = self.memory
        assert memory is not None
        if self.replans:
            self._replan(memory)
        self._append(k, v, memory, ctx)
        if self.most is not None:
            for row in range(len(memory.lengths)):
                memory.fit(row, self.most)
        rows, lengths = range(len(memory.lengths)), memory.lengths
        edges = [max(x, plan.left(length)) for x, plan, length in zip(memory.left, memory.plans, lengths, strict=True)]
        far_q = ids = fetched = None
        if max(edges):
            far_q = self._far_query(q, memory, ctx)
            ids = memory.choose_blocks(far_q[:, :, 0], rows)
        at = [length - 1 for length in lengths]
        out = attend_in_place(memory, rows, q, far_q, at, ids, ctx.scaling)
        if out is None:
            if ids is not None:
                fetched = memory.blocks.take(ids, rows, self.shape.h)
                if isinstance(memory.blocks, HostBlockStore):
                    ctx.cache.ledger.look_up(*memory.blocks.served)
            out = self._attend(memory, rows, q, far_q, at, ids, fetched, ctx.scaling)
        self._report(memory, edges, ids, ctx)
        for row, length in enumerate(lengths):
            memory.advance(row, length)
        return out.to(q.dtype).transpose(1, 2)

    def _replan(self, memory: BlockMemory) -> None:
        """Plan the step that comes. Where the window is shorter now, what has left it forms blocks at once."""
        for row, (plan, c) in enumerate(zip(memory.plans, memory.lengths, strict=True)):
            memory.plans[row] = self.plan(c)
            if memory.plans[row].window < plan.window:
                memory.advance(row, c)

    def _report(self, memory: BlockMemory, edges: list[int], ids: torch.Tensor | None, ctx: LayerContext) -> None:
        """Report to ledger and observers what this step attended; called before the rows advance."""
        sinks, block, starts = self.sizes.n_sink, self.sizes.block, memory.starts()
        taken = [min(plan.topk, count) * block for plan, count in zip(memory.plans, memory.blocks.counts, strict=True)]
        attended = [
            min(sinks, edge) + max(0, edge - start) + k + length - edge
            for edge, start, k, length in zip(edges, starts, taken, memory.lengths, strict=True)
        ]
        tokens = fmean(attended)
        union = None
        if ids is not None and memory.units > 1:
            chosen = marks(ids.reshape(len(edges), self.shape.h_kv, -1), max(memory.blocks.counts))
            distinct = chosen.sum(-1, dtype=torch.float32).mean() * block
            union = tokens - fmean(taken) + distinct
        ctx.cache.ledger.attend(self.layer_idx, tokens, selecting=True, union=union)
        if ctx.cache.observers or ctx.cache.watchers:
            indices = None
            if ids is not None:
                indices = sinks + ids[..., None] * block + torch.arange(block, device=ids.device)
                indices = torch.where(ids[..., None] < 0, -1, indices).flatten(2)
            local = [max(0, length - 1 - start) for length, start in zip(memory.lengths, starts, strict=True)]
            self.selected = Selected(sinks, indices, Candidates(sinks, starts, taken, memory.lengths), local)

    # -- attention --------------------------------------------------------------------------------------------------

    def _attend(
        self,
        memory: BlockMemory,
        rows: Sequence[int],
        q: torch.Tensor,
        far_q: torch.Tensor | None,
        at: Sequence[int],
        ids: torch.Tensor | None,
        fetched: tuple[torch.Tensor, torch.Tensor] | None,
        scaling: float,
    ) -> torch.Tensor:
        """Queries q (n', h, t, d) of consecutive `rows`, row i's at positions at[i], at[i] + 1, ...: (n', h, t, d) fp32.

        ids, fetched: the blocks they chose, and K, V of these. Adds the probabilities of keys inside the window to their scores.
        """
        reach, near = memory.reach(rows, at, q.shape[2], ids), memory.near
        keys, values = near.view(ROTATED, *reach.window, reach.rows), near.view(VALUE, *reach.window, reach.rows)
        local = joint = partial(q, keys, values, scaling, reach.window_mask, probs=True)
        if far_q is not None and (reach.has_far or ids is not None):
            far_keys, far_values = memory.far_tokens(reach, fetched)
            query = q if memory.far == ROTATED else far_q
            joint = merge([local, partial(query, far_keys, far_values, scaling, reach.far_mask)])
        joint = with_sinks(joint, scaling)
        add_mass(near.view(MASS, *reach.window, reach.rows), local, joint)
        return joint.out

    def _append(self, k: torch.Tensor, v: torch.Tensor, memory: BlockMemory, ctx: LayerContext) -> None:
        """Store a pass's tokens: k, v (n, h_kv, t, d)."""
        cos, sin = self._tables(ctx)
        memory.append(k, rope.rotate(ctx.module, k.to(cos.dtype), cos, -sin).to(k.dtype), v, ctx)

    def _tables(self, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        """This pass's cos and sin as a pure rotation: a model's attention scaling stays in its keys."""
        key = ("infllm", ctx.cos.device)
        if key not in ctx.step.masks:
            ctx.step.masks[key] = pure_rotation(ctx.cos, ctx.sin)
        return ctx.step.masks[key]

    def _far_query(self, q: torch.Tensor, memory: BlockMemory, ctx: LayerContext) -> torch.Tensor:
        """q (n, h, t, d), rotated by the model, at the constant distance from keys before RoPE instead: fp32."""
        # a window longer than its row has nothing far behind it
        windows = tuple(min(plan.window, length) for plan, length in zip(memory.plans, memory.lengths, strict=True))
        key = ("infllm", ctx.cos.device, windows)
        cos, sin = self._tables(ctx)
        if key not in ctx.step.masks:
            at = table(windows, q.device)[:, None] - 1
            c, s = pure_rotation(*rope.tables(ctx.rotary, cos, at))
            ctx.step.masks[key] = (c * cos + s * sin, s * cos - c * sin)
        return rope.rotate(ctx.module, q.to(cos.dtype), *ctx.step.masks[key])


def add_mass(sums: torch.Tensor, local: Part, joint: Part) -> None:
    """sums (n', h, columns) += the probabilities, of the joint softmax, that the window's keys received."""
    assert local.probs is not None
    share = torch.exp(local.lse - joint.lse)[..., None]
    probs = local.probs  # of this part alone, so that they may be written over
    sums += (probs * share if probs.requires_grad else probs.mul_(share)).sum(2).detach()
