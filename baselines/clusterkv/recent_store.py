"""A host store that keeps the tokens of the last steps' fetches on the device."""

from collections.abc import Callable

import torch

from pqcache.store.cached import CachedStore


class RecentStore(CachedStore):
    """HostStore that keeps the tokens fetched in the last `steps` steps on the device: only other tokens cross.

    They are held per head of the selection. Where every query head chooses, a group may hold the same token several times.
    """

    per_row = (*CachedStore.per_row, "positions", "fetched")
    on_host = ("host", "positions")

    def __init__(self, n_sink: int, n_local: int, moved: Callable[[str, int], None], steps: int) -> None:
        super().__init__(n_sink, n_local, moved)
        self.steps = steps
        self.positions: list[torch.Tensor] = []  # per step (n, H, k) int32 on the host, -1 = padding
        self.fetched: list[list[torch.Tensor]] = []  # per step K and V (n, H, k, d)

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n, heads, _ = index.shape
        if not self.positions or self.positions[-1].shape[1] != heads:
            self.positions, self.fetched = [], []
            return torch.full_like(index, -1), torch.zeros(n)
        held = torch.cat(self.positions, 2).long()
        table = torch.full((n, heads, self.length + 1), -1, dtype=torch.long)
        table.scatter_(2, held + 1, torch.arange(held.shape[2]).expand_as(held))
        table[..., 0] = -1  # padding is never cached
        return table.gather(2, index + 1), (table >= 0).sum(-1, dtype=torch.float32).mean(1)

    def cached(self) -> list[torch.Tensor]:
        if len(self.fetched) < 2:
            return self.fetched[0] if self.fetched else []
        return [torch.cat(parts, 2) for parts in zip(*self.fetched, strict=True)]

    def admit_fetched(self, index: torch.Tensor, fetched: list[torch.Tensor]) -> None:
        self.positions = [*self.positions, index.to(torch.int32)][-self.steps :]
        self.fetched = [*self.fetched, fetched][-self.steps :]
