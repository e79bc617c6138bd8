"""A layer's decode step by Triton kernels against the plain one: outputs, choice, bytes, rows; and who is not served."""

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pqcache import kernels
from pqcache.device.step import DeviceStep
from pqcache.pq import PQCache
from pqcache.selective import Budget
from pqcache.selective.layer import DenseLayer, LayerContext, Step
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.lanes import Lanes

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = ModelShape(n_layers=1, h=4, h_kv=2, d=16)
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Driven:
    """One layer, a random prompt and some steps: what each step gave and chose."""

    def __init__(self, layer, lengths, dtype=torch.float32, seed=0):
        self.gen = torch.Generator().manual_seed(seed)
        self.layer, self.lengths, self.dtype, self.ledger = layer, list(lengths), dtype, Ledger()
        self.chosen: list[torch.Tensor] = []
        k, v = self.draw(SHAPE.h_kv, max(lengths)), self.draw(SHAPE.h_kv, max(lengths))
        if isinstance(layer, DenseLayer):
            layer.store.load(k, v, self.lengths)
        else:
            layer.settle(k, v, self.lengths, self.context(False))

    def draw(self, heads, t):
        return torch.randn(len(self.lengths), heads, t, SHAPE.d, generator=self.gen).to(self.dtype).to(DEVICE)

    def context(self, decode):
        self.ledger.decoding = decode
        past = [length - (not decode) for length in self.lengths]
        step = Step(decode, 1, past, [1] * len(past), self.lengths, ends_prompt=not decode, first=False)
        nothing: Any = None
        cache: Any = SimpleNamespace(
            ledger=self.ledger, lanes=Lanes(), observers=[], watchers=["someone"] if decode else [], recording=False
        )
        ctx = LayerContext(0, nothing, cache, nothing, nothing, nothing, None, [], nothing, step)
        ctx.scaling = SHAPE.d**-0.5
        return ctx

    def step(self):
        q, k, v = self.draw(SHAPE.h, 1), self.draw(SHAPE.h_kv, 1), self.draw(SHAPE.h_kv, 1)
        out = self.layer.decode(q, k, v, self.context(True))
        if self.layer.selected is not None:
            self.chosen.append(self.layer.selected.indices)
        self.lengths = [length + 1 for length in self.lengths]
        self.ledger.end_step()
        return out.float().cpu()


def made(store="resident", ratio=0.2, **hyper):
    hyper = {"m": 2, "b": 4, "n_sink": 4, **hyper}
    return PQCache(budget=Budget(ratio=ratio), store=store, **hyper).make_layer(0, SHAPE)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("store", ["resident", "host"])
def test_a_step_equals_the_plain_one(store, dtype):
    runs = []
    for mode in (kernels.plain_torch, kernels.interpreted):
        run = Driven(made(store), [150, 143] if dtype == torch.float32 else [150], dtype)
        with mode():
            outs = [run.step() for _ in range(2)]
            run.layer.map_rows(torch.tensor([1, 0] if len(run.lengths) > 1 else [0, 0]))
            run.lengths = run.layer.store.lengths
            outs.append(run.step())
        runs.append((run, outs))
    (plain, expected), (kernel, outs) = runs
    assert plain.layer.device_step is None and kernel.layer.device_step is not None
    for a, b in zip(expected, outs, strict=True):
        torch.testing.assert_close(b, a, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert all(torch.equal(a, b) for a, b in zip(plain.chosen, kernel.chosen, strict=True))
    assert plain.ledger.moved == kernel.ledger.moved
    assert plain.ledger.attended(all_layers=True) == pytest.approx(kernel.ledger.attended(all_layers=True))
    assert plain.layer.store.lengths == kernel.layer.store.lengths


@pytest.mark.parametrize("store", ["resident", "host"])
def test_the_two_kinds_of_steps_take_turns(store):
    runs = []
    for modes in (
        [kernels.plain_torch] * 4,
        [kernels.plain_torch, kernels.interpreted, kernels.plain_torch, kernels.interpreted],
    ):
        run, outs = Driven(made(store, ratio=0.1), [150]), []
        for mode in modes:
            with mode():
                outs.append(run.step())
        runs.append(outs)
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_the_window_turns_into_a_ring_and_back():
    layer = made("host")
    run = Driven(layer, [420, 390])
    with kernels.plain_torch():
        run.step()
    store = layer.store
    before = [x.clone() for x in store.read(4, None, 30)]
    store.window_to_ring()
    whole = store.view()
    for row, length in enumerate(store.lengths):
        for position in range(length - 30, length):
            for buffer, x in zip(store.recent, whole, strict=True):
                assert torch.equal(buffer.data[row, :, position % buffer.capacity], x[row, :, position])
    store.window_from_ring()
    assert all(torch.equal(a, b) for a, b in zip(before, store.read(4, None, 30), strict=True))


def test_full_attention_can_be_recorded_too():
    runs = []
    for mode in (kernels.plain_torch, kernels.interpreted):
        run = Driven(DenseLayer(0, SHAPE), [130, 70])
        with mode():
            if mode is kernels.interpreted:
                run.layer.prepare_capture(140)
            outs = [run.step() for _ in range(3)]
        runs.append((run, outs))
    (plain, expected), (kernel, outs) = runs
    assert kernel.layer.device_step is not None and plain.layer.device_step is None
    for a, b in zip(expected, outs, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
    assert plain.ledger.attended(all_layers=True) == kernel.ledger.attended(all_layers=True)


def test_room_is_made_before_a_recording():
    run = Driven(made("host"), [250])
    with pytest.raises(NotApplicable):
        run.layer.prepare_capture(300)
    with kernels.interpreted():
        run.step()
        run.layer.prepare_capture(900)
        pointers = [b.data.data_ptr() for b in (*run.layer.store.host, run.layer.index.codes)]
        run.step()
    assert pointers == [b.data.data_ptr() for b in (*run.layer.store.host, run.layer.index.codes)]
    assert all(b.capacity >= 890 for b in run.layer.store.host)
    tensors = run.layer.tensors()["device"]
    assert any(t is run.layer.device_step.cursor for t in tensors)


@pytest.mark.parametrize(
    "layer",
    [made(codes_store="host"), made(reduce="max_softmax"), made(ratio=1.0), made(n_sink=217)],
    ids=["codes", "reduce", "all", "sinks"],
)
def test_other_steps_go_the_general_way(layer):
    run = Driven(layer, [220])
    with kernels.interpreted():
        run.step()
    assert layer.device_step is None


def test_only_what_triton_computes_is_served():
    run = Driven(made(), [220], torch.float64)
    with kernels.interpreted():
        run.step()
    assert run.layer.device_step is None
    with kernels.interpreted(), kernels.plain_torch():
        assert not kernels.on_device(torch.zeros(1))
    with kernels.interpreted():
        assert kernels.on_device(torch.zeros(1)) and not kernels.native(torch.zeros(1))
        assert not kernels.on_device(torch.zeros(1, requires_grad=True))
    assert kernels.on_device(torch.zeros(1)) is False


def test_the_device_is_waited_for_before_its_memory_is_read_or_given_back(monkeypatch):
    """Kernels write pinned rows behind the allocator's back: a dropped cache must outlive them, a finished one have them."""
    gc.collect()  # other tests' steps
    waited = []
    monkeypatch.setattr(DeviceStep, "finish", lambda step: waited.append(len(step.store.lengths)))
    run = Driven(made("host"), [150])
    with kernels.interpreted():
        run.step()
    run.layer.wait()
    assert waited == [1]
    del run.layer
    gc.collect()
    assert waited == [1, 1]
