"""The compiled attention over all tokens against plain torch, over rows of every width."""

from unittest.mock import patch

import pytest
import torch

from pqcache import kernels
from pqcache.kernels import attend
from pqcache.selective import attention
from tests.drawn import examples
from tests.thin import thin
from tests.threads import threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scaling: float) -> torch.Tensor:
    """Softmax attention row by row, in float64."""
    rows = []
    for r, length in enumerate(lengths):
        keys, values = (x[r, :, :length].double().repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (k, v))
        rows.append((q[r].double() @ keys.transpose(1, 2) * scaling).softmax(-1) @ values)
    return torch.stack(rows).transpose(1, 2)


@pytest.mark.rest
@examples(25)
def test_equals_softmax_attention(pick):
    lengths, h_kv, g, d = pick.some(1, 700), pick(1, 3), pick([1, 2, 3, 4, 7, 8]), pick([16, 24, 80, 128])
    dtype, token_major, workers, seed = pick(DTYPES), pick([False, True]), pick([1, 2]), pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    n, longest = len(lengths), max(lengths)
    size = (n, longest + 5, h_kv, d) if token_major else (n, h_kv, longest + 5, d)
    k, v = (torch.randn(size, generator=gen).to(dtype) for _ in range(2))
    if token_major:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    for r, length in enumerate(lengths):  # what is behind a row's end is not read
        k[r, :, length:] = v[r, :, length:] = torch.nan
    k, v = k[:, :, :longest], v[:, :, :longest]
    q = torch.randn(n, h_kv * g, 1, d, generator=gen).to(dtype)
    with threads(workers):
        out = attend.attend_all(q, k, v, lengths, d**-0.5)
    assert out.dtype == dtype and out.shape == (n, 1, h_kv * g, d)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]  # the output's own rounding
    torch.testing.assert_close(out.double(), expected(q, k, v, lengths, d**-0.5), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("workers", [1, 2])
def test_long_rows_and_large_logits(workers: int) -> None:
    """Several parts per head, a running maximum that grows, and weights that are 0."""
    gen = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 1, 1, 5000, 16, generator=gen).unbind(0)
    k *= torch.linspace(1, 30, 5000)[:, None]
    q = torch.randn(1, 4, 1, 16, generator=gen) * 3
    with threads(workers):
        out = attend.attend_all(q, k, v, [5000], 1.0)
    torch.testing.assert_close(out.double(), expected(q, k, v, [5000], 1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", thin(DTYPES, 3))
def test_infinity_and_nan_are_not_hidden(dtype: torch.dtype) -> None:
    for value in (torch.nan, torch.inf):
        for of_keys in (True, False):
            k, v = torch.ones(2, 1, 2, 300, 16, dtype=dtype).unbind(0)
            (k if of_keys else v)[0, 1, 299, 3] = value
            out = attend.attend_all(torch.ones(1, 4, 1, 16, dtype=dtype), k, v, [300], 1.0)[0, 0]
            assert torch.isfinite(out[:2]).all() and not torch.isfinite(out[2:]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_widened_exactly(dtype: torch.dtype) -> None:
    """A single token has weight 1: the output is its value, bit by bit."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    v = numbers[: len(numbers) // 128 * 128].view(1, -1, 1, 128)
    heads = v.shape[1]
    out = attend.attend_all(torch.zeros(1, heads, 1, 128, dtype=dtype), torch.zeros_like(v), v, [1], 1.0)
    assert torch.equal(out.view(-1), v.reshape(-1))


def test_who_is_served() -> None:
    q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 20, 32)
    assert attend.serves(q, k, k)
    assert not attend.serves(q.double(), k.double(), k.double())
    assert not attend.serves(q, k.bfloat16(), k.bfloat16())
    assert not attend.serves(q, k.transpose(2, 3).contiguous().transpose(2, 3), k)


def test_steps_of_rows_use_it() -> None:
    """Rows of different lengths: the same as without the kernel."""
    q, k, v = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 2, attention.NATIVE_FROM + 40, 16)
    lengths = [k.shape[2], k.shape[2] - 15]
    with patch.object(attend, "attend_all", wraps=attend.attend_all) as kernel:
        native = attention.attend_rows(q, k, v, lengths, 0.25)
        assert [call.args[3] for call in kernel.call_args_list] == [lengths]
        with kernels.plain_torch():
            plain = attention.attend_rows(q, k, v, lengths, 0.25)
    assert kernel.call_count == 1
    torch.testing.assert_close(native, plain, rtol=1e-4, atol=1e-5)
