"""How much attention each key received: column sums of the softmax, without ever holding an s x s matrix.

Used by evictors (all queries of the prompt: H2O; the last few: SnapKV). Whole rows of logits are computed for a block of queries
at a time, so their softmax is final. A long prompt on the CPU gets
its attention from the same blocks (`attend_and_sum`), so that its logits are computed once and not twice.

Rows of the batch are computed one by one: their lengths differ, and a row's sums do not depend on the rows beside it.
"""

from collections.abc import Iterator, Sequence

import torch

from pqcache import kernels
from pqcache.kernels.scaling import cap_, capped, sinks_of
from pqcache.store.row_state import RowState

BLOCK = 128  # queries whose logits exist at a time
TILE = 4096  # keys cast to fp32 at a time
LONG = 1024  # tokens of a prompt from which on its attention and its sums are computed together
TOGETHER = 1 << 20  # several KV heads are computed at once while their logits are at most this many numbers
ON_DEVICE = 1 << 27  # the same on a CUDA device, where launches count


def accumulator_dtype(x: torch.Tensor) -> torch.dtype:
    """fp32, or float64 for a float64 model. In fp16, 2000 + 0.3 is 2000: sums of probabilities would stop growing."""
    return torch.promote_types(x.dtype, torch.float32)


@torch.no_grad()
def add_column_sums(
    sums: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    stored: Sequence[int],
    counts: Sequence[int],
    scaling: float,
    block: int = BLOCK,
    *,
    windows: Sequence[int] | None = None,
    attended: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """sums (n, h, >= max(stored)) += the probability each key gets from the queries q (n, h, t, d), per query head.

    k (n, h_kv, >= max(stored), d). Row r holds stored[r] keys. Its last counts[r] query columns are real and belong to its last
    counts[r] keys; the others are padding and add nothing. A query sees the keys up to its own, and all keys before the block,
    of an earlier chunk or left by an eviction.

    windows: in row r a key only counts the probabilities from the query at its own position and the windows[r] - 1 after it.
        The softmax is still over all keys that a query sees.
    attended: values (n, h_kv, >= max(stored), d') and where the attention of every real query over them is written,
        (n, t, h, d'). On the CPU.

    Memory beside `sums`: one block of logits of one KV group, g * block * max(stored) numbers; of several groups if
    that stays below TOGETHER (ON_DEVICE).
    """
    _, h, t, _ = q.shape
    h_kv, dtype = k.shape[1], sums.dtype
    g, block = h // h_kv, min(block, t)
    widest = max(stored)
    # one buffer for all blocks: freed ones, each a little smaller than the next, would pile up in the allocator
    most = ON_DEVICE if q.is_cuda else TOGETHER
    scratch = torch.empty(max(g * block * widest, min(h * block * widest, most)), dtype=dtype, device=q.device)
    future = torch.ones((block, block), dtype=torch.bool, device=q.device).triu(1)  # of a block's own keys
    q, sums = (x.unflatten(1, (h_kv, g)) for x in (q, sums))
    sinks = _grouped_sinks(scaling, h_kv)
    for row, (length, count) in enumerate(zip(stored, counts, strict=True)):
        for start, stop in _blocks(t - count, t, length - t, block):
            m = length - t + stop
            step = max(1, most // (g * (stop - start) * m))
            for head in range(0, h_kv, step):
                heads = slice(head, head + step)
                block_q = q[row, heads, :, start:stop].to(dtype)
                keys, into = k[row, heads, :m], sums[row, heads, :, :m]
                own = None if sinks is None else sinks[heads]
                probs, factor = _probabilities(block_q, keys, scaling, future, scratch, own)
                if attended is not None:
                    values, out = attended[0][row, heads, :m].to(dtype), attended[1].unflatten(2, (h_kv, g))
                    new = (probs.flatten(1, 2) @ values).mul_(factor).unflatten(1, (g, -1))
                    out[row, start:stop, heads] = new.permute(2, 0, 1, 3)
                first = 0
                if windows is not None and m > windows[row]:
                    first = _forget(probs, windows[row])
                into[..., first:].add_(_over_queries(probs[..., first:]), alpha=factor)


def _blocks(start: int, end: int, before: int, block: int) -> Iterator[tuple[int, int]]:
    """The blocks (start, stop) of queries start .. end-1. All but the last see a multiple of `block` keys.

    before: keys before query 0. Products with rows of whole cache lines are up to a third faster.
    """
    while start < end:
        stop = end if end - start <= block else start + block - (before + start) % block
        yield start, stop
        start = stop


def attend_and_sum(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, windows: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a prompt's last t queries, and its column sums: (n, t, h, d) and (n, h, s), the latter fp32 or wider.

    q (n, h, t, d), k and v (n, h_kv, s, d), no padding; windows as in `add_column_sums`. The sums are those of
    `add_column_sums`, bit by bit. The output is that of sdpa up to the order of additions.
    """
    n, h, t, _ = q.shape
    s = k.shape[2]
    sums = torch.zeros((n, h, s), dtype=accumulator_dtype(q), device=q.device)
    out = q.new_empty((n, t, h, v.shape[3]))
    add_column_sums(sums, q, k, [s] * n, [t] * n, scaling, windows=windows, attended=(v, out))
    return out, sums


def together(q: torch.Tensor) -> bool:
    """Whether `attend_and_sum` is faster than attention and sums apart, for a prompt's queries q (n, h, t, d).

    In 16 bits the processor's own products are faster than products of numbers that were widened first.
    """
    wide = q.dtype in (torch.float32, torch.float64)
    return q.device.type == "cpu" and wide and q.shape[2] >= LONG and not (q.requires_grad and torch.is_grad_enabled())


def _grouped_sinks(scaling: float, h_kv: int) -> torch.Tensor | None:
    """The model's attention sinks, (h_kv, g, 1)."""
    sinks = sinks_of(scaling)
    return None if sinks is None else sinks.view(h_kv, -1, 1)


def softmax_(logits: torch.Tensor, sinks: torch.Tensor | None = None) -> float:
    """logits (..., m), in one piece, become their softmax divided by the number that is returned, a power of two.

    A sharp softmax has many probabilities that are subnormal numbers in fp32. Some CPUs, Intel's among them, multiply these
    many times slower than others. Divided by 2^-64 they are normal.
    sinks: like (...), logits of one more entry each, which takes its share of the softmax.
    """
    if sinks is not None:
        share = torch.sigmoid(logits.logsumexp(-1) - sinks)
        factor = softmax_(logits)
        logits.mul_(share[..., None])
        return factor
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        torch.softmax(logits, -1, out=logits)  # in place: a row is read before it is written
        return 1.0
    if kernels.native(logits):
        kernels.softmax.scaled_softmax_(logits)
        return kernels.softmax.FACTOR
    torch.softmax(logits, -1, out=logits).mul_(2.0**64)
    return 2.0**-64


def _probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    scaling: float,
    future: torch.Tensor,
    scratch: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, float]:
    """Softmax of q (H, g, b, d) over keys k (H, m, d), the last b of them the queries' own: (H, g, b, m), a view of `scratch`.

    Beside it the factor that makes it probabilities, see `softmax_`.
    """
    heads, g, b, d = q.shape
    m = k.shape[1]
    rows = (q * scaling).reshape(heads, g * b, d)
    logits = scratch[: heads * g * b * m].view(heads, g * b, m)
    if k.dtype == q.dtype:  # one product: on a CPU it is a quarter faster than products by tiles
        torch.bmm(rows, k.mT, out=logits)
    else:
        for start in range(0, m, TILE):
            tile = k[:, start : start + TILE].to(q.dtype)
            logits[:, :, start : start + TILE].baddbmm_(rows, tile.mT, beta=0)
    cap_(logits, scaling)
    logits = logits.view(heads, g, b, m)
    logits[..., m - b :].masked_fill_(future[:b, :b], -torch.inf)
    return logits, softmax_(logits, sinks)


def _forget(probs: torch.Tensor, window: int) -> int:
    """Set to 0 in probs (H, g, b, m), m > window, what a query gives to keys before the `window` newest that it sees.

    Those from the returned one on are not 0 for every query; the ones before it are left as they are.
    """
    b, m = probs.shape[2:]
    last = m - b - window  # of the keys that the first query forgets; each further query forgets one more
    first = max(0, last + 1)
    some = probs[..., first : m - window]
    forgotten = torch.ones(some.shape[2:], dtype=torch.bool, device=probs.device)
    some.masked_fill_(forgotten.tril(last - first), 0)
    return first


def _over_queries(probs: torch.Tensor) -> torch.Tensor:
    """Sums over the queries of probs (H, g, b, m): (H, g, m). On a CPU a product with ones takes a third of a sum's time."""
    if probs.device.type != "cpu":
        return probs.sum(2)
    return (probs.new_ones(1, probs.shape[2]) @ probs)[:, :, 0]


class QueryWindow(RowState):
    """The last w queries of a prompt, kept across its chunks until `clear`."""

    per_row = ("q", "counts")

    def __init__(self, w: int) -> None:
        self.w = w
        self.clear()

    def clear(self) -> None:
        self.q: torch.Tensor = None  # type: ignore[assignment]  # (n, h, <= w, d), the newest query last; rows with fewer start with padding
        self.counts: list[int] = []  # real queries held per row

    def push(self, q: torch.Tensor, counts: Sequence[int]) -> None:
        """The next block's queries (n, h, t, d), row r's last counts[r] of them real."""
        newest = q[:, :, -self.w :].detach()
        if self.q is None:
            self.q, self.counts = newest.clone(), [0] * q.shape[0]
        else:
            self.q = torch.cat([self.q[:, :, max(0, self.q.shape[2] + newest.shape[2] - self.w) :], newest], 2)
        self.counts = [min(self.w, a + b) for a, b in zip(self.counts, counts, strict=True)]

    def column_sums(self, k: torch.Tensor, stored: Sequence[int], scaling: float) -> torch.Tensor:
        """Attention of the held queries over row r's stored[r] keys, summed over queries: (n, h, max(stored))."""
        n, h = self.q.shape[:2]
        sums = torch.zeros((n, h, max(stored)), dtype=accumulator_dtype(self.q), device=k.device)
        add_column_sums(sums, self.q, k, stored, self.counts, scaling)
        return sums

    @torch.no_grad()
    def sums_at(
        self, k: torch.Tensor, positions: torch.Tensor, stored: Sequence[int], seen: Sequence[int], scaling: float
    ) -> torch.Tensor:
        """`column_sums` where entries are any tokens of their row, in any order: (n, h, max(stored)).

        k (n, h_kv, >= max(stored), d). positions (n, h_kv, >= max(stored)): of each entry's token. The newest query held is that
        of token seen[r] - 1 of row r. A query sees the entries up to its own position.
        """
        h_kv, longest, held = k.shape[1], max(stored), self.q.shape[2]
        sinks = _grouped_sinks(scaling, h_kv)
        sums = torch.zeros((*self.q.shape[:2], longest), dtype=accumulator_dtype(self.q), device=k.device)
        for row, (length, last, count) in enumerate(zip(stored, seen, self.counts, strict=True)):
            queries = self.q[row, :, held - count :].to(sums.dtype).unflatten(0, (h_kv, -1))  # (h_kv, g, count, d)
            logits = capped(queries @ k[row, :, None, :length].to(sums.dtype).mT * scaling, scaling)
            at = torch.arange(last - count, last, device=k.device)
            later = positions[row, :, None, None, :length] > at[:, None]
            # a query may see nothing that is held
            probs = logits.masked_fill_(later, -torch.inf).softmax(-1).nan_to_num(0)
            if sinks is not None:
                probs *= torch.sigmoid(logits.logsumexp(-1) - sinks)[..., None]
            sums[row, :, :length] = probs.sum(2).flatten(0, 1)
        return sums
