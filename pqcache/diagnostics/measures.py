"""The quality of a selection, as pure functions of one decode step's tensors. No method is known here.

Letters: n rows, h query heads, h_kv KV heads, m positions of the longest row, d head dimension. Sets of tokens are bool
tensors over positions, (n, 1 or h, m). Everything is fp32 and exact: brute force on the stored keys, not an estimate.

- recall: |S & T| / |T|, T being the |S| tokens of highest weight inside a range. recall_q ranks per query head by q.k over the
  candidates; recall_kv by the exact oracle's weight, softmax over all past tokens summed over the group, so that a perfect
  index has 1; recall_budget is ClusterKV's (arXiv 2412.03213, section V-B): over the prompt, sinks and window included, both
  sets equally large. hit is Quest's (arXiv 2406.10774): the share of the 10 heaviest past tokens that are attended.
- mass: softmax weight of what is attended, under full attention.
- output error. With the attended set S of mass 1 - t, the rest R of mass t, and o = (1 - t) o_S + t o_R the full output,
  o - o_S = t (o_R - o_S) exactly (arXiv 2512.07647). Both are means of values, so |o - o_S| <= 2 t max|v|: the bound.
"""

from typing import NamedTuple

import torch

from pqcache.selective.group import marks as marks
from pqcache.selective.group import per_head, products


def exact_logits(q: torch.Tensor, k: torch.Tensor, scaling: float) -> torch.Tensor:
    """Scaled q . k of one query token per row: q (n, h, 1, d), k (n, h_kv, m, d) -> (n, h, m) fp32."""
    return products(q.float(), k) * scaling


def heaviest(weights: torch.Tensor) -> torch.Tensor:
    """Positions in descending weight, ties to the lower: (n, H, m) -> (n, H, m)."""
    return weights.argsort(dim=-1, descending=True, stable=True)


def recall(order: torch.Tensor, inside: torch.Tensor, chosen: torch.Tensor, top: int | None = None) -> torch.Tensor:
    """Share of the `top` heaviest tokens inside a range (all of them, if fewer) that were chosen: (n, h), NaN for none.

    order (n, h, m): positions by descending weight. inside (n, 1 or h, m), chosen (n, h, m): sets. top: None for as many as were
    chosen inside the range.
    """
    inside = inside.expand(order.shape).gather(2, order)
    taken = chosen.gather(2, order) & inside
    truth = inside & (inside.cumsum(-1) <= (taken.sum(-1, keepdim=True) if top is None else top))
    count = truth.sum(-1)
    return (taken & truth).sum(-1) / torch.where(count == 0, torch.nan, count.float())


def ranks(logits: torch.Tensor, inside: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rank (0 = heaviest) of given tokens among those inside a range: positions (n, p) -> (n, h, p); ties to the lower."""
    column = torch.arange(logits.shape[2], device=logits.device)
    out = []
    for position in positions.unbind(1):  # together they would take as many times the memory of the logits
        own = logits.gather(2, position[:, None, None].expand(-1, logits.shape[1], 1))
        before = (logits > own) | ((logits == own) & (column < position[:, None, None]))
        out.append((before & inside).sum(-1))
    return torch.stack(out, -1)


def heavy_pages(probs: torch.Tensor, page: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` pages of most weight, in order of position, and the weight of each of their tokens.

    probs (n, h, m): softmax weights, 0 for what does not count. Returns pages (n, h, count), -1 = there are fewer, and weights
    (n, h, count, page).
    """
    n, h, m = probs.shape
    cells = torch.nn.functional.pad(probs, (0, -m % page)).unflatten(2, (-1, page))
    held = min(count, cells.shape[2])
    top = cells.sum(-1).topk(held, dim=-1).indices.sort(-1).values
    weights = cells.gather(2, top[..., None].expand(-1, -1, -1, page))
    pad = count - held
    return torch.nn.functional.pad(top, (0, pad), value=-1), torch.nn.functional.pad(weights, (0, 0, 0, pad))


class Output(NamedTuple):
    """The output of full attention, and the cost of attending to a set S alone.

    full (n, h, d): output of full attention. lost (n, h): weight of what is not attended, 1 - mass.
    error (n, h): |o - o_S|, S attended exactly. bound (n, h): 2 (1 - mass) max|v| >= error.
    """

    full: torch.Tensor
    lost: torch.Tensor
    error: torch.Tensor
    bound: torch.Tensor


def output(logits: torch.Tensor, v: torch.Tensor, stored: torch.Tensor | None, attended: torch.Tensor) -> Output:
    """Full attention beside attention over a set: logits (n, h, m), v (n, h_kv, m, d), stored (n, 1, m), attended (n, h, m).

    Errors are computed from the part left out, t (o_R - o_S): the difference of two nearly equal outputs would be noise.
    """
    n, h, m = logits.shape
    h_kv = v.shape[1]
    values = v.float()
    length = values.norm(dim=-1)  # (n, h_kv, m)
    if stored is not None:
        logits = logits.masked_fill(~stored, -torch.inf)
        length = length.masked_fill(~stored, 0)
    probs = logits.softmax(-1)
    left = probs.masked_fill(attended, 0)
    lost = left.sum(-1)
    # A softmax of its own is stable, however little mass the set has.
    inside = logits.masked_fill(~attended, -torch.inf).softmax(-1)

    def mean(weights: torch.Tensor) -> torch.Tensor:  # (n, h, m) -> (n, h, d)
        return (weights.view(n, h_kv, -1, m) @ values).view(n, h, -1)

    difference = mean(left) - lost[..., None] * mean(inside)
    bound = 2 * lost * per_head(length.amax(-1), h)
    return Output(mean(probs), lost, difference.norm(dim=-1), bound)
