"""Pinned host memory in blocks of exactly the size asked for, used again by later requests of that size.

torch's own allocator rounds every pinned block up to a power of two and keeps it until the process ends: 131,328 tokens would
take the memory of 262,144. A block here is ordinary memory that is registered with CUDA. When its last tensor is dropped it stays
registered for the next request of its size, as long as all blocks together stay within the most that was ever used at once.
"""

import ctypes
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PAGE = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


@dataclass
class _Block:
    memory: torch.Tensor  # uint8, a page longer than `nbytes`
    address: int
    nbytes: int
    idle: bool = True  # no copy to or from it can be under way


class PinnedBlocks:
    """Registered blocks, in use or free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a tensor may be dropped, and its block come back, at any allocation
        self._free: list[_Block] = []
        self.used = self.most = 0  # bytes in use, now and at most

    @property
    def kept(self) -> int:
        """Bytes of free blocks."""
        return sum(block.nbytes for block in self._free)

    def zeros(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in pinned memory. Raises RuntimeError where CUDA cannot pin them."""
        size = math.prod(sizes) * dtype.itemsize
        if size == 0:
            return torch.zeros(tuple(sizes), dtype=dtype)
        nbytes = -(-size // _PAGE) * _PAGE
        with self._lock:
            block = self._reuse(nbytes) or self._register(nbytes)
            self.used += nbytes
            self.most = max(self.most, self.used)
        handle = (ctypes.c_char * nbytes).from_address(block.address)
        weakref.finalize(handle, self._give_back, block).atexit = False
        tensor = torch.frombuffer(handle, dtype=torch.uint8, count=size)  # holds `handle` as long as its memory is used
        return tensor.view(dtype).view(tuple(sizes)).zero_()

    def _reuse(self, nbytes: int) -> _Block | None:
        block = next((block for block in self._free if block.nbytes == nbytes), None)
        if block is None:
            return None
        self._free.remove(block)
        # the device may still read what was there: torch's allocator knows its streams, this one does not
        if not block.idle:
            self._wait()
        return block

    def _wait(self) -> None:
        for device in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]  # an unused one stays unused
                torch.cuda.synchronize(device)
        for block in self._free:
            block.idle = True

    def _register(self, nbytes: int) -> _Block:
        while self._free and self.used + self.kept + nbytes > self.most:
            self._release(self._free.pop(0))
        memory = torch.empty(nbytes + _PAGE, dtype=torch.uint8)
        address = -(-memory.data_ptr() // _PAGE) * _PAGE
        status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if status != 0:
            raise RuntimeError(f"cannot pin {nbytes:,} bytes of host memory: CUDA's error {status}")
        return _Block(memory, address, nbytes)

    def _release(self, block: _Block) -> None:
        if not block.idle:
            self._wait()
        torch.cuda.cudart().cudaHostUnregister(block.address)

    def _give_back(self, block: _Block) -> None:
        with self._lock:
            block.idle = False
            self.used -= block.nbytes
            self._free.append(block)


_blocks = PinnedBlocks()


def zeros(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in pinned memory, from the blocks of this process."""
    return _blocks.zeros(sizes, dtype)
