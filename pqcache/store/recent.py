"""A host store that keeps on the device what the last steps fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pqcache.store.buffer import take_tokens
from pqcache.store.host import HOST, HostStore


class RecentStore(HostStore):
    """HostStore whose tokens fetched in the last `steps` steps are still on the device: only the others cross again.

    Per head of the selection, so with a choice per query head a token of a group may be held several times. `facts` gets
    cache_lookups, cache_hits (tokens per head) and cache_hit_rate over all layers that share it.
    """

    def __init__(self, n_sink: int, window: int, moved: Callable[[str, int], None], steps: int) -> None:
        super().__init__(n_sink, window, moved)
        self.steps = steps
        self.fetched: list[tuple[torch.Tensor, ...]] = []  # per step: positions (n, H, k) int32; K and V (n, H, k, d)
        self.facts: dict[str, Any] = {}

    def fetch(self, indices: torch.Tensor, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        h_kv = self.sinks[0].shape[1]
        if indices.shape[1] == 1:
            indices = indices.expand(-1, h_kv, -1)
        n, heads, _ = indices.shape
        known = [step for step in self.fetched if step[0].shape[1] == heads]
        slot = torch.full_like(indices, -1)
        if known:
            positions = torch.cat([step[0] for step in known], 2).long()
            table = torch.full((n, heads, self.length + 1), -1, dtype=torch.long, device=indices.device)
            table.scatter_(
                2, positions + 1, torch.arange(positions.shape[2], device=indices.device).expand_as(positions)
            )
            slot = table.gather(2, indices + 1)  # -1, padding, falls on column 0
        miss = (indices >= 0) & (slot < 0)
        row, head, column = (x.to(HOST) for x in miss.nonzero(as_tuple=True))
        base = (row * h_kv + head // (heads // h_kv)) * self.host[0].capacity
        flat = base + indices.to(HOST)[row, head, column] - self.n_sink
        out = []
        for i, (sink, host) in enumerate(zip(self.sinks, self.host, strict=True)):
            rows = host.data.flatten(0, 2).index_select(0, flat)
            self.moved("fetch", rows.numel() * rows.element_size())
            if known:
                whole = take_tokens(torch.cat([step[1 + i] for step in known], 2), slot)
            else:
                whole = sink.new_zeros((*indices.shape, sink.shape[3]))
            whole[miss] = rows.to(sink.device)
            out.append(whole)
        self.fetched = [*known, (indices.to(torch.int32), *out)][-self.steps :]
        self._note(int((indices >= 0).sum()), len(flat))
        return out[0], out[1]

    def _note(self, lookups: int, misses: int) -> None:
        facts = self.facts
        facts["cache_lookups"] = facts.get("cache_lookups", 0) + lookups
        facts["cache_hits"] = facts.get("cache_hits", 0) + lookups - misses
        facts["cache_hit_rate"] = facts["cache_hits"] / max(1, facts["cache_lookups"])

    def map_rows(self, index: torch.Tensor) -> None:
        super().map_rows(index)
        self.fetched = [tuple(x.index_select(0, index.to(x.device)) for x in step) for step in self.fetched]

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        tiers = super().tensors()
        return {**tiers, "device": [*tiers["device"], *(x for step in self.fetched for x in step)]}
