"""Decode steps over codes by Triton kernels against the plain ones: outputs, codes, rows, bytes, and what a step launches."""

import sys

import pytest
import torch
from transformers import PreTrainedModel

from baselines.combined.coded import Coded
from baselines.gear import GEAR
from baselines.int8 import Int8
from baselines.kivi import KIVI
from baselines.zipcache import MiKV, ZipCache
from pqcache import kernels
from pqcache.device.packed_step import PackedStep, _places, attend_packed
from pqcache.device.switch import interpreted
from pqcache.selective import Budget, generate
from pqcache.selective.quantization import TILE, QuantizationMethod, attend_coded
from pqcache.store.codec import TokenCodec
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream
from tests.baselines.coded_stores import METHODS as STORES
from tests.baselines.coded_stores import store_of
from tests.device.driven import CLOSE, DEVICE, SHAPE, Driven
from tests.device.tables import counted_tables
from tests.invariants.drive import tokens
from tests.thin import thin

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are the CPU's")
FIFTH = Budget(ratio=0.2)
METHODS = {
    "kivi": lambda: KIVI(bits=3, group=8, residual=8),
    "zipcache": lambda: ZipCache(budget=FIFTH, gap=3),
    "int8": lambda: Int8(residual=2),
    "gear": lambda: GEAR(outliers=0.1, residual=4),
    "mikv": lambda: MiKV(budget=FIFTH, gap=3),
    "gear, released": lambda: GEAR(outliers=0.1, residual=4, protocol="release"),
}
SMALL = {"kivi": 2, "zipcache": 3, "gear": 3}


def took(make, mode, prompt, dtype=torch.float32) -> tuple[Driven, list[torch.Tensor]]:
    """Enough steps that each method packs, rows in between in another order."""
    torch.manual_seed(0)
    run = Driven(make().make_layer(0, SHAPE), prompt, dtype)
    with mode():
        outs = [run.step() for _ in range(3)]
        run.reorder(list(range(len(prompt)))[::-1])
        outs += [run.step() for _ in range(2)]
    return run, outs


@pytest.mark.parametrize("name", thin(METHODS, 3))
def test_a_step_over_codes_equals_the_plain_one(name: str) -> None:
    prompt = [30, 25] if name in ("kivi", "int8") else [30]
    (plain, expected), (kernel, outs) = (
        took(METHODS[name], mode, prompt) for mode in (kernels.plain_torch, interpreted)
    )
    assert plain.layer.substitute is None and isinstance(kernel.layer.substitute, PackedStep)
    for a, b in zip(expected, outs, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
    assert plain.ledger.attended(all_layers=True) == kernel.ledger.attended(all_layers=True)
    kernel.layer.take_back()
    for a, b in zip(*((run.layer.store.k, run.layer.store.v) for run in (plain, kernel)), strict=True):
        assert (a.body, a.tails) == (b.body, b.tails) and a.tail.shape == b.tail.shape
        for row, held in enumerate(a.tails):
            assert torch.equal(a.tail[row, :, a.tail.shape[2] - held :], b.tail[row, :, a.tail.shape[2] - held :])
        assert a.tensors()[0].shape == b.tensors()[0].shape
        torch.testing.assert_close(a.view(), b.view(), rtol=1e-6, atol=1e-6)


@pytest.mark.rest
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    (_, expected), (_, outs) = (took(METHODS[name], mode, [40], dtype) for mode in (kernels.plain_torch, interpreted))
    for a, b in zip(expected, outs, strict=True):
        torch.testing.assert_close(b, a, rtol=CLOSE[dtype], atol=CLOSE[dtype])


# every method of which some store has a layout, and rows of different length
@on_cpu
@pytest.mark.parametrize("name", thin(sorted(STORES), 6))
def test_a_store_that_keeps_its_tensors_is_attended_too(name: str) -> None:
    store = store_of(STORES[name], [40], 5, seed=2)
    q = torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(1))
    before = [x.clone() for x in store.tensors()["device"]]
    with kernels.plain_torch():
        want = attend_coded(q, store, 0.25)
    with interpreted():
        got = attend_packed(q, store, 0.25)
    assert got is not None
    torch.testing.assert_close(got[0].transpose(1, 2), want.out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got[1], want.lse, rtol=2e-5, atol=2e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, store.tensors()["device"], strict=True))


