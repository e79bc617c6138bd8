"""From scores per query head to one ranking per KV head (GQA)."""

from collections.abc import Sequence
from typing import Literal

import torch

from pqcache import kernels
from pqcache.kernels.scaling import sinks_of, token_share
from pqcache.store.transfer import table

MANY = 1 << 15  # weights from which a compiled kernel selects them: fewer are not worth a call
Reduce = Literal["none", "sum_softmax", "max_softmax", "sum_logit", "max_logit", "mean_logit"]


def per_head(x: torch.Tensor, h: int) -> torch.Tensor:
    """One entry per query head: x (n, H, ...) -> (n, h, ...). H is 1 (shared by all heads), h_kv (shared by a group) or h."""
    return x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], dim=1)


def marks(indices: torch.Tensor, m: int) -> torch.Tensor:
    """Positions (n, H, k), -1 = padding, as a set (n, H, m)."""
    out = torch.zeros((*indices.shape[:2], m + 1), dtype=torch.bool, device=indices.device)
    return out.scatter_(2, indices.long() + 1, True)[..., 1:]  # padding falls on column 0


def products(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q . key in q's dtype: q (n, h, 1, d), keys (n, h_kv or h, m, d) -> (n, h, m)."""
    n, h, _, d = q.shape
    return (q.reshape(n, keys.shape[1], -1, d) @ keys.to(q.dtype).mT).view(n, h, -1)


def group_reduce(
    logits: torch.Tensor,
    h_kv: int,
    mode: str,
    valid: torch.Tensor | None = None,
    span: tuple[int, int] | None = None,
    scaling: float = 1.0,
) -> torch.Tensor:
    """Ranking weights from scaled logits (n, h, m), fp32: (n, h_kv, m'), or (n, h, m') for mode "none".

    Softmax modes normalise over all m entries; `valid` (n or 1, 1, m) bool excludes entries first. `span` = (lo, hi) then
    keeps only those columns: the exact oracle normalises over every past token, and over the sinks of the model that `scaling`
    names, but ranks the candidates. Excluded entries are -inf in the result. Sums are in fp32: in fp16 small probabilities
    flush to zero and tie.
    """
    n, h, _ = logits.shape
    logits = logits.float()
    if valid is not None:
        logits = logits.masked_fill(~valid, -torch.inf)
    weights = logits.softmax(-1) if mode.endswith("softmax") else logits
    if mode.endswith("softmax") and sinks_of(scaling) is not None:
        weights = weights * token_share(logits.logsumexp(-1), scaling)
    if span is not None:
        weights = weights[..., span[0] : span[1]]
        valid = valid if valid is None else valid[..., span[0] : span[1]]
    if mode != "none":
        grouped = weights.view(n, h_kv, h // h_kv, -1)
        how = mode.split("_")[0]
        weights = grouped.sum(2) if how == "sum" else grouped.mean(2) if how == "mean" else grouped.amax(2)
    return weights if valid is None else weights.masked_fill(~valid, -torch.inf)


def top_tokens(weights: torch.Tensor, k: Sequence[int] | torch.Tensor, widest: int | None = None) -> torch.Tensor:
    """The k[r] largest of weights (n, H, m) in row r, ties to the lower index: (n, H, max(k)), ascending, -1 = padding.

    torch.topk breaks ties in any order, and product-quantized keys tie often (equal codes): a row would then depend on the
    padding beside it. k[r] must not exceed the entries above -inf. Counts known only on the device come as a tensor (n,), with
    `widest` as their upper bound. NaN ranks last on the CPU if k is the same in all rows.
    """
    n, heads, m = weights.shape
    widest = max(k) if widest is None else widest
    if not widest:
        return weights.new_zeros((n, heads, 0), dtype=torch.long)
    many = weights.numel() >= MANY and weights.dtype == torch.float32
    if many and not isinstance(k, torch.Tensor) and kernels.native(weights):
        return kernels.rank.top_tokens(weights, k)
    same_k = not isinstance(k, torch.Tensor) and len(set(k)) == 1
    if same_k and weights.device.type == "cpu":
        return _top_same_k(weights, widest)
    out = torch.full((n, heads, widest + 1), -1, dtype=torch.long, device=weights.device)
    best = weights.topk(widest, dim=-1, sorted=not same_k).values
    count: torch.Tensor | int = widest
    if same_k:
        threshold = best.amin(-1, keepdim=True)
    else:
        count = (k if isinstance(k, torch.Tensor) else table(k, weights.device))[:, None, None]
        threshold = best.gather(-1, (count - 1).clamp_min(0).expand(n, heads, 1))
    above = weights > threshold
    equal = weights == threshold
    chosen = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    if isinstance(count, torch.Tensor):
        chosen &= count > 0
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, widest)
    column = torch.arange(m, device=weights.device).expand(n, heads, m)
    return out.scatter_(-1, slot, column)[..., :widest]


def _top_same_k(weights: torch.Tensor, k: int) -> torch.Tensor:
    """`top_tokens` on the CPU for the same k in every row. Ties are rare, and only where there are any are they resolved."""
    n, heads, _ = weights.shape
    threshold = weights.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    if threshold.isnan().any():  # topk takes NaN for the largest, and comparisons with it are false
        return _top_same_k(weights.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), k)
    chosen = weights >= threshold  # k or more in every head
    if int(chosen.count_nonzero()) > n * heads * k:
        above, equal = weights > threshold, weights == threshold
        chosen = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    return chosen.nonzero()[:, 2].view(n, heads, k)
