"""Dense attention of one decode step, by whatever computes it on this machine: what the own times of methods are divided by.

Peers read K and V of all tokens where a resident store holds them, for one query token per head. The block's projections run
before each, untimed, as they do in a method's step: their weights push what was read last out of the caches. The fastest peer is
the denominator: the smallest median over the rounds, in which methods and peers take turns.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from pqcache import kernels
from pqcache.measure.machine import seconds
from pqcache.measure.roofline import DROPPED_STEPS
from pqcache.selective.attention import attend_one
from pqcache.store.resident import ResidentStore
from scripts.bench.layer import AttentionLayer

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
Rounds = dict[str, list[dict[str, Any]]]


def grouped_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Two matrix products and a softmax: q (n, h, 1, d), k and v (n, h_kv, m, d)."""
    packed = q.reshape(len(q), k.shape[1], -1, q.shape[3])  # a group's queries share one read of K and V
    return ((packed @ k.transpose(-1, -2)) * scaling).softmax(-1) @ v


def native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """The CPU kernel, of the same."""
    return kernels.attend.attend_all(q, k, v, [k.shape[2]] * k.shape[0], scaling)


def peers(layer: AttentionLayer, s: int, steps: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Calls that time each way of dense attention over s tokens, in the layer's dtype, and in bfloat16 where that is fp32.

    Labels end in the dtype's name. A call returns the median seconds of `steps` steps as `own_s`.
    """
    calls: dict[str, Callable[[], dict[str, Any]]] = {}
    dtypes = [layer.dtype] if layer.dtype != torch.float32 else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        store = ResidentStore()
        store.append(layer.keys(s, 0).to(dtype), layer.keys(s, 1).to(dtype))
        q = layer.queries(1).to(dtype)
        ways: dict[str, Attention] = {"grouped SDPA": attend_one, "grouped products": grouped_products}
        if kernels.native(q, *store.view()) and kernels.attend.serves(q, *store.view()):
            ways = {"native dense": native, **ways}
        for name, attention in ways.items():
            calls[f"{name}, {str(dtype).removeprefix('torch.')}"] = _timed(layer, attention, q, store, steps)
    return calls


def _timed(
    layer: AttentionLayer, attention: Attention, q: torch.Tensor, store: ResidentStore, steps: int
) -> Callable[[], dict[str, Any]]:
    (k, v), hidden = store.view(), layer.hidden(1, 10)

    def call() -> dict[str, Any]:
        taken = []
        for _ in range(steps + DROPPED_STEPS):
            layer.project(hidden)
            taken.append(seconds(lambda: attention(q, k, v, q.shape[3] ** -0.5), q.device))
        return {"own_s": statistics.median(taken[DROPPED_STEPS:])}

    return call


def fastest(results: Rounds, dtype: torch.dtype) -> tuple[str, float]:
    """The peer with the smallest median among those of a dtype, and that median in seconds."""
    medians = {
        label: statistics.median(round_["own_s"] for round_ in rounds)
        for label, rounds in results.items()
        if label.endswith(str(dtype).removeprefix("torch."))
    }
    label = min(medians, key=lambda each: medians[each])
    return label, medians[label]


def show(results: Rounds, numbers: int) -> dict[str, float]:
    """Print the peers' medians and read rates, and return the medians in ms. numbers: entries of K and V together."""
    figures = {}
    print("dense attention alone, same rounds:")
    for label, rounds in results.items():
        median = statistics.median(round_["own_s"] for round_ in rounds)
        size = 4 if label.endswith("float32") else 2
        figures[label] = 1e3 * median
        print(f"  {label:30} {1e3 * median:9.3f} ms {numbers * size / median / 1e9:7.2f} GB/s")
    return figures


def over_dense(own_ms: dict[str, float], results: Rounds, dtype: torch.dtype, s: int) -> dict[str, float]:
    """Print each method's median own time over the fastest dense attention, and return it as `<method>_<length>`.

    own_ms: label -> median own time. Beside an fp32 cache the ratio to the fastest bfloat16 attention is printed too, and
    returned as `<method>_<length>_bfloat16`.
    """
    bases = {"": fastest(results, dtype)}
    if dtype == torch.float32:
        bases["_bfloat16"] = fastest(results, torch.bfloat16)
    fields, length = {}, str(s) if s % 1024 else f"{s // 1024}k"
    for end, (label, base) in bases.items():
        print(f"own / {label} ({1e3 * base:.3f} ms):")
        for method, own in own_ms.items():
            key = f"{method.replace(' (', '_').removesuffix(')')}_{length}{end}"
            fields[key] = round(own / (1e3 * base), 4)
            print(f"  {key:36} {fields[key]:8.3f}")
    return fields
