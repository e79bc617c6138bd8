"""Stores of the quantizing methods after a prompt and some steps, for tests of their layout and of the kernels that read it."""

from __future__ import annotations

from collections.abc import Sequence

from baselines.gear.method import GEAR
from baselines.int8 import Int8
from baselines.kivi import KIVI
from baselines.zipcache import MiKV, ZipCache
from baselines.zipcache.salient_store import SalientStore
from pqcache.selective import Budget
from pqcache.selective.quantization import QuantizationMethod
from pqcache.store.packed import PackedStore

from .fed import drawn, shape_of

D = 16  # head dimension


def mean_bits(bits: float) -> Budget:
    return Budget(ratio=bits / 16)


METHODS: dict[str, QuantizationMethod] = {
    "int8": Int8(),
    "int8 with a tail": Int8(residual=7),
    "kivi 2": KIVI(group=8, residual=16),
    "kivi 3": KIVI(bits=3, group=8, residual=16),
    "kivi 4": KIVI(bits=4, group=4, residual=8),
    "kivi 1": KIVI(bits=1, group=8, residual=8),
    "kivi 5": KIVI(bits=5, group=16, residual=16),
    "zipcache": ZipCache(budget=mean_bits(3.2), gap=8),
    "zipcache, 3 and 2 bits": ZipCache(budget=mean_bits(2.4), gap=8, bits_high=3, scope="layer"),
    "zipcache by token": ZipCache(budget=mean_bits(3.2), gap=8, granularity="token"),
    "zipcache by group": ZipCache(budget=mean_bits(3.2), gap=8, granularity="group", group=4),
    "zipcache, one width": ZipCache(budget=mean_bits(4), gap=8),
    "mikv": MiKV(budget=mean_bits(6), gap=8, bits_high=8),
    "mikv, balanced": MiKV(budget=mean_bits(3.2), gap=8, granularity="token", balancer=True),
    "gear": GEAR(residual=8, outliers=0.1),
    "gear without corrections": GEAR(residual=8, outliers=0, rank=0, new_rank=0),
    "gear kivi": GEAR(bits=2, backbone="kivi", group=8, residual=8, outliers=0.2),
    "gear, groups of two heads": GEAR(backbone="kivi", group=32, residual=32, outliers=0.1),
}


def store_of(
    method: QuantizationMethod, lengths: Sequence[int], steps: int, seed: int, h_kv: int = 2, d: int = D
) -> PackedStore:
    """One layer's store: row r's prompt has lengths[r] tokens, then `steps` tokens came one by one. Random saliency."""
    n, s = len(lengths), max(lengths)
    k, v = (drawn(seed + i, n, h_kv, s + steps, d) + drawn(seed + 2 + i, n, h_kv, 1, d) for i in range(2))
    store = method.make_store(0, shape_of(k))
    store.load(k[:, :, :s], v[:, :, :s], list(lengths))
    _draw_saliency(store, seed)
    store.pack(everything=method.packs_prompt)
    for t in range(s, s + steps):
        store.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        _draw_saliency(store, seed + t)
        store.pack()
    return store


def _draw_saliency(store: PackedStore, seed: int) -> None:
    if isinstance(store, SalientStore):
        assert store.k.tail is not None
        sums, seen_by = store._reserve(max(store.k.tails), store.k.tail, store.k.heads)
        sums[:] = drawn(seed, *sums.shape).abs()
        seen_by[:] = 1
