"""A layer's decode step by Triton kernels against the plain one: outputs, choice, bytes, rows; and who is not served."""

import gc
import sys

import pytest
import torch

from pqcache import kernels
from pqcache.device.step import DeviceStep
from pqcache.device.switch import interpreted, on_device
from pqcache.selective.dense import DenseLayer
from pqcache.selective.shape import NotApplicable
from tests.device.driven import CLOSE, SHAPE, Driven, made
from tests.thin import thin

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)


@pytest.mark.parametrize("dtype", thin(CLOSE, 3))
@pytest.mark.parametrize("store", ["resident", "host"])
def test_a_step_equals_the_plain_one(store, dtype):
    runs = []
    for mode in (kernels.plain_torch, interpreted):
        run = Driven(made(store), [150, 143] if dtype == torch.float32 else [150], dtype)
        with mode():
            outs = [run.step() for _ in range(2)]
            run.reorder([1, 0] if len(run.lengths) > 1 else [0, 0])
            outs.append(run.step())
        runs.append((run, outs))
    (plain, expected), (kernel, outs) = runs
    assert plain.layer.substitute is None and kernel.layer.substitute is not None
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
        [kernels.plain_torch, interpreted, kernels.plain_torch, interpreted],
    ):
        run, outs = Driven(made(store, ratio=0.1), [150]), []
        for mode in modes:
            with mode():
                outs.append(run.step())
        runs.append(outs)
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_the_window_turns_into_a_ring_and_back():
    run = Driven(made("host"), [420, 390])
    with kernels.plain_torch():
        run.step()
    store = run.layer.store
    before = [x.clone() for x in store.read(4, None, 30)]
    lent = store.lend()
    whole = store.view()
    for row, length in enumerate(store.lengths):
        for position in range(length - 30, length):
            for buffer, x in zip(lent.near, whole, strict=True):
                assert torch.equal(buffer.data[row, :, position % buffer.capacity], x[row, :, position])
    store.take_back(lent)
    assert all(torch.equal(a, b) for a, b in zip(before, store.read(4, None, 30), strict=True))


def test_full_attention_can_be_recorded_too():
    runs = []
    for mode in (kernels.plain_torch, interpreted):
        run = Driven(DenseLayer(0, SHAPE), [130, 70])
        with mode():
            if mode is interpreted:
                run.layer.prepare_capture(140)
            outs = [run.step() for _ in range(3)]
        runs.append((run, outs))
    (plain, expected), (kernel, outs) = runs
    assert kernel.layer.substitute is not None and plain.layer.substitute is None
    for a, b in zip(expected, outs, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
    assert plain.ledger.attended(all_layers=True) == kernel.ledger.attended(all_layers=True)


def test_room_is_made_before_a_recording():
    run = Driven(made("host"), [250])
    with pytest.raises(NotApplicable):
        run.layer.prepare_capture(300)
    with interpreted():
        run.step()
        run.layer.prepare_capture(900)
        pointers = [b.data.data_ptr() for b in (*run.layer.store.host, run.layer.index.codes)]
        run.step()
    assert pointers == [b.data.data_ptr() for b in (*run.layer.store.host, run.layer.index.codes)]
    assert all(b.capacity >= 890 for b in run.layer.store.host)


@pytest.mark.parametrize(
    "layer",
    [made(codes_store="host"), made(reduce="max_softmax"), made(ratio=1.0), made(n_sink=217)],
    ids=["codes", "reduce", "all", "sinks"],
)
def test_other_steps_go_the_general_way(layer):
    run = Driven(layer, [220])
    with interpreted():
        run.step()
    assert layer.substitute is None


def test_only_what_triton_computes_is_served():
    run = Driven(made(), [220], torch.float64)
    with interpreted():
        run.step()
    assert run.layer.substitute is None
    with interpreted(), kernels.plain_torch():
        assert not on_device(torch.zeros(1))
    with interpreted():
        assert on_device(torch.zeros(1)) and not kernels.native(torch.zeros(1))
        assert not on_device(torch.zeros(1, requires_grad=True))
    assert on_device(torch.zeros(1)) is False


def test_the_device_is_waited_for_before_its_memory_is_read_or_given_back(monkeypatch):
    """Kernels write pinned rows behind the allocator's back: a dropped cache must outlive them, a finished one have them."""
    gc.collect()  # other tests' steps
    waited = []
    monkeypatch.setattr(DeviceStep, "finish", lambda step: waited.append(len(step.store.lengths)))
    run = Driven(made("host"), [150])
    with interpreted():
        run.step()
    run.layer.wait()
    assert waited == [1]
    del run.layer
    gc.collect()
    assert waited == [1, 1]
