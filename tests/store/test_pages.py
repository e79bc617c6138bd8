import mmap
import sys

import pytest
import torch

from pqcache.store import pages
from pqcache.store.buffer import Buffer


def test_a_large_buffer_asks_for_large_pages_and_a_small_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *a: asked.append(a))
    monkeypatch.setattr(pages, "_HUGEPAGE", 14)
    monkeypatch.setattr(sys, "platform", "linux")
    small = Buffer(1, 2, (64,), torch.float32, torch.device("cpu"))
    small.reserve(256)
    assert asked == []
    large = Buffer(1, 2, (64,), torch.float32, torch.device("cpu"))
    large.reserve(32_768)
    ((start, size, _),) = asked
    first, last = large.data.data_ptr(), large.data.data_ptr() + large.data.nbytes
    assert first <= start and start + size <= last and size > large.data.nbytes - 2 * mmap.PAGESIZE
    assert not large.data.any()


def test_without_the_call_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    pages.advise(torch.empty(4 << 20))
    monkeypatch.setattr(pages, "_HUGEPAGE", None)
    pages.advise(torch.empty(4 << 20))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's call")
def test_the_kernel_takes_the_call() -> None:
    data = torch.empty(4 << 20)
    pages.advise(data)
    assert float(data.fill_(1).sum()) == data.numel()
