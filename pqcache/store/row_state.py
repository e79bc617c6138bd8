"""RowState: what has an entry per row of the batch, reordered and counted by its names."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

from pqcache.store.buffer import Buffer

TIERS = ("device", "host")


class RowState:
    """Base of layers, stores, codecs, indexes and scorers. A subclass names its state, or overrides the methods."""

    # attributes with one entry per row: a tensor or Buffer (n, ...), what has `map_rows` itself, a list, tuple or dict of these,
    # or a list of n of anything else; None or empty before there is one
    per_row: ClassVar[tuple[str, ...]] = ()
    counted: ClassVar[tuple[str, ...]] = ()  # tensors without rows: constants of the model, what only this step uses
    on_host: tuple[str, ...] = ()  # those of both that are on the host

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was (beam search, repeat, select)."""
        map_state(self, self.per_row, index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tier ("device" or "host") -> tensors kept between steps; their storages are counted as the cache's bytes."""
        tiers: dict[str, list[torch.Tensor]] = {"device": []}
        for name in (*self.per_row, *self.counted):
            for tier, tensor in _kept(getattr(self, name, None), TIERS[name in self.on_host]):
                tiers.setdefault(tier, []).append(tensor)
        return tiers


def map_state(owner: Any, names: Iterable[str], index: torch.Tensor) -> None:
    """Reorder these attributes of `owner`, each as `RowState.per_row` says; one object under two names is reordered once."""
    seen: set[int] = set()
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, _mapped(getattr(owner, name), index, seen))


def _mapped(state: Any, index: torch.Tensor, seen: set[int]) -> Any:
    """State with one entry per row, reordered."""
    if isinstance(state, torch.Tensor):
        return state.index_select(0, index.to(state.device))
    if hasattr(state, "map_rows"):
        if id(state) not in seen:
            seen.add(id(state))
            state.map_rows(index)
        return state
    if isinstance(state, dict):
        return {key: _mapped(part, index, seen) for key, part in state.items()}
    if isinstance(state, list | tuple) and _has_state(state):
        return type(state)(_mapped(part, index, seen) for part in state)
    return [copy.deepcopy(state[i]) for i in index.tolist()] if state else state


def _has_state(parts: Iterable[Any]) -> bool:
    """Whether a list holds tensors and the like, which have rows themselves."""
    return any(
        _has_state(x) if isinstance(x, list | tuple) else isinstance(x, torch.Tensor) or hasattr(x, "map_rows")
        for x in parts
    )


def _kept(state: Any, tier: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of some state, each with its tier."""
    if isinstance(state, torch.Tensor):
        yield tier, state
    elif isinstance(state, Buffer):
        yield tier, state.data
    elif isinstance(state, list | tuple):
        for part in state:
            yield from _kept(part, tier)
    elif isinstance(state, dict):
        for key, part in state.items():
            yield from _kept(part, key if key in TIERS else tier)
    elif hasattr(state, "tensors"):
        yield from _kept(state.tensors(), tier)
