"""Where InfLLM's tokens are: sink tokens, blocks with their representatives, and the newest tokens of every row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pqcache.selective import rope
from pqcache.selective.attention import row_mask
from pqcache.selective.budget import Plan
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.group import top_tokens
from pqcache.selective.layer import LayerContext
from pqcache.selective.shape import ModelShape
from pqcache.store.buffer import Buffer
from pqcache.store.resident import ResidentStore
from pqcache.store.row_state import RowState
from pqcache.store.transfer import table

from .block_store import BlockStore, HostBlockStore, block_step
from .columns import Columns

ROTATED, RAW, VALUE, MASS = range(4)  # the tensors of `near`: K as the model gives it, K before RoPE, V, scores


@dataclass(frozen=True)
class BlockPlan(Plan):
    """A plan in InfLLM's own terms. `local` does not count the current token, which the window does."""

    window: int  # n_local: a query attends exactly to itself and the window - 1 tokens before it
    topk: int  # blocks retrieved
    exc: int  # queries of the prompt that choose their blocks together

    def left(self, length: int) -> int:
        """How many of `length` tokens are outside the window of the last of them."""
        return max(0, length - self.window)


@dataclass(frozen=True)
class Sizes:
    """Hyper-parameters of InfLLM that its memory needs."""

    n_sink: int
    block: int  # tokens per block
    reps: int  # tokens of a block whose mean key represents it
    per_head: bool  # every query head chooses its own blocks
    true_positions: bool  # tokens outside the window keep their distance
    cached: int | None  # blocks on the device, the others on the host; None: all are on the device


@dataclass(frozen=True)
class Reach:
    """What queries of consecutive rows attend to, apart from retrieved blocks. Masks are None where all entries count."""

    rows: slice
    window: tuple[int, int]  # columns of `near` that hold the windows of all rows and queries
    remainder: tuple[int, int]  # columns between blocks and window; equal if there are none
    sinks: int  # sink tokens outside the window
    window_mask: torch.Tensor | None = None  # (n', 1, t, columns)
    far_mask: torch.Tensor | None = None  # (n', 1 or h, t, sinks + retrieved tokens + remainder)

    @property
    def has_far(self) -> bool:
        """Whether sinks or remainder hold a token outside the window."""
        return self.sinks > 0 or self.remainder[0] < self.remainder[1]


