"""Substitute: does a layer's decode steps in its place, by a chain of GPU kernels. The only way from layers to `pqcache.device`.

A layer that can be replaced says what its step depends on (`SelectiveLayer.step_parts`). The base class gets a substitute
from `substitute_for`, lets it do the steps it serves, and takes the store back before anything else uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from pqcache.device import seam
from pqcache.store.base import RetrievalStore
from pqcache.store.buffer import Buffer

if TYPE_CHECKING:
    from pqcache.selective.budget import Plan
    from pqcache.selective.ledger import Ledger
    from pqcache.store.packed import PackedStore


class PQCodes(NamedTuple):
    """A product-quantized index. Both tensors are shared with the index: a substitute adds the codes of new tokens."""

    centroids: torch.Tensor  # (n, h_kv, m, C, d / m)
    codes: Buffer  # (n, h_kv * m, capacity): entry i is the token at position n_sink + i


@dataclass(frozen=True)
class StepParts:
    """What a decode step depends on."""

    store: RetrievalStore
    codes: PQCodes | None = None  # tokens are ranked by group-summed softmax of their scores; None: all are attended
    plans: Sequence[Plan] = ()  # one per row
    n_sink: int = 0


class Substitute(Protocol):
    """Does a layer's decode steps. It holds the store from its creation until `leave`."""

    def serves(self, q: torch.Tensor) -> bool:
        """Whether it can do a step for queries q (n, h, 1, d)."""

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the token k, v (n, h_kv, 1, d), select for q (n, h, 1, d), attend.

        Returns the output (n, 1, h, d) and the selection, to be read by `positions`; None if it attended every token.
        """

    def note(self) -> float:
        """Update the host's counters after one step. Returns the tokens attended per query head, mean over rows."""

    @property
    def version(self) -> int:
        """Changes when a recording of the step no longer does what `run` would do."""

    def needs_host(self, ahead: int = 1) -> bool:
        """Whether the step number `ahead` of those to come needs the host in its middle: it then cannot be a replay."""

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """A selection by `run` as positions (n, h_kv, k) int64, -1 = padding."""

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per row: up to there no tensor moves."""

    def join(self) -> None:
        """Make the caller's stream wait for the work that runs beside it."""

    def finish(self) -> None:
        """Wait until the host may read, copy or release what steps read and write."""

    def leave(self) -> None:
        """Give the store back."""

    def tensors(self) -> list[torch.Tensor]:
        """Its own tensors on the device between steps, without the store's."""


def substitute_for(
    q: torch.Tensor, parts: Callable[[], StepParts | None], ledger: Ledger | None = None
) -> Substitute | None:
    """The substitute for a layer's decode steps with queries like q (n, h, 1, d) on this machine. None: there is none.

    parts: returns what the step depends on, or None if it cannot be substituted. Called only if such queries are served.
    """
    return seam.substitute_for(q, parts, ledger)


def attend_packed(q: torch.Tensor, store: PackedStore, scaling: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of q (n, h, 1, d) over a packed store, by kernels: out (n, 1, h, d), lse (n, h, 1); None: none serves."""
    return seam.attend_packed(q, store, scaling)
