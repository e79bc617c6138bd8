"""One entry per head leaves several buffers: by a kernel and in plain torch."""

import contextlib

import pytest
import torch

from pqcache import kernels
from pqcache.store.buffer import Buffer
from pqcache.store.drop import Lightest, drop
from tests.drawn import Pick, examples


def filled(*contents: torch.Tensor, token_major: bool = False) -> list[Buffer]:
    buffers = [Buffer.like(x, token_major=token_major and x.ndim > 3) for x in contents]
    for buffer, x in zip(buffers, contents, strict=True):
        buffer.write(x, [0] * x.shape[0], [x.shape[2]] * x.shape[0])
    return buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("rest", [(), (4,), (2, 6)])
@pytest.mark.parametrize("token_major", [False, True])
def test_an_entry_per_head_becomes_the_last_one_of_its_row(
    dtype: torch.dtype, rest: tuple[int, ...], token_major: bool
) -> None:
    x = torch.randint(100, (3, 2, 7, *rest)).to(dtype)
    slots = torch.tensor([[0, 4], [1, 1], [5, 2]])
    other = torch.randint(100, (3, 2, 7)).to(torch.int32)
    native, plain = (filled(x, other, token_major=token_major) for _ in range(2))
    drop(native, slots, [7, 6, 3], [True, False, True])
    with kernels.without_numba():
        drop(plain, slots, [7, 6, 3], [True, False, True])
    for one, two in zip(native, plain, strict=True):
        assert torch.equal(one.data, two.data) and one.filled == two.filled == 6
    assert torch.equal(native[0].data[2, 0, 5], x[2, 0, 2]) and torch.equal(native[0].data[1, :, :7], x[1])


@pytest.mark.parametrize("native", [True, False])
def test_the_latest_of_the_lightest_entries(native: bool) -> None:
    positions = torch.tensor([[[0, 5, 3, 9, 4]], [[0, 1, 2, 3, 4]]], dtype=torch.int32)
    weights = torch.tensor([[[0.0, 1.0, 2.0, 0.0, 1.0]], [[3.0, 3.0, 3.0, 0.5, 0.0]]])
    for first, ends, lengths, gone in (([1, 0], [9, 5], [5, 4], [1, 3]), ([7, 0], [9, 3], [5, 5], [0, 2])):
        buffers = filled(torch.arange(5, dtype=torch.int32).expand(2, 1, -1))
        with contextlib.nullcontext() if native else kernels.without_numba():
            drop(buffers, Lightest(positions, weights, first, ends), lengths, [True, True])
        for row, (slot, length) in enumerate(zip(gone, lengths, strict=True)):
            expected = list(range(length))
            expected[slot] = expected[-1]
            assert buffers[0].data[row, 0, :length].tolist() == expected


@examples(30)
def test_kernel_and_plain_torch_drop_the_same(pick: Pick) -> None:
    """Many equal weights; entries in any order; rows that drop nothing."""
    heads, lengths, kinds, first, window = pick(1, 3), pick.some(1, 300), pick(1, 5), pick(0, 50), pick(1, 250)
    seed = pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    n, longest = len(lengths), max(lengths)
    order = [torch.stack([torch.randperm(longest, generator=gen) for _ in range(heads)]) for _ in lengths]
    positions = torch.stack(order).int()
    weights = torch.randint(kinds, (n, heads, longest), generator=gen).float() * 1e-42  # subnormal numbers rank, too
    keys = torch.randn(n, heads, longest, 8, generator=gen)
    rows = torch.randint(2, (n,), generator=gen).bool().tolist()
    kept = []
    for switch in (contextlib.nullcontext, kernels.without_numba):
        buffers = filled(positions, weights, keys)
        choice = Lightest(buffers[0].data, buffers[1].data, [first] * n, [longest - window] * n)
        with switch():
            drop(buffers, choice, lengths, rows)
        kept.append([buffer.data for buffer in buffers])
    for one, two in zip(*kept, strict=True):
        assert torch.equal(one, two)
