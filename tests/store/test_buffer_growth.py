"""How often buffers are copied: not at all where the end is known, and else ever more rarely."""

import pytest
import torch

from pqcache.store.base import Store
from pqcache.store.buffer import Buffer
from pqcache.store.host import HostStore
from pqcache.store.resident import ResidentStore


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Capacities of the buffers that were allocated with room for a token."""
    made: list[int] = []
    allocate = Buffer._allocate

    def count(self: Buffer, n: int, heads: int, capacity: int, *rest: object) -> torch.Tensor:
        if capacity:
            made.append(capacity)
        return allocate(self, n, heads, capacity, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Buffer, "_allocate", count)
    return made


def test_a_long_buffer_grows_by_a_sixteenth(copies: list[int]) -> None:
    """A prompt of 131,072 tokens fills its buffer exactly. 5,000 tokens later it has been copied once, not twenty times."""
    buffer = Buffer(1, 1, (), torch.uint8, torch.device("cpu"))
    buffer.write(torch.ones(1, 1, 131_072, dtype=torch.uint8), [0], [131_072])
    for i in range(5000):
        buffer.write(torch.full((1, 1, 1), 2, dtype=torch.uint8), [131_072 + i], [1])
    assert copies == [131_072, 131_072 + 8192]
    assert buffer.slack == 8192 - 5000 and buffer.view(136_072).sum() == 131_072 + 10_000


@pytest.mark.parametrize("make", [ResidentStore, lambda: HostStore(4, 8, lambda kind, nbytes: None)])
def test_an_announced_end_needs_no_copy(copies: list[int], make) -> None:
    store: Store = make()
    store.expect(512 + 300)
    x = torch.randn(1, 1, 512, 2)
    store.load(x, x, [512])
    first = len(copies)
    for _ in range(300):
        store.append(x[:, :, :1], x[:, :, :1])
    assert len(copies) == first
    assert store.view()[0].shape[2] == 812


def test_an_evictor_gives_announced_room_back() -> None:
    store = ResidentStore()
    store.expect(5000)
    x = torch.randn(1, 1, 512, 2)
    store.load(x, x, [512])
    store.retain(torch.arange(256)[None, None], [256])
    store.append(x[:, :, :1], x[:, :, :1])
    assert store.k is not None and store.k.capacity == 512