class BlockMemory(RowState):
    """All tokens of one layer. Positions of a row: [sinks | blocks | remainder | window]; the first three are far.

    `near` holds remainder and window of all rows. Sizes are per row, in Python integers.
    """

    per_row = ("near", "blocks", "reps", "sinks", "lengths", "left", "plans", "cut")

    def __init__(self, sizes: Sizes, shape: ModelShape, k: torch.Tensor, moved: Callable[[str, int], None]) -> None:
        """k (n, h_kv, t, d): rows, heads, dtype and device of the keys to come. moved: counts bytes sent to or from the host."""
        n, h_kv, _, d = k.shape
        self.sizes, self.shape = sizes, shape
        self.far = ROTATED if sizes.true_positions else RAW  # the form in which far keys are kept
        self.units = shape.h if sizes.per_head else 1  # each unit chooses its own blocks
        self.lengths = [0] * n  # tokens per row
        self.left = [0] * n  # tokens that have left the window, for good
        self.plans: list[BlockPlan] = []
        self.cut = [0] * n  # tokens before this position are not attended outside of blocks, sinks apart
        self.near = Columns([k, k, k, k.new_zeros((n, shape.h, 0), dtype=accumulator_dtype(k))])
        self.sinks = [k.new_zeros((n, h_kv, sizes.n_sink, d)) for _ in "kv"]
        self.reps = Buffer(n, shape.h, (d,), k.dtype, k.device, step=block_step(sizes.block))  # (n, h, blocks, d)
        self.blocks: BlockStore
        if sizes.cached is not None:
            self.blocks = HostBlockStore(n, k, sizes.block, self.units, sizes.cached, moved)
        else:
            self.blocks = BlockStore(n, k, sizes.block)

    # -- positions --------------------------------------------------------------------------------------------------

    def block_ends(self) -> list[int]:
        """Per row, the position behind the last block."""
        return [self.sizes.n_sink + self.sizes.block * count for count in self.blocks.counts]

    def starts(self) -> list[int]:
        """Per row, the first position that is attended without being in a block or a sink."""
        return [max(end, cut) for end, cut in zip(self.block_ends(), self.cut, strict=True)]

    def fit(self, row: int, tokens: int) -> None:
        """Let a decode step of a row attend at most `tokens` tokens, with whole blocks; the current token, stored last, is apart.

        Sinks and window come first, then the tokens between blocks and window, the newest of them, then blocks.
        """
        plan, c = self.plans[row], self.lengths[row] - 1
        edge = max(self.left[row], plan.left(self.lengths[row]))
        start = self.block_ends()[row]
        room = tokens - min(self.sizes.n_sink, edge) - max(0, edge - start) - (c - edge)
        self.cut[row] = min(edge, start - room) if room < 0 else 0
        self.plans[row] = replace(plan, topk=max(0, room) // self.sizes.block)

    def oldest(self) -> int:
        """The first column that `near` must still hold."""
        first = [min(end, left) for end, left in zip(self.block_ends(), self.left, strict=True)]
        return min(self.near.end - length + at for length, at in zip(self.lengths, first, strict=True))

    def reach(self, rows: Sequence[int], at: Sequence[int], t: int, ids: torch.Tensor | None) -> Reach:
        """What t queries of each of `rows` attend to, row i's at positions at[i], at[i] + 1, ...; ids: the blocks they chose."""
        span = slice(rows[0], rows[-1] + 1)
        pads = [self.near.end - self.lengths[row] for row in rows]  # column = position + pad
        first = self.starts()
        starts, left = [first[row] for row in rows], [self.left[row] for row in rows]
        windows = [self.plans[row].window for row in rows]
        # the first position inside the window, of the first and of the last query
        edges = [max(x, a - w + 1) for x, a, w in zip(left, at, windows, strict=True)]
        last = [max(x, a + t - w) for x, a, w in zip(left, at, windows, strict=True)]
        lo = min(p + e for p, e in zip(pads, edges, strict=True))
        hi = max(p + a + t for p, a in zip(pads, at, strict=True))
        behind = [(p + start, p + e) for p, start, e in zip(pads, starts, last, strict=True) if e > start]
        begin, end = (min(a for a, _ in behind), max(b for _, b in behind)) if behind else (lo, lo)
        sinks = min(self.sizes.n_sink, max(last))
        ragged = ids is not None and len({self.blocks.counts[row] for row in rows}) > 1
        if t == 1 and not ragged and len(set(zip(pads, edges, starts, strict=True))) == 1:
            return Reach(span, (lo, hi), (begin, end), sinks)

        device = self.reps.data.device
        pad, start, edge = (table(x, device)[:, None, None] for x in (pads, starts, left))
        position = table(at, device)[:, None] + torch.arange(t, device=device)
        window = table(windows, device)[:, None]
        edge = torch.maximum(edge, (position + 1 - window)[..., None])  # (n', t, 1)
        column = torch.arange(lo, hi, device=device) - pad
        window_mask = ((column >= edge) & (column <= position[..., None]))[:, None]
        column = torch.arange(begin, end, device=device) - pad
        parts = [(torch.arange(sinks, device=device) < edge)[:, None], ((column >= start) & (column < edge))[:, None]]
        if ids is not None:
            chosen = (ids >= 0).repeat_interleave(self.sizes.block, -1)[:, :, None].expand(-1, -1, t, -1)
            parts = [x.expand(-1, self.units, -1, -1) for x in parts]
            parts.insert(1, chosen)
        return Reach(span, (lo, hi), (begin, end), sinks, window_mask, torch.cat(parts, -1))

    # -- storing ----------------------------------------------------------------------------------------------------

    def reserve(self, final: Sequence[int]) -> None:
        """Make room for the blocks of rows that will hold final[r] tokens, by their plans."""
        ends = [max(left, plan.left(s)) for left, plan, s in zip(self.left, self.plans, final, strict=True)]
        blocks = max(0, max(ends) - self.sizes.n_sink) // self.sizes.block
        self.blocks.blocks.reserve(blocks)
        self.reps.reserve(blocks)

    def append(self, k: torch.Tensor, raw: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> None:
        """Store a pass's tokens: k, raw (k before RoPE), v (n, h_kv, t, d)."""
        step, t = ctx.step, k.shape[2]
        sums = k.new_zeros((k.shape[0], self.shape.h, t), dtype=accumulator_dtype(k))
        self.near.append((k, raw, v, sums), step.counts, self.oldest())
        if min(step.past) < self.sizes.n_sink:
            for row, (past, count) in enumerate(zip(step.past, step.counts, strict=True)):
                end = min(past + count, self.sizes.n_sink)
                for x, sinks in zip((k if self.far == ROTATED else raw, v), self.sinks, strict=True):
                    sinks[row, :, past:end] = x[row, :, t - count : t - count + max(0, end - past)].detach()
        self.lengths = step.total

    def advance(self, row: int, length: int) -> None:
        """`length` tokens of a row are processed: those that have left the window for good may form blocks."""
        sizes, block, first = self.sizes, self.sizes.block, self.blocks.counts[row]
        self.left[row] = max(self.left[row], self.plans[row].left(length))
        m = (self.left[row] - sizes.n_sink) // block - first
        if m <= 0:
            return
        lo = self.near.end - self.lengths[row] + sizes.n_sink + block * first
        raw, far, value, mass = (
            self.near.view(i, lo, lo + m * block, slice(row, row + 1))[0] for i in (RAW, self.far, VALUE, MASS)
        )
        h, (h_kv, _, d) = self.shape.h, raw.shape
        top = top_tokens(mass.unflatten(1, (m, block)), [sizes.reps] * h)
        share = mass.new_zeros((h, m, block)).scatter_(2, top, 1 / sizes.reps)
        keys = raw.to(share.dtype).unflatten(1, (m, block))
        rep = share.view(h_kv, h // h_kv, m, 1, block) @ keys[:, None]
        self.reps.reserve(first + m)
        self.reps.data[row, :, first : first + m] = rep.view(h, m, d).to(self.reps.data.dtype)
        self.blocks.put(row, far, value)

    # -- reading ----------------------------------------------------------------------------------------------------

    def choose_blocks(self, q: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
        """Blocks for far queries q (n', h, d) of `rows`: (n', 1 or h, k) ascending, -1 = padding; None if there are none."""
        counts = [self.blocks.counts[row] for row in rows]
        k = [min(self.plans[row].topk, count) for row, count in zip(rows, counts, strict=True)]
        if not max(k):
            return None
        column = torch.arange(max(counts), device=q.device)
        valid = row_mask(counts, max(counts), q.device)
        if k == counts:
            ids = column.expand(len(rows), self.units, -1)
            return ids if valid is None else torch.where(valid, ids, -1)
        reps = self.reps.data[rows[0] : rows[-1] + 1, :, : max(counts)].to(q.dtype)
        scores = (reps @ q[..., None])[..., 0]
        if not self.sizes.per_head:
            scores = scores.sum(1, keepdim=True)
        return top_tokens(scores if valid is None else scores.masked_fill(~valid, -torch.inf), k)

    def far_tokens(self, reach: Reach, fetched: tuple[torch.Tensor, torch.Tensor] | None) -> list[torch.Tensor]:
        """K and V of [sinks | fetched blocks | remainder], K in the form of far keys: (n', h_kv or h, m, d)."""
        out = []
        for i, form in enumerate((self.far, VALUE)):
            pieces = [self.sinks[i][reach.rows, :, : reach.sinks], self.near.view(form, *reach.remainder, reach.rows)]
            if fetched is not None:
                if self.units > 1:
                    pieces = [piece.repeat_interleave(self.shape.group, 1) for piece in pieces]
                pieces.insert(1, fetched[i])
            out.append(torch.cat(pieces, 2))
        return out

    def exact_copy(self, ctx: LayerContext) -> ResidentStore:
        """All tokens of all rows with K at their true rotation, for a new turn's exact attention."""
        near, n, longest = self.near, len(self.lengths), max(self.lengths)
        both = [x.new_zeros((n, x.shape[1], longest, x.shape[3])) for x in self.sinks]
        for row, (length, end) in enumerate(zip(self.lengths, self.block_ends(), strict=True)):
            cut, pad = min(end, self.left[row]), near.end - length
            early = [x[row, :, :cut] for x in self.sinks]
            if self.blocks.counts[row]:
                early = [torch.cat(pair, 1) for pair in zip(early, self.blocks.whole(row), strict=True)]
            if cut and self.far == RAW:
                at = torch.arange(cut, device=early[0].device)[None]
                if ctx.position_ids is not None:  # a caller may count padding columns as positions
                    at = at + ctx.position_ids[-1 if len(ctx.position_ids) == 1 else row, -1] - ctx.step.total[row] + 1
                wide = early[0][None].to(accumulator_dtype(early[0]))
                early[0] = rope.rotate(ctx.module, wide, *pure_rotation(*rope.tables(ctx.rotary, wide, at)))[0]
            for x, part, form in zip(both, early, (ROTATED, VALUE), strict=True):
                x[row, :, :cut] = part
                x[row, :, cut:length] = near.view(form, pad + cut, near.end, slice(row, row + 1))[0]
        store = ResidentStore()
        store.load(both[0], both[1], self.lengths)
        return store


def pure_rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin with cos^2 + sin^2 = 1, in fp32 or wider: 16-bit tables deviate from 1, and some families scale theirs."""
    cos, sin = (x.to(accumulator_dtype(x)) for x in (cos, sin))
    norm = (cos**2 + sin**2).sqrt()
    return cos / norm, sin / norm
