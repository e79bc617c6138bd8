"""Expected Attention: keep what future queries are expected to attend to (Devoto et al., arXiv 2510.00636, section 3).

Queries before their rotation are taken as normally distributed, with the mean m and covariance C of the prompt's queries. R is
the mean rotation of the next n_future positions. Key k then expects exp(s k.Rm + s^2/2 k.RCR'k), s the model's scaling, which is
normalised over all keys but the sinks and multiplied with the norm of the key's value (section 3.2).

protocol=release is ExpectedAttentionPress of NVIDIA/kvpress: 4 sinks, inside the budget.

Deviations:
- Prunes once, after a prompt or a new turn, by the queries of that turn. The paper also prunes during an answer.
- The value's norm stands for that of its product with the output matrix (section 3.3), as in the release.
- Queries are rotated back. The release projects them again from the hidden states; in 16 bits both round differently.
- Statistics are in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from transformers import PreTrainedConfig

from pqcache.fields import MOST, Positive, Whole
from pqcache.selective import rope
from pqcache.selective.budget import Plan, window_plan
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.eviction import EvictionMethod
from pqcache.selective.layer import LayerContext
from pqcache.selective.scorer import Scorer
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import check_rotated


class ExpectedScorer(Scorer):
    """Mean and covariance of a prompt's queries before their rotation, per query head; what keys expect from such queries."""

    per_row = ("counts", "mean", "spread")

    def __init__(self, method: ExpectedAttention) -> None:
        self.method = method
        self.forget()

    def forget(self) -> None:
        self.counts: list[int] = []  # queries per row
        self.mean: torch.Tensor = None  # type: ignore[assignment]  # (n, h, d) fp32
        self.spread: torch.Tensor = None  # type: ignore[assignment]  # (n, h, d, d) fp32: sum of (q - mean) (q - mean)'

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        """Blocks are joined by their means and spreads (Chan et al.), so that no large numbers cancel."""
        n, h, t, d = q.shape
        exact = accumulator_dtype(q)
        plain = rope.unrotate(ctx.module, q.to(exact), ctx.cos.to(exact), ctx.sin.to(exact))
        if self.mean is None or self.spread is None:
            self.counts, self.mean = [0] * n, q.new_zeros((n, h, d), dtype=exact)
            self.spread = q.new_zeros((n, h, d, d), dtype=exact)
        for row, (past, count) in enumerate(zip(ctx.step.past, ctx.step.counts, strict=True)):
            some = plain[row, :, t - count + min(count, max(0, (self.method.n_sink or 0) - past)) :]
            before, new = self.counts[row], some.shape[1]
            if new:
                mean = some.mean(1)
                centered, apart = some - mean[:, None], mean - self.mean[row]
                between = apart[:, :, None] * apart[:, None] * (before * new / (before + new))
                self.spread[row] += centered.mT @ centered + between
                self.mean[row] += apart * (new / (before + new))
                self.counts[row] += new

    def head_scores(self, k: torch.Tensor, lengths: list[int], ctx: LayerContext) -> torch.Tensor:
        method, (n, h, _), h_kv = self.method, self.mean.shape, k.shape[1]
        sinks = method.n_sink or 0
        assert ctx.values is not None
        norms = torch.linalg.vector_norm(ctx.values.to(self.mean.dtype), dim=-1)
        # the sinks stay, whatever their scores
        scores = self.mean.new_zeros((n, h, max(lengths)))
        for row, length in enumerate(lengths):
            if length <= sinks:
                continue
            rotation = self._rotation(ctx.step.total[row], ctx)  # x R' = x @ rotation
            mean = (self.mean[row] @ rotation * ctx.scaling).unflatten(0, (h_kv, -1))
            spread = rotation.mT @ self.spread[row] @ rotation * (ctx.scaling**2 / 2 / max(1, self.counts[row]))
            spread = spread.unflatten(0, (h_kv, -1))
            for head in range(h_kv):  # one group's products exist at a time
                keys = k[row, head, sinks:length].to(mean.dtype)
                logits = mean[head] @ keys.mT
                if method.covariance:
                    logits = logits + ((keys @ spread[head]) * keys).sum(-1)
                weights = (logits.softmax(-1) + method.epsilon) * norms[row, head, sinks:length]
                scores[row].unflatten(0, (h_kv, -1))[head, :, sinks:length] = weights
        self.forget()
        return scores

    def _rotation(self, first: int, ctx: LayerContext) -> torch.Tensor:
        """(d, d): row i is unit vector i under the mean rotation of the positions from `first` on.

        Rotations are linear in cos and sin: the mean of these gives the mean of them.
        """
        unit = torch.eye(self.mean.shape[2], dtype=self.mean.dtype, device=self.mean.device)[None, None]
        ids = torch.arange(first, first + self.method.n_future, device=unit.device)[None]
        cos, sin = (x.mean(1, keepdim=True) for x in rope.tables(ctx.rotary, unit, ids))
        return rope.rotate(ctx.module, unit, cos, sin)[0, 0]


@dataclass(kw_only=True)
class ExpectedAttention(EvictionMethod):
    """Sinks and the tokens with the largest expected attention, by the norm of their values."""

    name: ClassVar[str] = "expected_attention"
    released: ClassVar[str] = "NVIDIA/kvpress: presses/expected_attention_press.py"

    # positions after the prompt whose rotations are averaged
    n_future: Positive = 512
    # added to the expected attention before it is multiplied with the norm of the value; kvpress's leaderboard uses 0.01
    epsilon: Annotated[float, 0, MOST] = 0.0
    # whether the covariance of the queries counts, or their mean alone
    covariance: bool = True
    # first tokens, always kept, whose queries do not count; null: 32 on top of a budget ratio, in the protocols paper and
    # release 4 inside the budget
    n_sink: Whole | None = None

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 4))

    def check_model(self, config: PreTrainedConfig) -> None:
        check_rotated(config.get_text_config(decoder=True), f"method={self.name}")

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        if self.protocol == "aligned":
            return window_plan(self.budget, s, self.n_sink or 0, 0)
        total = max(1, self.budget.total(s))
        sinks = min(self.n_sink or 0, total)
        return Plan(sinks=sinks, local=0, k=total - sinks)

    def make_scorer(self, layer_idx: int, shape: ModelShape) -> Scorer:
        return Scorer() if self.budget.is_everything else ExpectedScorer(self)
