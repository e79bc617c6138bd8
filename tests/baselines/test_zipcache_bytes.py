"""What ZipCache stores, and the ratios its paper counts."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from baselines.gear import GEAR
from baselines.gear.method import accounted_ratio as gear_ratio
from baselines.h2o import H2O
from baselines.int8 import Int8
from baselines.kivi import KIVI, accounted_ratio
from baselines.oracle import Oracle
from baselines.pyramidkv import PyramidKV
from baselines.zipcache import MiKV, ZipCache
from baselines.zipcache.accounting import mean_bits, published_ratio
from pqcache.selective import Budget, generate
from pqcache.selective.ledger import unique_bytes
from pqcache.selective.method import Method
from pqcache.selective.shape import ModelShape

FIFTH = {"budget": Budget(ratio=0.2)}


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(method: ZipCache, s: int, shape: ModelShape, n: int = 1) -> dict[str, int]:
    """Bytes of a prompt of s fp16 tokens per part."""
    store = method.make_store(0, shape)
    k = randn(n, shape.h_kv, s, shape.d, seed=0).half()
    store.load(k, k, [s] * n)
    store.pack(everything=True)
    codecs = [stream.codec for stream in (store.k, store.v)]
    codes = sum(subset.codes.numel() for codec in codecs for subset in codec.subsets if subset.codes is not None)
    ids = unique_bytes(store.widths.tensors())
    total = unique_bytes(store.tensors()["device"])
    return {"codes": codes, "ids": ids, "parameters": total - codes - ids, "total": total}


@pytest.mark.parametrize("s", [840, 120])
def test_measured_bytes_equal_the_formula(s: int) -> None:
    """fp16, h_kv = 8, d = 128: 3.2 bits per code; 5 D + 2 s numbers of parameters; a bit and a count per 64 tokens."""
    got = stored(ZipCache(**FIFTH), s, ModelShape(1, 32, 8, 128))
    salient = s - int(0.4 * s + 1e-9)
    assert got["codes"] == 2 * 1024 * (4 * salient + 2 * (s - salient)) // 8
    assert got["parameters"] == 2 * (5 * 1024 + 2 * s)
    assert got["ids"] == 8 * -(-s // 64) * 12
    assert got["total"] == sum(got[part] for part in ("codes", "parameters", "ids"))
    grouped = stored(ZipCache(**FIFTH, granularity="group"), s, ModelShape(1, 32, 8, 128))
    assert grouped["parameters"] == 2 * 4 * 1024 * s // 32


@pytest.mark.parametrize(
    ("length", "share", "published"),
    [(840, 0.6, 4.98), (840, 0.7, 4.69), (3072, 0.8, 4.43), (120, 0.6, 4.94), (120, 0.8, 4.39)],
)
def test_published_ratios_of_the_result_tables(length: int, share: float, published: float) -> None:
    assert round(published_ratio("mixed", mean_bits(share), length), 2) == published


@pytest.mark.parametrize(("counting", "published"), [("group", 3.2), ("token", 3.992), ("channel-cst", 3.995)])
def test_published_ratios_of_table_1(counting: str, published: float) -> None:
    assert round(published_ratio(counting, 4, 4096), 3) == published
    assert round(published_ratio("channel-token", 4, 4096), 4) == 3.9956  # printed as 4.00


@torch.no_grad()
def test_the_published_ratio_stands_beside_measured_bytes(llama: PreTrainedModel) -> None:
    for method, ratio in (
        (ZipCache(**FIFTH), 4.94),
        (MiKV(budget=Budget(ratio=0.225)), 4.39),
        (ZipCache(budget=Budget(ratio=0.25), granularity="group", group=8), round(16 / (4 + 32 / 8), 2)),
        (KIVI(group=8, residual=32), round(accounted_ratio(120, 2, 8, 32), 2)),
        (GEAR(), round(gear_ratio(120, d=16, channels=32), 2)),
    ):
        assert round(generated(llama, method)["published_ratio"], 2) == ratio
    for method in (ZipCache(), KIVI(bits=16), GEAR(bits=16), Int8(), Oracle()):
        assert "published_ratio" not in generated(llama, method)


def test_kept_shares_are_ratios(llama: PreTrainedModel) -> None:
    """As ZipCache's tables print them: the full cache 1, H2O with 20 % heavy and 20 % recent tokens 2.50."""
    assert generated(llama, Full())["published_ratio"] == 1.0
    assert generated(llama, H2O(budget=Budget(ratio=0.4), protocol="paper"))["published_ratio"] == 2.5
    kept = PyramidKV(budget=Budget(tokens=64), w=8)
    tokens = [kept.plan(120, i, 2).total for i in range(2)]
    assert generated(llama, kept)["published_ratio"] == 240 / sum(tokens)


def generated(model: PreTrainedModel, method: Method) -> dict:
    """What a request of 120 prompt tokens reports."""
    return generate(model, method, torch.arange(5, 125)[None], max_new_tokens=1).extra


def test_stored_as_published_for_one_big_row() -> None:
    """What is measured, without the marks, is the published formula with per-row channel parameters, 5 D + 2 n l."""
    got = stored(ZipCache(**FIFTH), 840, ModelShape(1, 32, 32, 128))
    exact = 2 * 840 * 4096 * 2
    assert round(exact / (got["codes"] + got["parameters"]), 3) == 4.921
    assert round(exact / got["total"], 3) == 4.911
