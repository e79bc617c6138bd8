"""The way in: whether the Triton kernels do a layer's decode steps on this machine, and the object that runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pqcache.device.packed_step import PackedStep, attend_packed
from pqcache.device.step import DeviceStep, serves
from pqcache.store.packed import PackedStore

__all__ = ["attend_packed", "substitute_for"]

if TYPE_CHECKING:
    from pqcache.selective.ledger import Ledger
    from pqcache.selective.substitute import StepParts


def substitute_for(
    q: torch.Tensor, parts: Callable[[], StepParts | None], ledger: Ledger | None = None
) -> DeviceStep | PackedStep | None:
    """What replaces a layer's decode step for queries like q (n, h, 1, d). None: the layer does it itself.

    parts: returns what the step depends on; called only if the kernels serve such queries. The store is lent from here on.
    """
    if not serves(q):
        return None
    step = parts()
    if step is None or not step.store.can_lend(q.device):
        return None
    if isinstance(step.store, PackedStore):
        return PackedStep.over(step.store, q.device)
    if step.codes is None and not step.store.whole:  # no kernel attends to everything while it is on the host
        return None
    return DeviceStep(step, q.device, ledger)
