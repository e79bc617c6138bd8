"""Chosen tokens of packed runs, gathered as codes: nothing is decoded, and a kernel attends to what comes out."""

from dataclasses import replace

import torch

from pqcache.store.buffer import take_tokens
from pqcache.store.layout import Codes, Run


def _whole(x: torch.Tensor) -> torch.Tensor:
    """x (n, h_kv, t, r) as `take_tokens` needs it: the buffer whose first t entries it is, or a copy."""
    n, h_kv, _, r = x.shape
    capacity = x.stride(1) // r
    first = not x.storage_offset() and x.stride() == (h_kv * capacity * r, capacity * r, r, 1)
    return x.as_strided((n, h_kv, capacity, r), x.stride()) if first else x.contiguous()


def gathered(codes: Codes, slots: torch.Tensor) -> Codes | None:
    """The tokens in slots (n, h_kv, k) of a run, any for padding; None where a token's place says more than its codes.

    That is so with outliers, with a low-rank part, and where several segments have channel steps of their own.
    """
    by_channel = codes.channel_step
    if codes.outliers is not None or codes.low_rank is not None or (by_channel is not None and by_channel.shape[2] > 1):
        return None
    h_kv = codes.codes.shape[1]
    step, low = (
        None if x is None else take_tokens(_whole(x.expand(-1, h_kv, -1, -1)), slots)
        for x in (codes.token_step, codes.token_low)
    )
    taken = take_tokens(_whole(codes.codes), slots)
    return replace(codes, codes=taken, token_step=step, token_low=low, span=max(1, slots.shape[2]), offset=0)


def compacted(values: torch.Tensor, inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of values (n, h_kv, m) that are `inside`, in their order: (n, h_kv, most), 0 = padding; and counts (n, h_kv)."""
    counts = inside.sum(-1)
    most = int(counts.max()) if counts.numel() else 0
    out = values.new_zeros((*values.shape[:2], most + 1))
    place = torch.where(inside, inside.cumsum(-1) - 1, most)  # the last entry takes all others
    return out.scatter_(2, place, values)[..., :most], counts


def chosen_run(k: Codes, v: Codes, slots: torch.Tensor, inside: torch.Tensor) -> Run | None:
    """The tokens in those slots (n, h_kv, m) that are `inside`, as a run; None as of `gathered`."""
    own, counts = compacted(slots, inside)
    keys, values = gathered(k, own), gathered(v, own)
    return None if keys is None or values is None else Run(keys, values, counts.tolist())
