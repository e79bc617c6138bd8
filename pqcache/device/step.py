"""One layer's decode step as a chain of Triton kernels, without a wait.

Chosen tokens are read where they are stored; rows in pinned memory are copied once. Only one number per row changes from step to
step: the cursor, how many tokens the row holds. The last kernel of the chain advances it. Kernels read it on the device, so the
chain can also be recorded once as a CUDA graph and replayed (`pqcache.selective.captured`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pqcache.device.block_tables import BlocksOnDevice
from pqcache.device.switch import HERE, device_of, on_device, still_served
from pqcache.store.transfer import send

if TYPE_CHECKING:
    from pqcache.selective.ledger import Ledger
    from pqcache.selective.substitute import StepParts

Chain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], "tuple[torch.Tensor, torch.Tensor | None]"]
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
        from pqcache.device.triton_attend import counters

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
        self.arrived = counters(len(self.store.lengths), self.lent.near[0].data.shape[1], device)
        self.length, self.room = max(self.store.lengths), 0  # tokens of the longest row, and for which there is room
        self.chain: Chain | None = None  # a step's launches, until a buffer grows
        self.key: tuple = ()  # what they were made for
        # tokens attended per query head in each step, mean over rows; None: all of them
        self.attended: float | None = None
        if self.codes is not None:
            pairs = zip(self.chosen, self.local, strict=True)
            self.attended = self.n_sink + sum(a + b + 1 for a, b in pairs) / len(self.store.lengths)
        self.blocks: BlocksOnDevice | None = None
        if self.lent.blocks is not None:
            assert ledger is not None
            self.blocks = BlocksOnDevice(self.lent, device, ledger)
        # tokens that cross in a step; with a block cache only the device knows: `BlocksOnDevice.report` counts them
        self.fetched = 0 if self.blocks is not None else sum(self.chosen)

    serves = staticmethod(still_served)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per row in all. A recorded step keeps addresses, so buffers must not grow later."""
        if tokens > self.store.room:
            self.finish()  # the host is about to copy what kernels write
        self.store.reserve(tokens)
        if self.blocks is not None:
            self.blocks.reserve()
        if self.codes is not None:
            self.codes.codes.reserve(tokens - self.n_sink)
        self.room, self.chain = self.store.room, None
        if self.codes is not None:
            self.room = min(self.room, self.n_sink + self.codes.codes.capacity)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the token k, v (n, h_kv, 1, d), choose for q (n, h, 1, d), attend.

        Returns the output (n, 1, h, d) and the chosen positions (n, h_kv, max(k)) int32, of which row r's first k[r] count.
        `note` must follow, once per run.
        """
        if self.length >= self.room:
            self.reserve(self.length + 1)
        key = scaling, q.shape, q.dtype
        if self.chain is None or key != self.key:
            self.key = key
            with device_of(q):
                self.chain = self._chain(q, scaling)
        device = device_of(q)
        if device is HERE:  # most often: two Python calls less
            return self.chain(q, k, v)
        with device:
            return self.chain(q, k, v)

    def _chain(self, q: torch.Tensor, scaling: float) -> Chain:
        """The launches of a step for queries like q, with all that stays the same until a buffer grows."""
        from pqcache.device import triton_attend, triton_codes

        lent, cursor, plan, n_sink, blocks = self.lent, self.cursor, self.plan, self.n_sink, self.blocks
        near = lent.near[0].data, lent.near[1].data
        far = None if lent.far is None else (lent.far[0].data, lent.far[1].data)
        sinks = near if lent.sinks is None else lent.sinks
        one = far is None  # one buffer for sinks, chosen tokens and local window
        ring = near[0].shape[2]
        sizes: dict[str, Any] = {
            "ring": ring, "scaling": scaling, "one": one, "advance": True, "arrived": self.arrived,
        }  # fmt: skip
        if self.codes is None:
            enter = triton_codes.prepare_enter(near, ring, cursor, plan, 1, far=far, n_sink=n_sink)
            attend = triton_attend.prepare_attend(q, sinks, None, near, cursor, plan, tokens=ring, widest=0, **sizes)

            def everything(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
                enter(k, v, k)
                return attend(q, None, None), None

            return everything
        (centroids, codes), widest = (self.codes.centroids, self.codes.codes.data), max(self.chosen)
        g = q.shape[1] // centroids.shape[1]
        enter = triton_codes.prepare_enter(
            near, ring, cursor, plan, g, far=far, n_sink=n_sink, centroids=centroids, codes=codes, amount=self.amount,
            scaling=scaling,
        )  # fmt: skip
        shape = (*centroids.shape[:2], g, *centroids.shape[2:4])
        joint = None if self.amount is None else self.amount.shape[2]
        select = triton_codes.prepare_select(shape, joint, codes, cursor, plan, n_sink, widest, codes.shape[2])
        tokens = n_sink + widest + max(self.local) + 1
        if one:
            attend = triton_attend.prepare_attend(
                q, sinks, near, near, cursor, plan, tokens=tokens, widest=widest, **sizes
            )

            def resident(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                indices = select(enter(k, v, q))
                return attend(q, indices, near), indices

            return resident
        assert far is not None
        if blocks is None:
            attend = triton_attend.prepare_attend(
                q, sinks, far, near, cursor, plan, tokens=tokens, widest=widest, n_sink=n_sink, **sizes
            )

            def hosted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                indices = select(enter(k, v, q))
                return attend(q, indices, far), indices

            return hosted
        like = q.new_empty((*centroids.shape[:2], widest, q.shape[3]))  # what is read, for its strides
        attend = triton_attend.prepare_attend(
            q, sinks, (like, like), near, cursor, plan, tokens=tokens, widest=0, **sizes
        )

        def cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            indices = select(enter(k, v, q))
            out = attend(q, None, blocks.read(indices, cursor, plan))
            blocks.change(cursor, plan)
            return out, indices

        return cached

    def note(self) -> float:
        """Count one more step: lengths and bytes moved. Returns the tokens it attended per query head, mean over rows."""
        self.store.note_token(self.fetched)
        self.length += 1
        if self.attended is None:
            return sum(self.store.lengths) / len(self.store.lengths)
        return self.attended

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
        return [self.cursor, self.plan, self.arrived, *([] if self.amount is None else [self.amount]), *tables]
