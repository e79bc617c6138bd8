"""Pinned blocks without CUDA: a stand-in notes what is registered."""

from types import SimpleNamespace

import pytest
import torch

from pqcache.store import pinned
from pqcache.store.buffer import Buffer
from pqcache.store.pinned import PinnedBlocks


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`registered`: address -> bytes; `waits`: how often the device was waited for."""
    state = SimpleNamespace(registered={}, waits=0, made=0, status=0)

    def register(address: int, nbytes: int, flags: int) -> int:
        assert address % 4096 == 0 and nbytes % 4096 == 0 and flags == 1
        state.registered[address] = nbytes
        state.made += 1
        return state.status

    def wait(*_: object) -> None:
        state.waits += 1

    cudart = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: state.registered.pop(address)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == 1, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pinned, "_blocks", PinnedBlocks())
    return state


def test_a_buffer_pins_no_more_than_it_holds(driver: SimpleNamespace) -> None:
    """Just above a power of two, torch would pin nearly twice as much."""
    buffer = Buffer(1, 8, (16,), torch.float16, torch.device("cpu"), pinned=True, token_major=True)
    buffer.reserve(4096 + 1)
    (held,) = driver.registered.values()
    assert buffer.capacity == 4352 and held == 4352 * 8 * 16 * 2
    assert buffer.data.data_ptr() in driver.registered and not buffer.data.any()


def test_a_request_takes_the_blocks_of_the_one_before(driver: SimpleNamespace) -> None:
    for _ in range(3):
        tensors = [pinned.zeros((4, 1024), torch.float32) for _ in range(5)] + [pinned.zeros((3, 5000), torch.uint8)]
        assert not any(x.any() for x in tensors)
        for x in tensors:
            x.fill_(7)
        view = tensors[0][1:]
        del tensors, x
        assert len(driver.registered) == 6  # a view holds its block
        del view
    assert driver.made == 6 and driver.waits == 2  # once per later request


def test_blocks_of_old_sizes_are_released(driver: SimpleNamespace) -> None:
    blocks = pinned._blocks
    for pages in (10, 11, 12, 13):  # a longer prompt each time
        held = [blocks.zeros((pages * 4096,), torch.uint8) for _ in range(4)]
        assert blocks.used == 4 * pages * 4096
        assert blocks.used + blocks.kept == sum(driver.registered.values()) <= blocks.most
        del held
    assert sum(driver.registered.values()) <= 4 * 13 * 4096


def test_a_block_that_cannot_be_pinned_is_an_error(driver: SimpleNamespace) -> None:
    driver.status = 2
    with pytest.raises(RuntimeError, match="cannot pin 4,096 bytes"):
        pinned.zeros((10,), torch.uint8)
