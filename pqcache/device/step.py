"""One layer's decode step as a chain of Triton kernels: no copy of what is chosen (or one, straight from pinned memory), no wait.

What changes from step to step is one number per row, the cursor, which the last kernel of the chain moves on. Kernels read it on
the device, so the chain can also be recorded once as a CUDA graph and replayed (`pqcache.selective.captured`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pqcache import kernels
from pqcache.device.block_tables import BlocksOnDevice, to_device
from pqcache.store.block_cache import BlockCacheStore
from pqcache.store.buffer import Buffer
from pqcache.store.host import HostStore
from pqcache.store.resident import ResidentStore

if TYPE_CHECKING:
    from pqcache.selective.budget import Plan
    from pqcache.selective.ledger import Ledger

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Coded(NamedTuple):
    """What an index that ranks by product-quantized scores gives away; both follow the index, nothing is copied."""

    centroids: torch.Tensor  # (n, h_kv, m, C, d / m)
    codes: Buffer  # (n, h_kv * m, capacity): entry i is the token at position n_sink + i


def serves(q: torch.Tensor, store: object) -> bool:
    """Whether the kernels serve queries of this kind over this store."""
    if q.dtype not in DTYPES or not kernels.on_device(q):
        return False
    if isinstance(store, HostStore) and type(store) in (HostStore, BlockCacheStore):  # another cache asks the host
        return not q.is_cuda or all(host.pinned for host in store.host)
    return type(store) is ResidentStore


def send(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A small table on the device; nobody waits for it."""
    return to_device(torch.tensor(values, dtype=dtype), device)


class DeviceStep:
    """Takes a layer's store over until `leave`: the store's window becomes a ring, its lengths are kept up to date.

    coded: the index to select by; None: every token is attended (over a ResidentStore). ledger: gets what a block cache's
    tables, which lie on the device as well until `leave`, have counted there.
    """

    def __init__(
        self,
        store: ResidentStore | HostStore,
        device: torch.device,
        plans: Sequence[Plan] = (),
        coded: Coded | None = None,
        n_sink: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.store, self.coded, self.n_sink = store, coded, n_sink
        self.device = device
        self.chosen = [plan.k for plan in plans]
        self.local = [plan.local for plan in plans]
        rows = [[n_sink, k, local, 0] for k, local in zip(self.chosen, self.local, strict=True)]
        self.cursor = send(store.lengths, torch.int32, device)
        self.plan = send(rows or [[0, 0, 0, 1]] * len(store.lengths), torch.int32, device)
        self.amount: torch.Tensor | None = None
        if coded is not None:
            from pqcache.device import triton_codes

            h_kv, m, c = coded.centroids.shape[1:4]
            self.amount = triton_codes.histogram(coded.codes.data, self.cursor, self.plan, n_sink, h_kv, m, c)
        if isinstance(store, HostStore):
            store.wait()  # kernels read the host rows themselves, and know of no copy under way
            store.window_to_ring()
        self.blocks: BlocksOnDevice | None = None
        if isinstance(store, BlockCacheStore):
            assert ledger is not None
            self.blocks = BlocksOnDevice(store, device, ledger)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per row in all: buffers that grow later would leave a recorded step behind."""
        store = self.store
        if isinstance(store, HostStore):
            if tokens - self.n_sink > store.host[0].capacity:
                self.finish()  # the host is about to copy what kernels write
            for buffer in store.host:
                buffer.reserve(tokens - self.n_sink)
            if self.blocks is not None:
                self.blocks.reserve()
        else:
            store.reserve(tokens)
        if self.coded is not None:
            self.coded.codes.reserve(tokens - self.n_sink)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the token k, v (n, h_kv, 1, d), choose for q (n, h, 1, d), attend.

        Returns the output (n, 1, h, d) and the chosen positions (n, h_kv, max(k)) int32, of which row r's first k[r] count.
        `note` has to be told, once per run.
        """
        from pqcache.device import triton_attend, triton_codes

        store, coded = self.store, self.coded
        self.reserve(store.length + 1)
        if isinstance(store, HostStore):
            near, far = (store.recent[0].data, store.recent[1].data), (store.host[0].data, store.host[1].data)
            sinks, one = (store.sinks[0], store.sinks[1]), False
        else:
            assert store.k is not None and store.v is not None
            near, far, one = (store.k.data, store.v.data), None, True
            sinks = near
        ring = near[0].shape[2]
        if coded is None:
            triton_codes.enter(k, v, near, ring, self.cursor, self.plan, far=far, n_sink=self.n_sink)
            out = triton_attend.attend(
                q, sinks, None, near, None, self.cursor, self.plan, ring=ring, tokens=ring, scaling=scaling, one=one,
                advance=True,
            )  # fmt: skip
            return out, None
        codes = coded.codes.data
        tables = triton_codes.enter(
            k, v, near, ring, self.cursor, self.plan, far=far, n_sink=self.n_sink, q=q, centroids=coded.centroids,
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
        """One more step has run: lengths and bytes moved. Returns the tokens it attended per query head, mean over rows."""
        store = self.store
        store.lengths = [length + 1 for length in store.lengths]
        n = len(store.lengths)
        if isinstance(store, HostStore):
            token = sum(x.shape[1] * x.shape[3] * x.element_size() for x in store.sinks)  # K and V of all heads
            store.moved("write_back", n * token)
            if self.blocks is None:  # else only the device knows which of them crossed
                store.moved("fetch", sum(self.chosen) * token)
        if self.coded is None:
            return sum(store.lengths) / n
        return self.n_sink + sum(a + b + 1 for a, b in zip(self.chosen, self.local, strict=True)) / n

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """The chosen positions as other steps name them: int64, -1 = padding."""
        count = self.plan[:, 1, None, None]
        return torch.where(torch.arange(indices.shape[2], device=indices.device) < count, indices, -1).long()

    def join(self) -> None:
        """The caller's stream goes on when what runs beside it has ended."""
        if self.blocks is not None:
            self.blocks.join()

    def finish(self) -> None:
        """Wait until the host may read, copy or release what kernels read and write there."""
        self.join()
        if isinstance(self.store, HostStore) and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def leave(self) -> None:
        """Give the store back as it was lent."""
        self.finish()
        if isinstance(self.store, HostStore):
            self.store.window_from_ring()
        if self.blocks is not None:
            self.blocks.leave()

    def __del__(self) -> None:
        """A cache dropped with steps under way: pinned memory is handed out again at once, unlike the device's own."""
        with contextlib.suppress(Exception):  # at the interpreter's end there may be no device left to ask
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not capturing:  # waiting would end the capture
                self.finish()

    def tensors(self) -> list[torch.Tensor]:
        tables = [] if self.blocks is None else self.blocks.tensors()
        return [self.cursor, self.plan, *([] if self.amount is None else [self.amount]), *tables]
