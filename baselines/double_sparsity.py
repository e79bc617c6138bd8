"""Double Sparsity: rank tokens by a few heavy channels of their keys (Yang et al., arXiv 2408.07092, section 3).

Offline, a calibration text gives each head its heavy channels: those of largest |q k|. The label cache keeps these channels of
every key, in `label_bits` bits. A decode step scores all tokens by the same channels of the query and attends exactly to the
best ones (Algorithm 1).

A channel's weight is the sum over tokens of |q k|, each token's query with its own key, as in the released calibration.
protocol=release, as the released evaluation: every query head has its own channels, labels and choice of tokens, the query's
channels are rounded as the labels are, and all tokens are selected by score. Under the other protocols the heads of a group
share channels and choice (reduce=none: a choice each), and sinks and local window are this project's.

Deviations:
- The current token is always attended, on top of the budget. The released evaluation ranks it with the others.
- channel=q and channel=k take |q| and |k| after RoPE; the released calibration takes them before it.
- The calibration text is this project's, not 256 samples of the Pile.
- With store=host selected tokens are fetched when they are needed. Double Sparsity-Offload prefetches them one layer ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from pqcache.fields import Bits, Part, Positive, added
from pqcache.selective.attach import served_modules
from pqcache.selective.budget import Plan, floor_share
from pqcache.selective.calibration import Calibration, Tensors, watch_text
from pqcache.selective.group import per_head, top_tokens
from pqcache.selective.layer import LayerContext, WatchedCall
from pqcache.selective.placement import home
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.codec import ExactCodec, TokenCodec

from .coded_keys import CodedKeyIndex

CHANNELS = ("qk", "q", "k")
PER_QUERY_HEAD = " per query head"


def channel_weights(model: PreTrainedModel, ids: torch.Tensor) -> Tensors:
    """Weights of the channels of every KV head over token ids (1, t), after RoPE: name in CHANNELS -> (layers, h_kv, d) fp32.

    Sums over tokens of |q k|, |q| and |k|; the first two also over the query heads of a group. With PER_QUERY_HEAD in its name:
    not over the heads, (layers, h, d).
    """
    names = [*CHANNELS, *(name + PER_QUERY_HEAD for name in CHANNELS)]
    weights: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def add(call: WatchedCall) -> None:
        k = call.k[0].float()  # (h_kv, t, d)
        q = call.q[0].float().unflatten(0, (k.shape[0], -1))  # (h_kv, g, t, d)
        each = {"qk": (q * k[:, None]).abs().sum(2), "q": q.abs().sum(2)}  # (h_kv, g, d)
        for name, weight in each.items():
            weights[name].append(weight.sum(1).cpu())
            weights[name + PER_QUERY_HEAD].append(weight.flatten(0, 1).cpu())
        alone = k.abs().sum(1)
        weights["k"].append(alone.cpu())
        weights["k" + PER_QUERY_HEAD].append(alone.repeat_interleave(q.shape[1], 0).cpu())

    watch_text(model, ids, add)
    return {name: torch.stack(layers) for name, layers in weights.items()}


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x in fp32, its last dimension rounded to 2^bits evenly spaced values from its minimum to its maximum."""
    x = x.float()
    low, high = x.aminmax(dim=-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    step = step.masked_fill(step == 0, 1)
    return ((x - low) / step).round() * step + low


class LabelIndex(CodedKeyIndex):
    """The label cache of one layer: the heavy channels of every key, in few bits; H is h_kv, or h with per_query_head."""

    counted = ("channels",)
    channels: torch.Tensor  # (H, r), a constant of the model; set by `build`
    scope = "candidates"

    def __init__(self, method: DoubleSparsity) -> None:
        codec = ExactCodec() if method.label_bits == 16 else TokenCodec(method.label_bits)
        super().__init__(codec, str(method.reduce))
        self.method = method

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        if ctx.module not in self.method.channels:
            raise RuntimeError("Double Sparsity was not prepared for this model: call prepare(model, None, None) first")
        self.channels = self.method.channels[ctx.module].to(k.device)
        return super().build(k, v, lengths, ctx)

    def keyed(self, keys: torch.Tensor) -> torch.Tensor:
        """The heavy channels of keys (n, h_kv or H, m, d), each head's own: (n, H, m, r)."""
        keys = per_head(keys, self.channels.shape[0])
        return keys.gather(3, self.channels[None, :, None].expand(*keys.shape[:3], -1))

    def asked(self, q: torch.Tensor) -> torch.Tensor:
        """q (n, h, 1, d) -> what is multiplied with labels (n, h, 1, r)."""
        heavy = self.keyed(q.unflatten(1, (self.channels.shape[0], -1))[..., 0, :]).flatten(1, 2)[:, :, None]
        rounds = self.method.round_query and self.method.label_bits < 16
        return rounded(heavy, self.method.label_bits) if rounds else heavy

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        return super().score_at(q, per_head(indices, q.shape[1]) if self.method.per_query_head else indices, ctx)


@dataclass(kw_only=True)
class DoubleSparsity(RetrievalMethod):
    """Tokens with the largest q . k over heavy channels. `prepare` runs the model once over a calibration text."""

    name: ClassVar[str] = "double_sparsity"
    released: ClassVar[str] = "andy-yang-1/DoubleSparse: LongBench/modify_llama.py"
    ranks_shortlists: ClassVar[bool] = True

    # first tokens, always attended, on top of a budget ratio; null: 32, under protocol=release 0
    n_sink: int | None = None  # type: ignore[assignment]
    # share of the budget that is the local window; null: 0.5, under protocol=release 0
    recent_ratio: float | None = None  # type: ignore[assignment]
    # how the scores of a group's query heads become one ranking: sum_softmax | max_softmax | sum_logit | max_logit | mean_logit
    # | none (every query head has its own); null: sum_softmax, under protocol=release none
    reduce: str | None = None  # type: ignore[assignment]
    # share of a key's channels that its label has (the paper's channel sparsity, 1/16), at least one channel
    channel_ratio: Part = 1 / 16
    # weight by which channels are heavy: qk | q | k
    channel: Literal["qk", "q", "k"] = "qk"
    # bits per number of a label, 1 to 8, or 16
    label_bits: Bits = 4
    # tokens of the calibration text, at most
    calibration_tokens: Positive = 2048
    # channels and labels of every query head instead of every KV head; null: under protocol=release
    per_query_head: bool | None = added(None, absent=False)
    # round the query's channels to label_bits, too; null: under protocol=release
    round_query: bool | None = added(None, absent=False)

    def fill(self) -> None:
        self.by_protocol(
            n_sink=(32, 32, 0), recent_ratio=(0.5, 0.5, 0.0), reduce=("sum_softmax", "sum_softmax", "none")
        )
        self.by_protocol(per_query_head=(False, False, True), round_query=(False, False, True))

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        plan = super().plan(s, layer_idx, n_layers)
        if self.recent_ratio or self.budget.is_everything:
            return plan
        return Plan(plan.sinks, 0, plan.k + plan.local) if self.protocol == "release" else plan

    def setup(self) -> None:
        self.channels: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()  # attention module -> (H, r)

    def prepare(self, model: PreTrainedModel, text: torch.Tensor | None, cache_dir: Path | None) -> None:
        modules = served_modules(model)
        if self.budget.is_everything or (text is None and all(module in self.channels for module in modules)):
            return
        calibration = Calibration(self.name, self.calibration_tokens, (2,))
        name = self.channel + (PER_QUERY_HEAD if self.per_query_head else "")
        weight = calibration.get(model, text, cache_dir, channel_weights, {name: 3})[name]
        r = max(1, floor_share(weight.shape[2], self.channel_ratio))
        for module, layer in zip(modules, weight, strict=True):
            # a copy: its bytes are counted, not those of what it is part of
            self.channels[module] = top_tokens(layer[None], [r])[0].to(home(module)).clone()

    def make_index(self, layer_idx: int, shape: ModelShape) -> LabelIndex:
        return LabelIndex(self)
