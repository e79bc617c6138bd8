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
    """Entries of given slots, or the lightest of many equal ones in any order; rows that drop nothing."""
    heads, lengths, kinds, first, window = pick(1, 3), pick.some(1, 300), pick(1, 5), pick(0, 50), pick(1, 250)
    seed = pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    n, longest = len(lengths), max(lengths)
    order = [torch.stack([torch.randperm(longest, generator=gen) for _ in range(heads)]) for _ in lengths]
    positions = torch.stack(order).int()
    weights = torch.randint(kinds, (n, heads, longest), generator=gen).float() * 1e-42  # subnormal numbers rank, too
    keys = torch.randn(n, heads, longest, *pick([(8,), (2, 6)]), generator=gen).to(
        pick([torch.float32, torch.bfloat16])
    )
    token_major, slots = pick([False, True]), torch.randint(min(lengths), (n, heads), generator=gen)
    by_slots = pick([False, True])
    rows = torch.randint(2, (n,), generator=gen).bool().tolist()
    kept = []
    for switch in (contextlib.nullcontext, kernels.without_numba):
        buffers = filled(positions, weights, keys, token_major=token_major)
        choice = slots if by_slots else Lightest(buffers[0].data, buffers[1].data, [first] * n, [longest - window] * n)
        with switch():
            drop(buffers, choice, lengths, rows)
        kept.append([buffer.data for buffer in buffers])
    for one, two in zip(*kept, strict=True):
        assert torch.equal(one, two)
    for row, length in enumerate(lengths):
        gone = slots[row] if by_slots and rows[row] else []
        for head, slot in enumerate(gone):  # the last entry takes the place
            assert torch.equal(kept[0][2][row, head, slot], keys[row, head, length - 1])
