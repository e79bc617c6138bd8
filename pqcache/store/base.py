"""What a store is: where one layer's K and V live. The reference is store/resident.py.

An index into a store is a token's position in its own row, padding left out. Letters: n rows, h_kv KV heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pqcache.store.lanes import Lanes

if TYPE_CHECKING:
    from pqcache.store.buffer import Buffer


def joined(*parts: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """Tier -> the tensors that all parts have there."""
    tiers: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for tier, tensors in part.items():
            tiers.setdefault(tier, []).extend(tensors)
    return tiers


class Store:
    """K and V of one layer. Every store has these; a method's layer may ask its own store for more."""

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

    def map_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row index[i] was."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tier (device or host) -> the tensors that are stored there."""
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

    def read(
        self, sinks: int, indices: torch.Tensor | None, local: int, group: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of [first `sinks` | `indices` (n, H, k) | last `local`] tokens, joined: (n, h_kv or h, m, d).

        The local part is right-aligned: its last entry is each row's newest token.
        """
        raise NotImplementedError

    def keys(self, lo: int, hi: int) -> torch.Tensor:
        """K of positions lo .. hi-1 on the device, to be scored: (n, h_kv, hi - lo, d)."""
        raise NotImplementedError

    def keys_at(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        """K of positions `indices` (n, H, m) on the device, to be scored: (n, h_kv or h, m, d), undefined for -1."""
        raise NotImplementedError

    def prefetch(self, indices: torch.Tensor, group: int = 1) -> None:
        """Start to fetch `indices`. A `read` of the same tensor follows."""

    def attend_in_place(
        self, q: torch.Tensor, sinks: int, indices: torch.Tensor, local: int, scaling: float
    ) -> torch.Tensor | None:
        """Attention of q (n, h, 1, d) over what `read` would return, without the copy and without padding (-1): (n, 1, h, d).

        None: not supported.
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

    # -- on loan, while a substitute does the layer's decode steps -----------------------------------------------------

    def can_lend(self, device: torch.device) -> bool:
        """Whether kernels on `device` may work on this store's tensors themselves."""
        return False

    def lend(self) -> Lent:
        """Hand the tensors out, until `take_back`. Meanwhile only `view`, `lengths` and the two methods below may be used."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        """Tokens per row for which there is room."""
        raise NotImplementedError

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per row."""
        raise NotImplementedError

    def note_token(self, fetched: int) -> None:
        """Count a step of the borrower: it stored one token per row, and read `fetched` tokens of all heads from the host."""
        raise NotImplementedError

    def take_back(self, lent: Lent) -> None:
        """Take the tensors over again as the borrower's steps left them."""
        raise NotImplementedError


@dataclass
class Lent:
    """A store's tensors on loan. A buffer stays the same object; its `data` is replaced when it grows."""

    near: tuple[Buffer, Buffer]  # K, V on the device; position p is at entry p % capacity
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None  # K, V (n, h_kv, n_sink, d); None: `near` holds all tokens
    far: tuple[Buffer, Buffer] | None = None  # K, V on the host; position p is at entry p - n_sink
    blocks: LentBlocks | None = None  # a cache of blocks of `far` on the device


@dataclass
class LentBlocks:
    """A block cache on loan; see store/block_cache.py for the tables and their rules."""

    cache: tuple[Buffer, Buffer]  # K, V of the cached blocks, token-major: slot i begins at entry i * block
    slot: torch.Tensor  # (n, blocks) the slot of each block, -1 = not there
    content: torch.Tensor  # (n, slots) the block in each slot, -1 = free
    uses: torch.Tensor  # (n, slots) steps that touched it, 0 = free
    stamp: torch.Tensor  # (n, slots) when it was touched last, 0 = free
    clock: int
    block: int  # tokens per block
    topk: int  # blocks that the policy sees per step
    policy: str  # lru or lfu
    n_sink: int
    lanes: Lanes  # what refills run on
