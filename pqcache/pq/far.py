"""Centroids and codes stored on the host. A copy is sent to the device for each step, while the layer before runs."""

from collections.abc import Callable, Sequence

import torch

from pqcache.store.buffer import Buffer
from pqcache.store.lanes import NOTHING, TO_DEVICE, TO_HOST, Lanes, Work

# one step's copy on the device: centroids; codes (n, lines, tokens + 1), one line per KV head and sub-space
Near = tuple[torch.Tensor, torch.Tensor]


class FarCodes:
    """Sends one layer's centroids and codes to the device, and new tokens' codes back (PQCache, section 3.4).

    All codes are sent at every step, since none stay on the device. The host buffer is token-major: one run of memory per row of
    the batch crosses, and a new token's code is one run, too. Without an accelerator the same copies are made and counted.
    """

    def __init__(self, device: torch.device, lanes: Lanes, moved: Callable[[str, int], None]) -> None:
        self.device, self.lanes, self.moved = device, lanes, moved
        self.tokens = 0  # coded so far, in the longest row
        self.coming: tuple[int, Work[Near]] | None = None  # copy under way: number of tokens, work
        self.near: Near | None = None  # this step's copy
        self.written: Work[None] = NOTHING  # the newest code on its way to the host

    def start(self, centroids: torch.Tensor, codes: Buffer) -> None:
        """Begin to send: centroids on the host, codes (n, lines, >= tokens) token-major."""
        tokens, device, written = self.tokens, self.device, self.written
        if self.coming is not None and self.coming[0] == tokens:
            return
        rows = codes.rows[:, :tokens]  # (n, tokens, lines)

        def copy() -> Near:
            written.wait()
            near = torch.empty((len(rows), tokens + 1, rows.shape[2]), dtype=rows.dtype, device=device)
            for target, source in zip(near, rows, strict=True):
                target[:tokens].copy_(source, non_blocking=True)
            return torch.empty_like(centroids, device=device).copy_(centroids, non_blocking=True), near.transpose(1, 2)

        self.coming = tokens, self.lanes.copy(TO_DEVICE, copy)
        self.moved("codes", rows.numel() * rows.element_size())
        self.moved("centroids", centroids.numel() * centroids.element_size())

    def take(self, centroids: torch.Tensor, codes: Buffer) -> Near:
        """This step's copy; sent now if `start` was not called."""
        if self.near is None:
            self.start(centroids, codes)
            assert self.coming is not None
            copy, self.coming = self.coming[1].wait(), None
            self.near = copy[0], copy[1].contiguous()  # heads first, as scoring reads them
        return self.near

    def append(self, codes: Buffer, new: torch.Tensor, starts: Sequence[int]) -> None:
        """Write the new token's codes new (n, lines) to entry starts[r] of row r, on device and host; none if it is negative."""
        assert self.near is not None
        if max(starts) >= codes.capacity:
            self.written.finish()  # the buffer is about to be copied: the last code must have arrived
        codes.reserve(max(starts) + 1)
        for row, start in enumerate(starts):
            if start >= 0:
                self.near[1][row, :, start] = new[row]
        target, places = codes.rows, [(row, start) for row, start in enumerate(starts) if start >= 0]

        def copy() -> None:
            for row, start in places:
                target[row, start].copy_(new[row], non_blocking=True)

        self.written = self.lanes.copy(TO_HOST, copy, new)
        self.moved("write_back", len(places) * new.shape[1] * new.element_size())
        self.tokens = max(self.tokens, max(starts) + 1)

    def end_step(self) -> None:
        """Release the copy on the device."""
        self.near = None

    def settle(self) -> None:
        """Wait for every copy: rows may then be moved, or read by the host."""
        self.written.finish()
        if self.coming is not None:
            self.coming[1].finish()
        self.coming = self.near = None
