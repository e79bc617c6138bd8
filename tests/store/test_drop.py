"""One entry per head leaves several buffers."""

import torch

from pqcache.store.buffer import Buffer
from pqcache.store.drop import Lightest, drop
from tests.drawn import Pick, examples


def filled(*contents: torch.Tensor, token_major: bool = False) -> list[Buffer]:
    buffers = [Buffer.like(x, token_major=token_major and x.ndim > 3) for x in contents]
    for buffer, x in zip(buffers, contents, strict=True):
        buffer.write(x, [0] * x.shape[0], [x.shape[2]] * x.shape[0])
    return buffers


def test_the_latest_of_the_lightest_entries() -> None:
    positions = torch.tensor([[[0, 5, 3, 9, 4]], [[0, 1, 2, 3, 4]]], dtype=torch.int32)
    weights = torch.tensor([[[0.0, 1.0, 2.0, 0.0, 1.0]], [[3.0, 3.0, 3.0, 0.5, 0.0]]])
    for first, ends, lengths, gone in (([1, 0], [9, 5], [5, 4], [1, 3]), ([7, 0], [9, 3], [5, 5], [0, 2])):
        buffers = filled(torch.arange(5, dtype=torch.int32).expand(2, 1, -1))
        drop(buffers, Lightest(positions, weights, first, ends), lengths, [True, True])
        for row, (slot, length) in enumerate(zip(gone, lengths, strict=True)):
            expected = list(range(length))
            expected[slot] = expected[-1]
            assert buffers[0].data[row, 0, :length].tolist() == expected


@examples(30)
def test_the_last_entry_takes_the_place(pick: Pick) -> None:
    """In every flagged row and head, of all buffers; other rows stay as they are."""
    heads, lengths, seed = pick(1, 3), pick.some(1, 300), pick(0, 99)
    gen = torch.Generator().manual_seed(seed)
    keys = torch.randn(len(lengths), heads, max(lengths), *pick([(8,), (2, 6)]), generator=gen)
    slots = torch.randint(min(lengths), (len(lengths), heads), generator=gen)
    rows = torch.randint(2, (len(lengths),), generator=gen).bool().tolist()
    (buffer,) = filled(keys, token_major=pick([False, True]))
    drop([buffer], slots, lengths, rows)
    for row, (length, flag) in enumerate(zip(lengths, rows, strict=True)):
        expected = keys[row].clone()
        for head, slot in enumerate(slots[row] if flag else []):
            expected[head, slot] = keys[row, head, length - 1]
        assert torch.equal(buffer.data[row, :, : keys.shape[2]], expected)
