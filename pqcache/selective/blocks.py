"""Exact attention of a prompt's block over everything before it, without a matrix of block by prompt.

A query sees all tokens stored before its block, and in the block those up to its own. As a mask, a block of 8192 tokens after
128 Ki others would be 1 GiB of bool, and would keep flash attention from being used.

- On a GPU, flash attention has this pattern: causal, aligned to the lower right corner.
- On a CPU, the tokens before the block (all of them are seen) and the block itself (causal) are two calls of the flash kernel,
  joined by their log-sum-exp.
- Rows of different lengths are computed one by one, padding left out.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from pqcache.selective.group import per_head

# attention of q (n, h, t, d) over k, v (n, h_kv, m, d), the last t of them the queries' own: (n, t, h, d)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of q (n, h, t, d) over k, v (n, h_kv, m, d), m >= t, the last t of them the queries' own: (n, t, h, d)."""
    t, m = q.shape[2], k.shape[2]
    if t == 1 or t == m:
        out = F.scaled_dot_product_attention(
            q, per_head(k, q.shape[1]), per_head(v, q.shape[1]), is_causal=t > 1, scale=scaling
        )
    elif q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        out = _joined(q, k, v, scaling)
    else:
        # flash takes K and V as they are
        grouped = q.dtype in (torch.float16, torch.bfloat16) and k.shape[1] != q.shape[1]
        if not grouped:
            k, v = per_head(k, q.shape[1]), per_head(v, q.shape[1])
        bias = causal_lower_right(t, m)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2)


def _joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """`lower_right` on a CPU, in two parts: (n, h, t, d)."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    n, h, t, d = q.shape
    h_kv, past = k.shape[1], k.shape[2] - t
    # a group's queries share one read of the past, in which order does not matter
    packed = q.reshape(n, h_kv, h // h_kv * t, d)
    before, before_lse = flash(packed, k[:, :, :past], v[:, :, :past], 0.0, False, scale=scaling)
    own, own_lse = flash(q, per_head(k[:, :, past:], h), per_head(v[:, :, past:], h), 0.0, True, scale=scaling)
    # the share of the past in the joint softmax, by the two log-sum-exps
    share = torch.sigmoid(before_lse.reshape(n, h, t) - own_lse.reshape(n, h, t))[..., None]
    return torch.lerp(own.to(share.dtype), before.reshape(n, h, t, d).to(share.dtype), share).to(q.dtype)


def row_by_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Sequence[int], counts: Sequence[int], attend: Attend
) -> torch.Tensor:
    """`attend` of each row without its padding: (n, t, h, d), 0 for padding.

    q (n, h, t, d): row r's last counts[r] columns are real. k, v (n, h_kv, >= max(ends), d): row r's tokens end at ends[r], and
    begin at 0.
    """
    n, h, t, _ = q.shape
    out = q.new_zeros((n, t, h, v.shape[3]))
    for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
        if count:
            one = slice(row, row + 1)
            out[one, t - count :] = attend(q[one, :, t - count :], k[one, :, :end], v[one, :, :end])
    return out
