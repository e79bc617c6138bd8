"""Where modules compute and weights are, by what accelerate leaves on a model; shown with hooks of our own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pqcache.selective.placement import devices, home, places
from pqcache.store.lanes import CudaLanes, Lanes, ThreadLanes

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def hooked(module: nn.Module, at: object, kept: dict[str, torch.Tensor] | None = None) -> nn.Module:
    module._hf_hook = SimpleNamespace(execution_device=at, weights_map=kept)  # type: ignore[assignment]
    return module


def test_modules_compute_where_their_hook_says() -> None:
    plain = nn.Linear(2, 2)
    assert home(plain) == CPU and devices(plain) == [CPU] and places(plain) == {}
    model = nn.Sequential(hooked(nn.Linear(2, 2, device="meta"), 1), hooked(nn.Linear(2, 2), "cpu"), nn.ReLU())
    assert home(hooked(model, 0)) == FIRST
    assert devices(model) == [FIRST, SECOND, CPU]
    assert home(SimpleNamespace(device=CPU)) == CPU


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [
        ({"": 0}, {}),
        ({"a": "cuda:0", "b": 0}, {}),
        ({"a": 0, "b": 1, "c": 1}, {"cuda:0": 1, "cuda:1": 2}),
        ({"a": "cpu", "b": "disk"}, {"cpu": 1, "disk": 1}),
        ({"": "disk"}, {"disk": 1}),
    ],
)
def test_places(device_map: dict, expected: dict) -> None:
    assert places(SimpleNamespace(hf_device_map=device_map)) == expected


@pytest.mark.parametrize("make", [Lanes, lambda: ThreadLanes(2), lambda: CudaLanes(FIRST, 3)])
def test_every_device_has_its_own_lanes(make) -> None:
    lanes = make().serve(FIRST)
    assert lanes.on(FIRST) is lanes and lanes.on(CPU) is lanes
    other = lanes.on(SECOND)
    assert type(other) is type(lanes) and other is lanes.on(SECOND)
    assert (other.device, lanes.device) == (SECOND, FIRST)
    assert getattr(other, "workers", None) == getattr(lanes, "workers", None)
    closed = []
    other.close = lambda: closed.append(True)  # type: ignore[method-assign]
    lanes.close()
    assert closed == [True]
