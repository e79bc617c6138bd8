"""K and V on the host, with sinks and the local window on the model's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from pqcache import kernels
from pqcache.store.base import RetrievalStore
from pqcache.store.buffer import STEP, Buffer, round_up, take_tokens
from pqcache.store.lanes import NOTHING, TO_HOST, Lanes, Work

HOST = torch.device("cpu")
_SLACK = STEP // 2  # the window is moved to the front of its buffer at most once in this many tokens


class HostStore(RetrievalStore):
    """Sinks (n, h_kv, n_sink, d) and a local window on the device; every token after the sinks in pinned host buffers.

    Host row i is the token at position n_sink + i. Window tokens are stored on both sides, so a token leaves the window without a
    copy. Each new token is written to the host once (`write_back`). Host buffers are token-major: a token, and a block of tokens,
    is one run of memory. On a machine without an accelerator the same copies are made and counted, memory to memory.

    Copies to the host run on `lanes`: a prompt's while the next layers compute, a token's while its layer attends. Call `fence`
    before you read host rows.
    """

    per_row: ClassVar[tuple[str, ...]] = ("sinks", "local", "host", "lengths")
    on_host: tuple[str, ...] = ("host",)

    def __init__(self, n_sink: int, n_local: int, moved: Callable[[str, int], None]) -> None:
        self.n_sink = n_sink
        self.n_local = n_local  # tokens always on the device besides the sinks: local window + the current token
        self.moved = moved  # called with (kind, bytes) for every copy between tiers; the ledger's `move`
        self.lanes = Lanes()
        self.lengths: list[int] = []
        self.expected = 0
        self.sinks: list[torch.Tensor] = []  # K, V
        self.local: list[Buffer] = []  # K, V; right-aligned columns, so rows of different length share them
        self.columns = 0  # filled columns of `local`
        self.host: list[Buffer] = []  # K, V
        self.written: Work[None] = NOTHING  # the newest copy to the host; earlier ones have ended when it has
        self.ahead: tuple[torch.Tensor, Work[Any]] | None = None  # prefetched indices, and the fetch of their K and V

    def use_lanes(self, lanes: Lanes) -> None:
        self.lanes = lanes

    def expect(self, tokens: int) -> None:
        self.expected = tokens

    def widen(self, n_local: int) -> None:
        self.n_local = n_local

    def fence(self) -> None:
        """Wait until all copies to the host have ended."""
        self.written.finish()

    def wait(self) -> None:
        """Wait for all copies, in both directions."""
        self.fence()
        if self.ahead is not None:
            self.ahead[1].finish()

    def load(self, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], known: HostStore | None = None) -> None:
        """Take over a whole prompt: k, v (n, h_kv, >= max(lengths), d), row r's tokens at 0 .. lengths[r]-1.

        known: the store of the earlier turns, whose host rows are taken over instead of copied again.
        """
        if known is not None:
            known.wait()
        self.lengths = list(lengths)
        span = self.columns = min(self.n_local, self.length)
        starts = [0] * len(self.lengths) if known is None else [max(0, n - self.n_sink) for n in known.lengths]
        ends = [max(0, length - self.n_sink) for length in self.lengths]
        for i, x in enumerate((k, v)):
            sinks = x.new_zeros((*x.shape[:2], self.n_sink, x.shape[3]))
            filled = min(self.n_sink, self.length)
            sinks[:, :, :filled] = x[:, :, :filled]
            local = Buffer.like(x)
            local.reserve(round_up(self.n_local + _SLACK))
            host = Buffer.like(x, device=HOST, pinned=True, token_major=True) if known is None else known.host[i]
            host.expected = max(0, self.expected - self.n_sink)
            host.reserve(max(ends) + 1)
            for row, length in enumerate(self.lengths):
                take = min(span, length)
                local.data[row, :, span - take : span] = x[row, :, length - take : length]
                local.data[row, :, : span - take] = 0  # a row shorter than the window: never undefined bytes
            crossing = sum(end - start for start, end in zip(starts, ends, strict=True))
            self.moved("write_back", crossing * x.shape[1] * x.shape[3] * x.element_size())
            self.sinks.append(sinks)
            self.local.append(local)
            self.host.append(host)
        self._write([x[:, :, self.n_sink :] for x in (k, v)], starts, ends, starts)

    def _write(
        self, values: list[torch.Tensor], starts: Sequence[int], ends: Sequence[int], froms: Sequence[int]
    ) -> None:
        """Queue a copy to the host: for each row r, host rows starts[r] .. ends[r]-1 become entries froms[r], ... of `values`.

        values: K and V (n, h_kv, t, d).
        """
        targets = [host.rows for host in self.host]

        def copy() -> None:
            for x, target in zip(values, targets, strict=True):
                for row, (start, end, first) in enumerate(zip(starts, ends, froms, strict=True)):
                    if end > start:
                        new = x[row, :, first : first + end - start].detach().transpose(0, 1)
                        # made contiguous on the device: a copy of strided memory would hold up the host
                        target[row, start:end].copy_(new.contiguous() if new.is_cuda else new, non_blocking=True)

        self.written = self.lanes.copy(TO_HOST, copy, *values)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add one token to every row: k, v (n, h_kv, 1, d)."""
        if self.ahead is not None:  # the prefetch reads lengths and host buffers, which change now
            self.ahead[1].wait()
        if self.columns == self.local[0].capacity:
            for local in self.local:
                local.data[:, :, : self.n_local] = local.data[:, :, self.columns - self.n_local :].clone()
                local.reserve(round_up(self.n_local + _SLACK))
            self.columns = self.n_local
        starts = [length - self.n_sink for length in self.lengths]
        if max(starts) >= self.host[0].capacity:
            self.fence()  # the buffer is about to be copied: copies into it must have ended
        for x, sinks, local, host in zip((k, v), self.sinks, self.local, self.host, strict=True):
            local.data[:, :, self.columns : self.columns + 1] = x
            host.reserve(max(starts) + 1)
            for row, start in enumerate(starts):
                if start < 0:  # a prompt shorter than the sinks: its first generated tokens become sinks
                    sinks[row, :, self.lengths[row]] = x[row, :, 0]
            self.moved("write_back", sum(start >= 0 for start in starts) * x[0].numel() * x.element_size())
        first, ends = [max(0, start) for start in starts], [start + 1 for start in starts]
        self._write([k, v], first, ends, [0] * len(starts))
        self.columns += 1
        self.lengths = [length + 1 for length in self.lengths]

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens, streamed to the device: for a new turn's exact attention."""
        self.fence()
        out = []
        for sinks, host in zip(self.sinks, self.host, strict=True):
            rows = host.rows[:, : max(0, self.length - self.n_sink)]
            self.moved("fetch", rows.numel() * rows.element_size())
            out.append(torch.cat([sinks, rows.to(sinks.device).transpose(1, 2)], dim=2)[:, :, : self.length])
        return out[0], out[1]

    def read(
        self, sinks: int, indices: torch.Tensor | None, local: int, group: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See RetrievalStore; only `indices` cross from the host."""
        if local > self.columns or sinks > self.n_sink:
            raise ValueError(
                f"host store holds {self.n_sink} sinks and a window of {self.columns} tokens on the device"
            )
        h_kv = self.sinks[0].shape[1]
        always = [
            (sink[:, :, :sinks], newest.data[:, :, self.columns - local : self.columns])
            for sink, newest in zip(self.sinks, self.local, strict=True)
        ]
        if indices is None:
            k, v = (torch.cat(pair, dim=2) for pair in always)
            return k, v
        if indices.shape[1] not in (1, h_kv):  # one choice per query head: the shared parts follow
            always = [(a.repeat_interleave(group, dim=1), b.repeat_interleave(group, dim=1)) for a, b in always]
        fetched = self._prefetched(indices) or self.fetch(indices, group)
        k, v = (torch.cat([a, x, b], dim=2) for (a, b), x in zip(always, fetched, strict=True))
        return k, v

    def attend_in_place(
        self, q: torch.Tensor, sinks: int, indices: torch.Tensor, local: int, scaling: float, log_weight: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See RetrievalStore; `indices` are fetched, and a kernel reads sinks, these and the window, each where it is.

        fp32 on the CPU, one choice per KV head or for all, no padding.
        """
        h_kv, d = self.sinks[0].shape[1], self.sinks[0].shape[3]
        same = q.dtype == self.sinks[0].dtype == self.sinks[1].dtype and d == self.sinks[1].shape[3]
        served = same and indices.shape[1] in (1, h_kv) and log_weight is None
        if not served or not kernels.native(q, indices, *self.sinks, scaling=scaling):
            return None
        window = [buffer.data[:, :, self.columns - local : self.columns] for buffer in self.local]
        if local > self.columns or not kernels.attend.side_by_side(*self.sinks, *window) or bool((indices < 0).any()):
            return None
        fetched = self._prefetched(indices) or self.fetch(indices)
        parts = list(zip(self.sinks, fetched, window, strict=True))
        counts = (sinks, indices.shape[2], local)
        return kernels.attend.attend_parts(q, parts, counts, scaling)

    def fetch(self, indices: torch.Tensor, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V of positions `indices` (n, H, k) from the host: (n, h_kv or h, k, d) on the device, undefined for -1."""
        index = indices.to(HOST) - self.n_sink
        heads = self.sinks[0].shape[1] if indices.shape[1] == 1 else 1
        real = int((index >= 0).sum()) * heads
        columns = (index >= 0).flatten(0, 1).any(0).nonzero()
        used = int(columns.max()) + 1 if len(columns) else 0  # padding at the end is not sent
        self.fence()
        out = []
        for sink, host in zip(self.sinks, self.host, strict=True):
            # pinned, so that the copy does not hold up the caller
            rows = take_tokens(host.data, index[..., :used], group, pinned=sink.is_cuda)
            self.moved("fetch", real * rows.shape[-1] * rows.element_size())
            rows = rows.to(sink.device, non_blocking=sink.is_cuda)
            out.append(F.pad(rows, (0, 0, 0, index.shape[2] - used)) if used < index.shape[2] else rows)
        return out[0], out[1]

    def keys(self, lo: int, hi: int) -> torch.Tensor:
        """See RetrievalStore; streamed to the device."""
        self.fence()
        rows = self.host[0].rows[:, max(0, lo - self.n_sink) : max(0, hi - self.n_sink)]
        self.moved("selection_keys", rows.numel() * rows.element_size())
        sinks = self.sinks[0]
        return torch.cat([sinks[:, :, lo : min(hi, self.n_sink)], rows.to(sinks.device).transpose(1, 2)], dim=2)

    def keys_at(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """See RetrievalStore; all but sinks cross from the host."""
        index = indices.to(HOST)
        heads = self.sinks[0].shape[1] if indices.shape[1] == 1 else 1
        self.fence()
        rows = take_tokens(self.host[0].data, index - self.n_sink, group)
        crossing = int((index >= self.n_sink).sum()) * heads
        self.moved("selection_keys", crossing * rows.shape[-1] * rows.element_size())
        rows = rows.to(self.sinks[0].device)
        if self.n_sink == 0:
            return rows
        first = take_tokens(self.sinks[0], indices.clamp_max(self.n_sink - 1), group)
        return torch.where((indices < self.n_sink)[..., None], first, rows)

    def prefetch(self, indices: torch.Tensor, group: int = 1) -> None:
        """Fetch early, on a lane; a `read` of the same tensor of indices takes the result."""
        self.ahead = indices, self.lanes.fetch(lambda: self.fetch(indices, group), indices)

    def _prefetched(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return None
        fetched = ahead[1].wait()  # even if it is for other indices: it reads buffers that are about to change
        return fetched if ahead[0] is indices else None

    def host_keys(self, count: int) -> tuple[torch.Tensor, Work[None]] | None:
        return self.host[0].data[:, :, :count], self.written

    def map_rows(self, index: torch.Tensor) -> None:
        self.wait()
        self.ahead = None  # its rows were in another order
        super().map_rows(index)
