"""Attention over kept or selected tokens, and the exact merge of segments.

Shapes: n batch, h query heads, h_kv KV heads, g = h / h_kv, q query tokens, m keys, d head dimension.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pqcache import kernels
from pqcache.kernels.scaling import capped, denominator, is_plain, sinks_of, token_share
from pqcache.selective.group import per_head
from pqcache.store.ragged import RaggedStore
from pqcache.store.transfer import table

# A weight of less, where the largest is 1, has no part in a sum of fp32. A trained model's attention is full of weights that are
# subnormal numbers in fp32, and some CPUs, Intel's among them, multiply these many times slower than others.
NEGLIGIBLE = 1e-30
QUERIES = 128  # of a block of `attend_exactly` whose logits exist at a time
NATIVE_FROM = 1 << 18  # numbers in K from which the native kernel's longer start pays: 256 tokens of 8 KV heads of 128


def attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of one token per row: q (n, h, 1, d), k and v (n, h_kv or h, m, d), valid (n, 1 or heads, m) bool.

    Returns (n, 1, h, d), the layout transformers expects from an attention function.
    """
    n, h, _, _ = q.shape
    heads = k.shape[1]
    if not is_plain(scaling):
        mask = None if valid is None else per_head(valid, h)[:, :, None]
        return with_sinks(partial(q, k, v, scaling, mask), scaling).out.transpose(1, 2).to(q.dtype)
    mask = None if valid is None else valid[:, :, None]
    packed = q.reshape(n, heads, h // heads, -1)  # a group's queries share one read of K and V
    # cuDNN, which torch prefers on Hopper, builds a plan for every new length: 50 ms at each step
    with_plans = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scaling)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(with_plans)
    return out.reshape(n, 1, h, v.shape[3])


def attend_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scaling: float) -> torch.Tensor:
    """Attention of one token per row over all tokens of the row: q (n, h, 1, d), k and v (n, h_kv or h, max(lengths), d).

    Entries from lengths[r] on are padding. Returns (n, 1, h, d). A CPU kernel serves where it is faster (kernels/attend.py).
    """
    large = k.numel() >= NATIVE_FROM
    if large and kernels.native(q, k, v, scaling=scaling) and kernels.attend.serves(q, k, v):
        return kernels.attend.attend_all(q, k, v, lengths, scaling)
    return attend_one(q, k, v, scaling, row_mask(lengths, k.shape[2], q.device))


def attend_adding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scaling: float, sums: torch.Tensor
) -> torch.Tensor:
    """The same, (n, 1, h, d). Adds to sums (n, h_kv, >= max(lengths)) the mean of the probabilities in each group of heads."""
    m, h_kv = k.shape[2], k.shape[1]
    sums = sums[:, :, :m]
    large = k.numel() >= NATIVE_FROM and len(set(lengths)) == 1 and q.dtype == sums.dtype and is_plain(scaling)
    if large and q.dtype == torch.float32 and kernels.native(q, k, v, sums) and kernels.attend.serves(q, k, v):
        return kernels.attend.attend_adding(q, k, v, scaling, sums)
    valid = row_mask(lengths, m, q.device)
    part = with_sinks(partial(q, k, v, scaling, None if valid is None else valid[:, :, None], probs=True), scaling)
    assert part.probs is not None
    sums += part.probs[:, :, 0].unflatten(1, (h_kv, -1)).mean(2)
    return part.out.transpose(1, 2).to(q.dtype)


