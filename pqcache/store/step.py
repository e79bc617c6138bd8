"""What a layer's decode step depends on, for a substitute that does it on a device; and what a substitute is.

Only steps over a ResidentStore or a window can be substituted: all that they read and write is on the model's device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pqcache.store.buffer import Buffer
from pqcache.store.resident import ResidentStore


class PQCodes(NamedTuple):
    """A product-quantized index. Both tensors are shared with the index: a substitute adds the codes of new tokens."""

    centroids: torch.Tensor  # (n, h_kv, m, C, d / m)
    codes: Buffer  # (n, h_kv * m, capacity): entry i is the token at position n_sink + i


@dataclass(frozen=True)
class StepParts:
    """codes: tokens are ranked by the group-summed softmax of their scores; None: all are attended.

    k, local: selected tokens and local window, one per row.
    """

    store: ResidentStore
    codes: PQCodes | None = None
    k: Sequence[int] = ()
    local: Sequence[int] = ()
    n_sink: int = 0


class Window(Protocol):
    """Of a layer that keeps the newest `window` columns alone: column c is in slot c % window of k and v (n, h_kv, slots, d)."""

    k: torch.Tensor
    v: torch.Tensor
    window: int
    columns: int

    def reserve(self, columns: int) -> None:
        """Make room for the window of so many columns."""


class Substitute(Protocol):
    """Does a layer's decode steps on the device, from counters that it keeps there: a recorded step can be replayed."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Store the token k, v (n, h_kv, 1, d), attend q (n, h, 1, d) to it and to what came before: (n, 1, h, d)."""

    def note(self) -> float:
        """Update the host's counters after a step has run or was replayed. Returns the tokens attended, mean over rows."""

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens per row: until then no tensor moves."""

    def tensors(self) -> list[torch.Tensor]:
        """Its own tensors on the device between steps, without the layer's."""
