"""RowState: tensors with one entry per row of the batch, reordered and counted by their names."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from pqcache.store.buffer import Buffer


class RowState:
    """Base of indexes and scorers, whose state has rows. A subclass names its state in `per_row`, or overrides both methods."""

    # attributes with one entry per row: a tensor or Buffer (n, ...), or a list of n; None or empty before there is one
    per_row: ClassVar[tuple[str, ...]] = ()

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was (beam search, repeat, select)."""
        map_state(self, self.per_row, index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tier ("device" or "host") -> tensors kept between steps; their storages are counted as the cache's bytes."""
        state = [getattr(self, name, None) for name in self.per_row]
        tensors = [x.data if isinstance(x, Buffer) else x for x in state]
        return {"device": [x for x in tensors if isinstance(x, torch.Tensor)]}


def map_state(owner: Any, names: Iterable[str], index: torch.Tensor) -> None:
    """Reorder these attributes of `owner`, each as `RowState.per_row` says."""
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, _mapped(getattr(owner, name), index))


def _mapped(state: Any, index: torch.Tensor) -> Any:
    """State with one entry per row, reordered."""
    if isinstance(state, torch.Tensor):
        return state.index_select(0, index.to(state.device))
    if isinstance(state, Buffer):
        state.map_rows(index)
    elif state:
        return [state[i] for i in index.tolist()]
    return state
