"""How fast dense attention reads K and V, beside a matrix-vector product over as many bytes: a part of bench_kernels.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from pqcache.store.resident import ResidentStore
from scripts.bench.dense import attentions, dtype_name
from scripts.bench.layer import AttentionLayer, LayerSize
from scripts.bench.rounds import median_ratio, timed_rounds

WIDTH = 2048  # columns of the matrix whose product with a vector is timed
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bench(size: LayerSize, s: int, rounds: int) -> dict[str, float]:
    """Print the rates over s tokens; the native kernel's rate to torch.mv's, and its bfloat16 time to its fp32 time.

    Empty where there is no native kernel.
    """
    layer = AttentionLayer.build(size, torch.float32, torch.device("cpu"))
    calls: dict[str, Callable[[], Any]] = {}
    moved: dict[str, int] = {}
    for dtype in DTYPES:
        store = ResidentStore()
        store.append(layer.keys(s, 0).to(dtype), layer.keys(s, 1).to(dtype))
        q, (k, v) = layer.queries(1).to(dtype), store.view()
        for name, attention in attentions(q, k, v).items():
            calls[f"{name}, {dtype_name(dtype)}"] = lambda a=attention, q=q, k=k, v=v: a(q, k, v, size.d**-0.5)
        calls[f"torch.mv, {dtype_name(dtype)}"] = _products(store)
        moved |= {label: 2 * k.numel() * k.element_size() for label in calls if label not in moved}
    times = timed_rounds(calls, rounds)
    print(f"\nDense attention over {s} tokens, {size.h} query heads, {size.h_kv} KV heads of {size.d}")
    for label, each in times.items():
        median = statistics.median(each)
        print(f"  {label:<34} {1e3 * median:>10.2f} ms   {moved[label] / median / 1e9:6.1f} GB/s")
    if "native dense, float32" not in times:
        return {}
    ratios = {"dense_read_rate": median_ratio(times["torch.mv, float32"], times["native dense, float32"])}
    for dtype in DTYPES[1:]:
        if (label := f"native dense, {dtype_name(dtype)}") in times:
            ratios[f"dense_{dtype_name(dtype)}_time"] = median_ratio(times[label], times["native dense, float32"])
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in ratios.items()))
    return ratios


def _products(store: ResidentStore) -> Callable[[], None]:
    """torch.mv over the buffers of a store: the bytes that attention reads."""
    assert store.k is not None and store.v is not None
    matrices = [buffer.data.view(-1, WIDTH) for buffer in (store.k, store.v)]
    vector = torch.ones(WIDTH, dtype=matrices[0].dtype)

    def call() -> None:
        for matrix in matrices:
            torch.mv(matrix, vector)

    return call
