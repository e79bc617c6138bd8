"""One layer's decode step as a chain of Triton kernels, without a wait.

Chosen tokens are read where they are stored; rows in pinned memory are copied once. Only one number per row changes from step to
step: the cursor, how many tokens the row holds. The last kernel of the chain advances it. Kernels read it on the device, so the
chain can also be recorded once as a CUDA graph and replayed (`pqcache.selective.captured`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from pqcache.device.block_tables import BlocksOnDevice
from pqcache.device.switch import on_device
from pqcache.store.transfer import send

if TYPE_CHECKING:
    from pqcache.selective.ledger import Ledger
    from pqcache.selective.substitute import StepParts

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def serves(q: torch.Tensor) -> bool:
    """Whether the kernels serve queries of this kind."""
    return q.dtype in DTYPES and on_device(q)


class DeviceStep:
    """Does decode steps on a store that is lent to it until `leave`; the store's lengths are kept up to date.

    See selective/substitute.py for the interface. ledger: gets what a block cache on loan counts on the device.
    """

    version = 0  # buffers that may grow have been reserved before a recording

    def __init__(self, parts: StepParts, device: torch.device, ledger: Ledger | None = None) -> None:
        self.store, self.codes, self.n_sink = parts.store, parts.codes, parts.n_sink
        self.device = device
        self.chosen = [plan.k for plan in parts.plans]
        self.local = [plan.local for plan in parts.plans]
        # columns of a plan: sinks, chosen tokens, local window, whether everything is attended instead
        plans = [[self.n_sink, k, local, 0] for k, local in zip(self.chosen, self.local, strict=True)]
        self.cursor = send(self.store.lengths, torch.int32, device)
        self.plan = send(plans or [[0, 0, 0, 1]] * len(self.store.lengths), torch.int32, device)
        self.amount: torch.Tensor | None = None  # candidates per joint code; see triton_codes.histogram
        if self.codes is not None:
            from pqcache.device import triton_codes

            h_kv, m, c = self.codes.centroids.shape[1:4]
            codes = self.codes.codes.data
            self.amount = triton_codes.histogram(codes, self.cursor, self.plan, self.n_sink, h_kv, m, c)
        self.lent = self.store.lend()
        self.blocks: BlocksOnDevice | None = None
        if self.lent.blocks is not None:
            assert ledger is not None
            self.blocks = BlocksOnDevice(self.lent, device, ledger)

    def serves(self, q: torch.Tensor) -> bool:
        return serves(q)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per row in all. A recorded step keeps addresses, so buffers must not grow later."""
        if tokens > self.store.room:
            self.finish()  # the host is about to copy what kernels write
        self.store.reserve(tokens)
        if self.blocks is not None:
            self.blocks.reserve()
        if self.codes is not None:
            self.codes.codes.reserve(tokens - self.n_sink)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the token k, v (n, h_kv, 1, d), choose for q (n, h, 1, d), attend.

        Returns the output (n, 1, h, d) and the chosen positions (n, h_kv, max(k)) int32, of which row r's first k[r] count.
        `note` must follow, once per run.
        """
        from pqcache.device import triton_attend, triton_codes

        self.reserve(self.store.length + 1)
        lent = self.lent
        near = lent.near[0].data, lent.near[1].data
        far = None if lent.far is None else (lent.far[0].data, lent.far[1].data)
        sinks = near if lent.sinks is None else lent.sinks
        one = far is None  # one buffer for sinks, chosen tokens and local window
        ring = near[0].shape[2]
        if self.codes is None:
            triton_codes.enter(k, v, near, ring, self.cursor, self.plan, far=far, n_sink=self.n_sink)
            out = triton_attend.attend(
                q, sinks, None, near, None, self.cursor, self.plan, ring=ring, tokens=ring, scaling=scaling, one=one,
                advance=True,
            )  # fmt: skip
            return out, None
        codes = self.codes.codes.data
        tables = triton_codes.enter(
            k, v, near, ring, self.cursor, self.plan, far=far, n_sink=self.n_sink, q=q, centroids=self.codes.centroids,
            codes=codes, amount=self.amount, scaling=scaling,
        )  # fmt: skip
        indices = triton_codes.select(
            tables, self.amount, codes, self.cursor, self.plan, self.n_sink, max(self.chosen), codes.shape[2]
        )
        if self.blocks is not None:
            chosen = self.blocks.read(indices, self.cursor, self.plan)
        else:
            chosen = near if far is None else triton_attend.gather(*far, indices, self.plan, self.n_sink)
        tokens = self.n_sink + max(self.chosen) + max(self.local) + 1
        out = triton_attend.attend(
            q, sinks, chosen, near, indices if one else None, self.cursor, self.plan,
            ring=ring, tokens=tokens, scaling=scaling, one=one, advance=True,
        )  # fmt: skip
        if self.blocks is not None:
            self.blocks.change(self.cursor, self.plan)
        return out, indices

    def note(self) -> float:
        """Count one more step: lengths and bytes moved. Returns the tokens it attended per query head, mean over rows."""
        # with a block cache only the device knows how many tokens crossed: `BlocksOnDevice.report` counts them
        self.store.note_token(0 if self.blocks is not None else sum(self.chosen))
        n = len(self.store.lengths)
        if self.codes is None:
            return sum(self.store.lengths) / n
        return self.n_sink + sum(a + b + 1 for a, b in zip(self.chosen, self.local, strict=True)) / n

    def needs_host(self, ahead: int = 1) -> bool:
        """Never: the host only counts."""
        return False

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """Chosen positions as a layer names them: int64, -1 = padding."""
        count = self.plan[:, 1, None, None]
        return torch.where(torch.arange(indices.shape[2], device=indices.device) < count, indices, -1).long()

    def join(self) -> None:
        """Make the caller's stream wait for the work that runs beside it."""
        if self.blocks is not None:
            self.blocks.join()

    def finish(self) -> None:
        """Wait until the host may read, copy or release what kernels read and write there."""
        self.join()
        if self.lent.far is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def leave(self) -> None:
        """Give the store back."""
        self.finish()
        if self.blocks is not None:
            self.blocks.leave()
        self.store.take_back(self.lent)

    def __del__(self) -> None:
        """Wait if a cache is dropped with steps under way: pinned memory is reused at once, unlike the device's own."""
        with contextlib.suppress(Exception):  # at the interpreter's end there may be no device left to ask
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not capturing:  # waiting would end the capture
                self.finish()

    def tensors(self) -> list[torch.Tensor]:
        tables = [] if self.blocks is None else self.blocks.tensors()
        return [self.cursor, self.plan, *([] if self.amount is None else [self.amount]), *tables]
