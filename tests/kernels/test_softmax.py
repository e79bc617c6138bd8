"""Softmax in place and the exponentials below it, against float64, down to numbers that are subnormal in fp32."""

import numba
import numpy as np
import pytest
import torch

from pqcache import kernels
from pqcache.kernels.numeric import LEAST, NEGLIGIBLE, exponentials
from pqcache.kernels.softmax import FACTOR, scaled_softmax_
from pqcache.selective.column_sums import softmax_
from tests.drawn import drawn


@pytest.mark.parametrize("m", [1, 7, 16, 31, 64, 300])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_softmax_of_rows_of_any_length(m, scale):
    logits = torch.randn(2, 3, m) * scale
    expected = logits.double().softmax(-1)
    scaled_softmax_(logits)
    torch.testing.assert_close(logits.double() * FACTOR, expected, rtol=1e-4, atol=1e-45)


def test_no_probability_is_a_subnormal_number():
    """exp(-95) is subnormal in fp32; divided by FACTOR it is as exact as any other number."""
    logits = torch.tensor([[0.0, -95.0, -103.0, -200.0, -torch.inf]])
    scaled_softmax_(logits)
    expected = np.exp([0.0, -95.0, -103.0]) / FACTOR
    np.testing.assert_allclose(logits[0, :3].numpy(), expected, rtol=1e-5)
    assert (logits[0, :3] > torch.finfo(torch.float32).tiny).all()
    assert logits[0, 3:].tolist() == [0, 0]


def test_nan_spreads_over_its_row_alone():
    logits = torch.zeros(2, 20)
    logits[0, 17] = torch.nan
    scaled_softmax_(logits)
    assert logits[0].isnan().all()
    torch.testing.assert_close(logits[1] * FACTOR, torch.full((20,), 0.05))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("on", [True, False])
def test_a_factor_comes_with_what_any_dtype_gives(dtype, on, monkeypatch):
    monkeypatch.setitem(kernels.switch, "on", on)
    logits = drawn(0, 3, 4, 50, dtype=dtype) * 20
    expected = logits.double().softmax(-1)
    factor = softmax_(logits)
    torch.testing.assert_close(logits.double() * factor, expected, rtol=1e-4, atol=1e-45)


@numba.njit
def _exponentials(line, least):  # Python cannot call a kernel's part
    return exponentials(line, np.float32(0), least, 0)


def test_weights_too_small_to_count_are_zero():
    x = np.linspace(-120, 0, 999, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    below, to_zero = x.copy(), x.copy()
    total = _exponentials(below, NEGLIGIBLE)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)
    np.testing.assert_allclose(below[x >= -69.9], expected[x >= -69.9], rtol=1e-6)
    assert (below[x < -70.1] == 0).all()
    _exponentials(to_zero, LEAST)
    np.testing.assert_allclose(to_zero, expected, rtol=1e-6, atol=1.5e-45)