@pytest.mark.parametrize("bits", thin((3, 8, 2, 4, 1, 5, 6, 7), 9))
@pytest.mark.parametrize("group", [None, pytest.param(8, marks=pytest.mark.rest)])
def test_a_kernel_packs_the_very_codes_of_the_quantizer(bits: int, group: int | None) -> None:
    """Constant groups, halves between two codes and values at the edge of fp16 among them."""
    gen = torch.Generator().manual_seed(bits)
    stores = []
    for mode in (kernels.plain_torch, interpreted):
        streams = [PackedStream(TokenCodec(bits, group), KeepNewest(2)) for _ in "kv"]
        store = PackedStore(streams[0], streams[1])
        gen.manual_seed(bits)
        x = torch.randn(1, 1, 12, 24, generator=gen).to(DEVICE)
        x[:, :, 9], x[:, :, 10, ::2], x[0, :, 11] = 3.0, 1e6, torch.arange(24, device=DEVICE) / 2
        store.append(x[:, :, :9], -x[:, :, :9])
        store.pack()
        with mode():
            step = PackedStep.over(store, x.device) if mode is interpreted else None
            for t in range(9, 12):
                new = x[:, :, t : t + 1], -x[:, :, t : t + 1]
                if step is None:
                    store.append(*new)
                    store.pack()
                else:
                    step.run(x[:, :, :1], *new, 1.0)
                    step.note()
            if step is not None:
                assert len(step.packs) == 2
                step.leave()
        stores.append(store)
    plain, kernel = stores
    for a, b in ((plain.k, kernel.k), (plain.v, kernel.v)):
        assert a.body == b.body == [10]
        for old, new in zip(a.codec.parts, b.codec.parts, strict=True):
            assert torch.equal(old.view(10), new.view(10))
        assert torch.equal(a.tail, b.tail)


def test_a_ring_holds_each_token_once() -> None:
    for start, count, ring in ((0, 3, 4), (6, 4, 4), (7, 3, 5), (5, 0, 3)):
        pairs = list(_places(start, count, ring))
        where = [i for _, places in pairs for i in range(places.start, places.stop)]
        assert where == [(start + i) % ring for i in range(count)]
        assert [i for tokens, _ in pairs for i in range(tokens.start, tokens.stop)] == list(range(count))


@on_cpu
@pytest.mark.parametrize("name", ["zipcache", pytest.param("kivi", marks=pytest.mark.rest)])
def test_rings_are_all_that_a_device_holds_more(llama: PreTrainedModel, name: str) -> None:
    ids = torch.tensor([tokens(40, 1)])
    with kernels.plain_torch():
        plain = generate(llama, METHODS[name](), ids, max_new_tokens=4)
    with interpreted(), counted_tables() as tables:
        kernel = generate(llama, METHODS[name](), ids, max_new_tokens=4)
    assert plain.token_ids == kernel.token_ids and tables.bytes > 0
    assert kernel.resident_bytes == {"device": plain.resident_bytes["device"] + tables.bytes}


@on_cpu
@pytest.mark.rest
def test_an_evictor_with_a_codec_takes_the_same_way(llama: PreTrainedModel) -> None:
    ids = torch.tensor([tokens(60, 1)])
    method = Coded(
        budget=Budget(ratio=0.5), policy="snapkv", codec="kivi", codec_options={"bits": 3, "group": 8, "residual": 8}
    )
    with kernels.plain_torch():
        plain = generate(llama, method, ids, max_new_tokens=12)
    with interpreted():
        kernel = generate(llama, method, ids, max_new_tokens=12)
    assert plain.token_ids == kernel.token_ids and plain.attended_tokens == kernel.attended_tokens


@on_cpu
def test_codes_that_no_kernel_reads_are_decoded() -> None:
    """Ranges that differ within a width, and rows with blocks of their own."""
    segments = ZipCache(budget=FIFTH, gap=3, recompress="segment")
    for method, lengths in ((segments, [40]), (GEAR(residual=4), [40, 33])):
        assert isinstance(method, QuantizationMethod)
        store = store_of(method, lengths, 5, seed=1)
        with interpreted():
            assert attend_packed(torch.zeros(len(lengths), 4, 1, 16), store, 1.0) is None
            assert PackedStep.over(store, torch.device("cpu")) is None
    assert TILE == 1024
