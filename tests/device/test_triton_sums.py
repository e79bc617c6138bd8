"""Triton's column sums against plain torch: on a CUDA device if there is one, else through Triton's interpreter."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache import kernels
from pqcache.device.switch import interpreted
from pqcache.selective.column_sums import add_column_sums

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
from pqcache.device import triton_sums

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}


@settings(max_examples=6, deadline=None)
@given(
    h_kv=st.integers(1, 2),
    g=st.sampled_from([1, 3]),
    d=st.sampled_from([8, 24]),
    counts=st.sampled_from([[70, 70], [90, 33], [1, 0], [64, 65]]),
    before=st.sampled_from([[0, 0], [100, 7]]),
    window=st.sampled_from([None, 5, 80]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_sums_as_in_plain_torch(h_kv, g, d, counts, before, window, dtype, seed):
    """Rows of different length, padded on the left, with keys from before the block, and with windows."""
    gen = torch.Generator().manual_seed(seed)
    stored = [a + max(1, b) for a, b in zip(before, counts, strict=True)]
    t, m = max(counts), max(stored)
    q = (3 * torch.randn(2, t, h_kv * g, d, generator=gen)).to(dtype).to(DEVICE).transpose(1, 2)  # as a model gives it
    k = torch.randn(2, h_kv, m + 5, d, generator=gen).to(dtype).to(DEVICE)
    start = torch.rand(2, h_kv * g, m + 3, generator=gen).to(DEVICE)  # earlier chunks' sums
    windows = None if window is None else [window, window + 1]
    with kernels.plain_torch():
        expected = start.clone()
        add_column_sums(expected, q, k, stored, counts, d**-0.5, windows=windows)
    with interpreted():
        got = start.clone()
        add_column_sums(got, q, k, stored, counts, d**-0.5, windows=windows)
    torch.testing.assert_close(got, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_a_prompt_is_two_launches_and_one_where_the_log_sum_exp_is_known(monkeypatch):
    """In plain torch a prompt of 128K tokens is millions: eight operations per block of 128 queries and group."""
    launched = []
    monkeypatch.setattr(
        triton_sums, "launch", lambda kernel, grid, x: lambda *_, **__: launched.append(kernel.__name__)
    )
    q, k = torch.zeros(1, 4, 600, 16, device=DEVICE), torch.zeros(1, 2, 600, 16, device=DEVICE)
    sums = torch.zeros(1, 4, 600, device=DEVICE)
    with interpreted():
        add_column_sums(sums, q, k, [600], [600], 0.25)
        assert launched == ["_row_lse", "_column_sums"]
        add_column_sums(sums, q, k, [600], [600], 0.25, lse=torch.zeros(1, 4, 600, device=DEVICE))
    assert launched == ["_row_lse", "_column_sums", "_column_sums"]
    assert not sums.any()  # nothing else has added


def test_a_known_log_sum_exp_is_used():
    gen = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 2, 70, 8, generator=gen).to(DEVICE), torch.randn(1, 1, 70, 8, generator=gen).to(DEVICE)
    lse = torch.randn(1, 2, 70, generator=gen).to(DEVICE)
    sums = [torch.zeros(1, 2, 70, device=DEVICE) for _ in range(2)]
    with kernels.plain_torch():
        add_column_sums(sums[0], q, k, [70], [70], 0.3, lse=lse)
    with interpreted():
        add_column_sums(sums[1], q, k, [70], [70], 0.3, lse=lse)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-4, atol=1e-4)
