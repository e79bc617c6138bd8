"""Centroids and codes stored on the host: each step has its own copy on the device, sent while the layer before runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pqcache.store.buffer import Buffer
from pqcache.store.lanes import NOTHING, TO_DEVICE, TO_HOST, Lanes, Work

Near = tuple[torch.Tensor, torch.Tensor]  # centroids; codes (n, lines, tokens + room for the step's own)


class FarCodes:
    """Sends one layer's centroids and codes to the device, and new tokens' codes back (PQCache, section 3.4).

    All rows are sent at every step, as nothing of them stays. The host buffer is token-major: what crosses is one run of memory
    per row of the batch, and so is a new token's code. Copies on a machine without an accelerator are made and counted alike.
    """

    def __init__(self, device: torch.device, lanes: Lanes, moved: Callable[[str, int], None]) -> None:
        self.device, self.lanes, self.moved = device, lanes, moved
        self.tokens = 0  # coded so far, in the longest row
        self.coming: tuple[int, Work[Near]] | None = None  # how many tokens, and their copy
        self.near: Near | None = None  # this step's
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
        """The new token's codes new (n, lines) at entry starts[r] of row r, here and there; none where that is negative."""
        assert self.near is not None
        if max(starts) >= codes.capacity:
            self.written.finish()  # what is being written moves with the buffer
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
