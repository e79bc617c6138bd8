"""What a store is: where one layer's K and V live. The reference is store/resident.py.

An index into a store is a token's position in its own row, padding left out. Letters: n rows, h_kv KV heads, d head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pqcache.store.lanes import Lanes
from pqcache.store.row_state import RowState
from pqcache.store.transfer import table


def joined(*parts: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """Tier -> the tensors that all parts have there."""
    tiers: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for tier, tensors in part.items():
            tiers.setdefault(tier, []).extend(tensors)
    return tiers


class Store(RowState):
    """K and V of one layer. Every store has these; a method's layer may ask its own store for more. See RowState for its rows."""

    whole = False  # True: all K and V are on the model's device, `view` copies nothing, the store is a ResidentStore

    lengths: list[int]  # tokens held, per row

    @property
    def length(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)

    def load(self, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], known: Any = None) -> None:
        """Take over a whole prompt: k, v (n, h_kv, >= max(lengths), d), row r's tokens at 0 .. lengths[r]-1.

        known: the store of the earlier turns, whose tokens may be taken over instead of copied again.
        """
        raise NotImplementedError

    def expect(self, tokens: int) -> None:
        """Announce how many tokens a row will hold at most, so that no buffer is copied on the way there. 0 = unknown."""

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add one token to every row: k, v (n, h_kv, 1, d)."""
        raise NotImplementedError

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all tokens on the model's device: (n, h_kv, length, d). Shorter rows end in padding: mask it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Served:
    """Hits of one fetch in a cache. Lists have one entry per row; tokens count once per head of the selection."""

    lookups: list[int]  # tokens requested
    hits: list[int]  # of them, served by the cache
    held: list[float]  # tokens of one head that the cache held (mean over the heads)


class RetrievalStore(Store):
    """A store that hands out chosen tokens. The methods that have a body here are optional."""

    served: Served | None = None  # the cache's hits in the last read; None: there is no cache

    def widen(self, n_local: int) -> None:
        """The newest `n_local` tokens are attended from now on: one more per step, at most."""

    def read(
        self, sinks: int, indices: torch.Tensor | None, local: int, group: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of [first `sinks` | `indices` (n, H, k) | last `local`] tokens, joined: (n, h_kv or h, m, d).

        The local part is right-aligned: its last entry is each row's newest token. Default, for stores with `tile` and `take`:
        one concatenation if all rows have one length, else one gather.
        """
        first, length = self.tile(0, sinks), self.lengths[0]
        heads = 1 if indices is None else indices.shape[1]
        if len(set(self.lengths)) == 1 and heads <= first[0].shape[1]:
            chosen = [] if indices is None else [self.take(indices)]
            k, v = (torch.cat(x, 2) for x in zip(first, *chosen, self.tile(length - local, length), strict=True))
            return k, v
        return self.gather(sinks, indices, local, group, first[0].device)

    def gather(
        self, sinks: int, indices: torch.Tensor | None, local: int, group: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `read`, by one `take` for all parts."""
        n, heads = len(self.lengths), 1 if indices is None else indices.shape[1]
        newest = table(self.lengths, device)[:, None, None] - local + torch.arange(local, device=device)
        pieces = [torch.arange(sinks, device=device).expand(n, heads, -1), newest.expand(n, heads, -1)]
        if indices is not None:
            pieces.insert(1, indices)
        return self.take(torch.cat(pieces, 2), group)

    def tile(self, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens lo .. hi-1 of every row: (n, h_kv, hi - lo, d)."""
        raise NotImplementedError

    def take(self, indices: torch.Tensor, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens `indices` (n, H, k), see `take_tokens`: (n, h_kv or h, k, d)."""
        raise NotImplementedError

    def keys(self, lo: int, hi: int) -> torch.Tensor:
        """K of positions lo .. hi-1 on the device, to be scored: (n, h_kv, hi - lo, d)."""
        return self.tile(lo, hi)[0]

    def keys_at(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """K of positions `indices` (n, H, m) on the device, to be scored: (n, h_kv or h, m, d), undefined for -1."""
        raise NotImplementedError

    def prefetch(self, indices: torch.Tensor, group: int = 1) -> None:
        """Start to fetch `indices`. A `read` of the same tensor follows."""

    def attend_in_place(
        self, q: torch.Tensor, sinks: int, indices: torch.Tensor, local: int, scaling: float, log_weight: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Attention of q (n, h, 1, d) over what `read` would return, without the copy, padding (-1) and a model's sinks.

        log_weight (n, h, k): added to the scaled logits of `indices`. Returns out (n, h, 1, d) and the logits' log-sum-exp
        (n, h, 1), fp32. None: not supported.
        """
        return None

    def host_keys(self, count: int) -> tuple[torch.Tensor, Any] | None:
        """K of the first `count` tokens after the sinks in host memory (n, h_kv, count, d). None: this store has no keys there.

        Also returns the copy (`lanes.Work`) that must end before they are read.
        """
        return None

    def use_lanes(self, lanes: Lanes) -> None:
        """Run copies on these lanes, beside the model."""

    def wait(self) -> None:
        """Wait until all copies have ended."""
