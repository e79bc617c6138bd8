"""The way in: whether kernels do a layer's decode steps on this machine, and what then does them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pqcache.device.step import DeviceStep, serves

if TYPE_CHECKING:
    from pqcache.selective.ledger import Ledger
    from pqcache.selective.substitute import StepParts


def substitute_for(
    q: torch.Tensor, parts: Callable[[], StepParts | None], ledger: Ledger | None = None
) -> DeviceStep | None:
    """What does a layer's decode steps in its place, for queries like q (n, h, 1, d); None: the layer does them itself.

    parts: what the step depends on, called only if kernels serve such queries. The store is lent from here on.
    """
    if not serves(q):
        return None
    step = parts()
    if step is None or not step.store.can_lend(q.device):
        return None
    if step.codes is None and not step.store.whole:  # attending everything that is on the host is no kernel's task
        return None
    return DeviceStep(step, q.device, ledger)
