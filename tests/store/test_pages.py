import mmap
import re
from pathlib import Path

import pytest
import torch

from pqcache.store import pages
from pqcache.store.buffer import Buffer

MAPS = Path("/proc/self/smaps")
linux = pytest.mark.skipif(
    not MAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux with large pages"
)


def advised(data: torch.Tensor) -> bool:
    """Whether the kernel was asked for large pages for the memory in the middle of `data`: flag "hg" of its mapping."""
    middle = data.data_ptr() + data.nbytes // 2
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", MAPS.read_text())[1:]:
        first, last = (int(address, 16) for address in entry.split()[0].split("-"))
        if first <= middle < last:
            return " hg" in re.search(r"^VmFlags:(.*)$", entry, re.MULTILINE)[1]
    raise AssertionError("no mapping holds the tensor")


@linux
def test_a_large_buffer_asks_for_large_pages_and_a_small_tensor_gets_none() -> None:
    fresh = mmap.mmap(-1, 1 << 17)  # memory of the allocator may have been a large buffer's before
    small = torch.frombuffer(fresh, dtype=torch.float32)
    pages.advise(small)
    assert not advised(small)
    large = Buffer(1, 2, (64,), torch.float32, torch.device("cpu"))
    large.reserve(100_000)
    assert advised(large.data)
    assert not large.data.any()
