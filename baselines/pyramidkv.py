"""PyramidKV: SnapKV with much budget in low layers and little in high ones (Cai et al., arXiv 2406.02069, section 4).

Layer l keeps k_l = k_0 - l * step tokens beside its window (equations 3 to 5). A prompt of fewer than 2 C tokens, C the mean
number of selected tokens per layer, is SnapKV's, as in the released code.

An aligned token budget is one of all layers together: they rank again at the same step, when they hold more in the mean, and
their sizes sum to it exactly. What a layer does not hold goes to the next one.

protocol=release is the authors' code, which repeats K and V and adds new turns as SnapKV's does.

Deviations: as SnapKV's.
- The progression steps by m - 1, in whole tokens, where the paper prints m. The released code does so too.
- Dense first layers are not part of the pyramid.
"""

from dataclasses import dataclass
from typing import ClassVar

from pqcache.fields import Positive
from pqcache.selective.budget import Plan

from .snapkv import Published, SnapKV


def pyramid(c: int, candidates: int, beta: int, m: int, exact_total: bool = False) -> list[int]:
    """Tokens that each of m layers selects among `candidates`: a falling arithmetic progression of mean c.

    Integer steps always err high (by 4.6 % at 128 tokens in 32 layers); exact_total takes the real-valued progression and
    rounds it by largest remainder, so that the layers sum to m * c.
    """
    low = c // beta
    high = 2 * c - low
    if high > candidates:
        high = candidates
        low = 2 * c - high
    if m == 1:
        return [c]
    if not exact_total:
        step = (high - low) // (m - 1)
        return [high - layer * step for layer in range(m)]
    scaled = [high * (m - 1) - layer * (high - low) for layer in range(m)]  # times m - 1, to stay in integers
    whole = [x // (m - 1) for x in scaled]
    by_remainder = sorted(range(m), key=lambda layer: -(scaled[layer] % (m - 1)))  # stable: low layers first
    for layer in by_remainder[: m * c - sum(whole)]:
        whole[layer] += 1
    return whole


@dataclass(kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV's scores, with a budget that falls from layer to layer."""

    name: ClassVar[str] = "pyramidkv"
    released: ClassVar[str] = "Zefan-Cai/KVCache-Factory: pyramidkv_utils.py"
    own_rule: ClassVar[str] = "pooled"

    published: Published = "pyramidkv"
    # the last layer's share of the mean is 1/beta
    beta: Positive = 20
    # round the progression so that the layers sum to the budget; the published steps err high, by 4.6 % at 128 tokens
    exact_total: bool = False

    def level(self, tokens: int, s: int, layer_idx: int, n_layers: int) -> Plan:
        return SnapKV.plan(self.at(tokens), s, layer_idx, n_layers)

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        flat = super().plan(s, layer_idx, n_layers)
        if flat.total >= s or s < 2 * flat.k or flat.k == 0:
            return flat
        dense = self.dense_layers or 0
        candidates = s - flat.sinks - flat.local
        exact = self.exact_total or self.replans  # the published steps err high
        layers = pyramid(flat.k, candidates, self.beta, max(1, n_layers - dense), exact)
        return Plan(sinks=flat.sinks, local=flat.local, k=layers[max(0, layer_idx - dense)])
