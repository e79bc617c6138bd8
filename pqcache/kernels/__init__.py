"""CPU kernels, compiled by numba on first use; the plain-torch code that calls them is their reference and fallback.

A caller asks `native` with its tensors and takes its plain-torch path if the answer is False. If it is True, the kernels are
there as kernels.attend, kernels.rank and so on: an import statement in a decode step takes 20 us where caches are cold. Results
agree up to the order of additions. Ties go to the lower index everywhere.
"""

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # attributes of this package once `usable` has answered True
    from pqcache.kernels import attend, codes, nearest, packed, positions, rank, softmax  # noqa: F401

_MODULES = ("attend", "codes", "nearest", "packed", "positions", "rank", "softmax")
switch = {"on": True}


@cache
def usable() -> bool:
    """Whether the kernels can be compiled here; one note if they cannot.

    numba may be missing; it refuses where it has no folder to keep compiled code in (a read-only installation, no home
    folder), and it cannot be imported beside a numpy that it does not know.
    """
    if importlib.util.find_spec("numba") is None:
        return _not_used("numba is not installed; pip install numba")
    try:
        for name in _MODULES:
            importlib.import_module(f"{__name__}.{name}")
    except Exception as error:  # whatever a broken installation raises
        reason = " ".join(str(error).split())[:200]
        return _not_used(
            f"{type(error).__name__}: {reason}; a folder that can be written to is named by NUMBA_CACHE_DIR"
        )
    return True


def _not_used(why: str) -> bool:
    warnings.warn(f"the CPU kernels cannot be used, plain torch runs, slower: {why}", RuntimeWarning, stacklevel=3)
    return False


def native(*tensors: torch.Tensor, scaling: float = 1.0) -> bool:
    """Whether the CPU kernels serve these tensors, and logits under this `scaling`: none computes a cap.

    Asked several times a step, hence one call without others.
    """
    if not switch["on"] or getattr(scaling, "cap", None) is not None:
        return False
    recorded = torch.is_grad_enabled()
    for t in tensors:
        if not t.is_cpu or (recorded and t.requires_grad):
            return False
    return usable()


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Switch the CPU kernels off inside the block: for comparisons, and to rule them out."""
    before, switch["on"] = switch["on"], False
    try:
        yield
    finally:
        switch["on"] = before
