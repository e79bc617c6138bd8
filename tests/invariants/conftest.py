"""Small random models in float64, so that equality of two code paths is not blurred by rounding."""

from __future__ import annotations

import functools
import zlib

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.invariants.cases import ARCHITECTURES, CASES, pairs


@functools.cache
def build(architecture: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # the default start attends almost evenly, and every selection would look alike
    return model


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `model` and `case` runs over the pairs of cases.py: an architecture per case, and in the rest another one of
    every second case, the others in the next test.

    What a cache refuses, and how rows are fed together, depends on the method, not on the architecture: one is enough there.
    """
    if "case" not in metafunc.fixturenames:
        return
    if "model" not in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=lambda case: case.id)
        return
    test = metafunc.definition.name
    more = slice(zlib.crc32(test.encode()) // 16 % 2, None, 2)
    shifts = [(0, slice(None), ()), (4, more, pytest.mark.rest)]
    if metafunc.module.__name__.endswith(("test_refusals", "test_batch")):
        shifts = shifts[:1]
    chosen = [
        pytest.param(case, name, id=f"{case.id}-{name}", marks=marks)
        for shift, which, marks in shifts
        for case, name in pairs(test, shift)[which]
    ]
    metafunc.parametrize(("case", "model"), chosen, indirect=["model"])


@pytest.fixture(autouse=True)
def _one_thread():
    """Matrices of 64 columns gain nothing from a second thread, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")
