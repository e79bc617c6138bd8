"""Stores of the quantizing methods after a prompt and some steps, for tests of their layout and of the kernels that read it."""

from collections.abc import Sequence

import torch

from baselines.zipcache.salient_store import SalientStore
from pqcache.selective.quantization import QuantizationMethod
from pqcache.store.layout import Codes, Outliers
from pqcache.store.packed import PackedStore
from pqcache.store.quantizer import unpack_codes
from tests.drawn import drawn

from .common import made
from .fed import shape_of

D = 16  # head dimension


METHODS: dict[str, QuantizationMethod] = {  # budgets: mean bits of 16
    "int8": made("int8"),
    "int8 with a tail": made("int8", residual=7),
    "kivi 2": made("kivi", group=8, residual=16),
    "kivi 3": made("kivi", bits=3, group=8, residual=16),
    "kivi 4": made("kivi", bits=4, group=4, residual=8),
    "kivi 1": made("kivi", bits=1, group=8, residual=8),
    "kivi 5": made("kivi", bits=5, group=16, residual=16),
    "turboquant 2": made("turboquant", bits=2),
    "turboquant 3": made("turboquant", bits=3, residual=7),
    "turboquant 4": made("turboquant"),
    "zipcache": made("zipcache", 0.2, gap=8),
    "zipcache, 3 and 2 bits": made("zipcache", 0.15, gap=8, bits_high=3, scope="layer"),
    "zipcache by token": made("zipcache", 0.2, gap=8, granularity="token"),
    "zipcache by group": made("zipcache", 0.2, gap=8, granularity="group", group=4),
    "zipcache, one width": made("zipcache", 0.25, gap=8),
    "mikv": made("mikv", 0.375, gap=8, bits_high=8),
    "mikv, balanced": made("mikv", 0.2, gap=8, granularity="token", balancer=True),
    "gear": made("gear", residual=8, outliers=0.1),
    "gear without corrections": made("gear", residual=8, outliers=0, rank=0, new_rank=0),
    "gear kivi": made("gear", bits=2, backbone="kivi", group=8, residual=8, outliers=0.2),
    "gear, groups of two heads": made("gear", backbone="kivi", group=32, residual=32, outliers=0.1),
}


def store_of(method: QuantizationMethod, lengths: Sequence[int], steps: int, seed: int, d: int = D) -> PackedStore:
    """One layer's store: row r's prompt has lengths[r] tokens, then `steps` tokens came one by one. Random saliency."""
    n, s = len(lengths), max(lengths)
    k, v = (drawn(seed + i, n, 2, s + steps, d) + drawn(seed + 2 + i, n, 2, 1, d) for i in range(2))
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


def decoded(codes: Codes) -> torch.Tensor:
    """What the codes stand for, by the module's formula: fp32 (n, h_kv, tokens, d). The kernels' reference."""
    n, h_kv, tokens, _ = codes.codes.shape
    x = codes.codes if codes.bits == 32 else unpack_codes(codes.codes, codes.bits, codes.d).float()
    x = x if codes.table is None else codes.table[x.long()]
    if codes.token_step is not None:
        step = codes.token_step.float()[..., None]
        low = torch.zeros(()) if codes.token_low is None else codes.token_low.float()[..., None]
        x = (x.unflatten(3, (step.shape[3], -1)) * step + low).flatten(3)
    x = x if codes.rotation is None else x @ codes.rotation
    if codes.channel_step is not None:
        segment = (torch.arange(tokens, device=x.device) + codes.offset) // codes.span
        x = x * codes.channel_step.float().index_select(2, segment)
        if codes.channel_low is not None:
            x = x + codes.channel_low.float().index_select(2, segment)
    if codes.outliers is not None:
        x = _with_outliers(x, codes.outliers)
    if codes.low_rank is not None:
        a, b, length = codes.low_rank.a[:, :, :tokens].float(), codes.low_rank.b.float(), codes.low_rank.length
        block = torch.arange(tokens, device=x.device) // length
        x = x + (a[..., None, :] @ b.index_select(2, block))[..., 0, :]
    return x


def _with_outliers(x: torch.Tensor, outliers: Outliers) -> torch.Tensor:
    """x (n, h_kv, tokens, d) with the outliers in their places."""
    n, h_kv, tokens, d = x.shape
    values, positions = outliers.values.to(x.dtype), outliers.positions.long()
    if not outliers.length:
        joint = x.transpose(1, 2).flatten(2).scatter(2, positions[:, 0, :tokens], values[:, 0, :tokens])
        return joint.unflatten(2, (h_kv, d)).transpose(1, 2)
    blocks = values.shape[2]
    padded = x.new_zeros((n, h_kv, blocks * outliers.length, d))
    padded[:, :, :tokens] = x[:, :, : blocks * outliers.length]
    whole = padded.unflatten(2, (blocks, outliers.length)).scatter(3, positions, values)
    return whole.flatten(2, 3)[:, :, :tokens]