def attend_exactly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of a block, cap and sinks included: q (n, h, t, d), k and v (n, h_kv, m, d) -> (n, t, h, d).

    mask (n, 1, t, m) bool; None: causal, the last t keys are the queries' own. The reference for models whose softmax no kernel
    of torch has; QUERIES queries at a time.
    """
    t, m, out = q.shape[2], k.shape[2], []
    for start in range(0, t, QUERIES):
        stop = min(start + QUERIES, t)
        seen = m if mask is not None else m - t + stop
        some = (
            mask[:, :, start:stop] if mask is not None else q.new_ones((stop - start, seen)).tril(m - t + start).bool()
        )
        part = partial(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], scaling, some)
        out.append(with_sinks(part, scaling).out)
    return torch.cat(out, 2).transpose(1, 2).to(q.dtype)


def attend_ragged(q: torch.Tensor, store: RaggedStore, scaling: float, accelerator: Any = None) -> torch.Tensor:
    """Attention of one token per row over all tokens of its row in the store: q (n, g, 1, d) -> (n, 1, g, d).

    By the cache's `accelerator` or the CPU's kernel, which read the rows as they are; else row by row, from a copy.
    """
    newer, (new_k, new_v) = store.newer.length, store.newer.view()
    k, v, starts, counts = store.k.data[0, 0], store.v.data[0, 0], store.k.starts, store.k.counts
    if (
        accelerator is not None
        and is_plain(scaling)
        and (out := accelerator.attend_ragged(q, store, scaling)) is not None
    ):
        return out
    if is_plain(scaling) and kernels.native(q, k, v) and kernels.attend.serves(q, k, v):
        return kernels.attend.attend_ragged(q, k, v, starts, counts, new_k, new_v, scaling)
    rows = []
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        keys, values = (
            torch.cat([x[start : start + count], new[row, 0, :newer]]) for x, new in ((k, new_k), (v, new_v))
        )
        rows.append(attend_one(q[row : row + 1], keys[None, None], values[None, None], scaling))
    return torch.cat(rows)


def row_mask(lengths: list[int], length: int, device: torch.device) -> torch.Tensor | None:
    """(n, 1, length) bool, True where row r has a token; None if all rows are full."""
    if len(set(lengths)) == 1:
        return None
    return (torch.arange(length, device=device)[None] < table(lengths, device)[:, None])[:, None]


class Part(NamedTuple):
    """Attention over one segment of the keys."""

    out: torch.Tensor  # (n, h, q, d) fp32, normalised within the segment
    lse: torch.Tensor  # (n, h, q) fp32, log-sum-exp of the segment's scaled logits
    probs: torch.Tensor | None = None  # (n, h, q, m) fp32; None unless requested


def partial(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    probs: bool = False,
) -> Part:
    """Attention of q (n, h, q, d) over one segment k, v (n, h_kv, m, d), to be joined by `merge`.

    mask: (n, 1 or h, q, m) bool, True = may attend. bias (n, 1 or h, q, m): added to the scaled logits. A query that sees
    nothing here gets lse = -inf and out = 0. A model's sinks are no segment's: `with_sinks` adds them after the last merge.
    Computed in fp32, in float64 for a float64 model.
    """
    n, h, t, d = q.shape
    h_kv = k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).reshape(n, h_kv, h // h_kv * t, d)
    # one buffer from here on: a copy per operation would map its pages anew, which takes longer than the operation
    logits = (grouped @ k.to(dtype).transpose(-1, -2)).view(n, h, t, -1).mul_(scaling)
    logits = capped(logits, scaling)
    if bias is not None:
        logits.add_(bias)
    if mask is not None:
        logits.masked_fill_(~mask, -torch.inf)
    recorded = logits.requires_grad  # then autograd keeps the logits
    top = logits.detach().amax(-1, keepdim=True) if k.shape[2] else logits.new_full((n, h, t, 1), -torch.inf)
    top = torch.where(top.isinf(), 0, top)
    weights = (logits.clone() if recorded else logits).sub_(top).exp_()
    if weights.device.type == "cpu" and not recorded and not probs:
        torch.threshold_(weights, NEGLIGIBLE, 0)
    total = weights.sum(-1, keepdim=True)
    lse = (top + total.log())[..., 0]
    total = torch.where(total == 0, 1, total)  # where the query sees nothing
    out = (weights.view(n, h_kv, -1, weights.shape[-1]) @ v.to(dtype)).view(n, h, t, -1) / total
    if not probs:
        return Part(out, lse)
    return Part(out, lse, weights / total if recorded else weights.div_(total))


def merge(parts: Sequence[Part]) -> Part:
    """Exact joint softmax over disjoint segments: as if their keys had been concatenated."""
    lses = torch.stack([p.lse for p in parts])
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse.isinf(), 0, lse))
    total = weights.sum(0)  # as in `partial`
    shares = (weights / torch.where(total == 0, 1, total))[..., None]
    out = sum(p.out * share for p, share in zip(parts, shares, strict=True))
    assert isinstance(out, torch.Tensor)
    probs = None
    if all(p.probs is not None for p in parts):
        probs = torch.cat([p.probs * share for p, share in zip(parts, shares, strict=True) if p.probs is not None], -1)
    return Part(out, lse, probs)


def with_sinks(part: Part, scaling: float) -> Part:
    """Attention over all of a query's tokens, `part`, where the model's attention sinks take their share of the softmax."""
    if sinks_of(scaling) is None:
        return part
    share, probs = token_share(part.lse, scaling), part.probs
    return Part(part.out * share, denominator(part.lse, scaling), None if probs is None else probs * share)
