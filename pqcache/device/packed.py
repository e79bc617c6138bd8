"""Attention over a packed store as it is: its codes, and the exact tokens behind them."""

import torch

from pqcache.device.attend import TokenList, attend
from pqcache.store.layout import Codes, Run
from pqcache.store.packed import PackedStore
from pqcache.store.transfer import send


def attend_packed(q: torch.Tensor, store: PackedStore, scaling: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of q (n, h, 1, d) over everything in a store: out (n, 1, h, d), lse (n, h, 1) fp32.

    None: no kernel reads its codes, or a gradient is to be recorded.
    """
    described = None if torch.is_grad_enabled() and q.requires_grad else _described(store)
    if described is None:
        return None
    runs, (k, v) = described
    if len({stream.tail.shape[3] for stream in (store.k, store.v) if stream.tail is not None}) > 1:  # latent attention
        return None
    exact, shifts = [], []
    for stream in (store.k, store.v):
        tail = stream.tail if stream.tail.shape[2] else stream.tail.new_zeros((*stream.tail.shape[:2], 1, q.shape[3]))
        exact.append(tail)
        first = [0] * len(stream.body) if runs else stream.body
        shifts.append([stream.tail.shape[2] - held - body for held, body in zip(stream.tails, first, strict=True)])
    counts = send(_lines(store, runs, list(zip(*shifts, strict=True))), torch.int32, q.device)
    pair = exact[0], exact[1]
    lists = [TokenList(pair, counts[i], run.k.tokens, run.k, run.v) for i, run in enumerate(runs)]
    return attend(q, [*lists, TokenList(pair, counts[-1], store.length, k, v)], scaling)


def _described(store: PackedStore) -> tuple[list[Run], tuple[Codes | None, Codes | None]] | None:
    """A store's packed tokens for the kernel: whole runs, then the codes of the list that ends with the exact tokens.

    With one run each, K and V may differ in how many tokens are packed. None: codes that the kernel does not read.
    """
    layouts = [stream.codec.layout() if any(stream.body) else [] for stream in (store.k, store.v)]
    if all(layout is not None and len(layout) < 2 for layout in layouts):
        k, v = (layout[0] if layout else None for layout in layouts)
        return ([], (k, v)) if _readable(k) and _readable(v) else None
    runs, read = store.runs()
    if not runs or not list(read) == store.k.body == store.v.body:
        return None
    return (runs, (None, None)) if all(_readable(run.k) and _readable(run.v) for run in runs) else None


def _readable(codes: Codes | None) -> bool:
    if codes is None:
        return True
    if codes.table is not None or codes.rotation is not None:
        return False
    return codes.bits <= 8 and codes.outliers is None and codes.low_rank is None and codes.offset == 0


def _lines(store: PackedStore, runs: list[Run], shifts: list[tuple[int, ...]]) -> list:
    """The counts of all lists, see `attend.COLUMNS`: (lists, n, h_kv, 5). shifts: the last list's, per row of K and V."""
    tables = [[[[count] * 3 + [0, 0] for count in row] for row in run.counts] for run in runs]
    last = []
    for row, length in enumerate(store.lengths):
        packed = [0, 0] if runs else [store.k.body[row], store.v.body[row]]
        exact = length - (store.k.body[row] if runs else 0)
        last.append([[exact, *packed, *shifts[row]]] * store.k.heads)
    return [*tables, last]
