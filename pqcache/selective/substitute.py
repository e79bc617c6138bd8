"""What may do a layer's decode steps in its place, e.g. a chain of GPU kernels; the one door from layers to `pqcache.device`.

A layer that can be replaced says what its step depends on (`SelectiveLayer.step_parts`). The base class then asks
`substitute_for` for a substitute, lets it do the steps it serves, and takes the store back before anything else uses it.
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


class PQCodes(NamedTuple):
    """A product-quantized index. Both are the index's own: a substitute adds the codes of new tokens."""

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
    """Does a layer's decode steps. It has the store from its creation until `leave`."""

    def serves(self, q: torch.Tensor) -> bool:
        """Whether it can do a step for queries q (n, h, 1, d)."""

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the token k, v (n, h_kv, 1, d), choose for q (n, h, 1, d), attend: (n, 1, h, d), and what it chose.

        What it chose is for `positions`; None: it attended every token.
        """

    def note(self) -> float:
        """The host's share of one step that has run. Returns the tokens attended per query head, mean over rows."""

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """What `run` chose as positions (n, h_kv, k) int64, -1 = padding."""

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per row, so that nothing moves until there are more."""

    def join(self) -> None:
        """The caller's stream goes on when what runs beside it has ended."""

    def finish(self) -> None:
        """Wait until the host may read, copy or release what steps read and write."""

    def leave(self) -> None:
        """Give the store back."""

    def tensors(self) -> list[torch.Tensor]:
        """What it keeps on the device between steps, the store's tensors not included."""


def substitute_for(
    q: torch.Tensor, parts: Callable[[], StepParts | None], ledger: Ledger | None = None
) -> Substitute | None:
    """What does a layer's decode steps for queries like q (n, h, 1, d) on this machine; None: the layer itself.

    parts: what the step depends on, called only if queries of this kind are served; None: it cannot be substituted.
    """
    return seam.substitute_for(q, parts, ledger)
