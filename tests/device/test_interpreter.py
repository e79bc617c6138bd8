"""The interpreter of an older Triton beside a newer numpy."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
import triton
from triton.runtime import interpreter as theirs

from pqcache.device import interpreter


@pytest.mark.parametrize("scoped", [True, False])
def test_a_scalar_of_one_entry_is_a_bound(monkeypatch, scoped):
    class Tensor:
        handle = SimpleNamespace(data=np.array([3]))

    def patch(tensor, *scope):
        tensor.__index__ = lambda self: (
            int(self.handle.data) if self.handle.data.ndim == 0 else None
        )  # numpy 2.4 raises

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(theirs, "_patch_lang_tensor", patch)
    monkeypatch.delattr(theirs, "_pqcache_mended", raising=False)
    interpreter.mend()
    assert theirs._patch_lang_tensor is not patch
    scope = [SimpleNamespace(set_attr=setattr)] if scoped else []
    theirs._patch_lang_tensor(Tensor, *scope)
    assert [*range(Tensor())] == [0, 1, 2]
    monkeypatch.delattr(theirs, "_pqcache_mended")


def test_a_newer_one_is_left_alone(monkeypatch):
    before = theirs._patch_lang_tensor
    monkeypatch.setattr(triton, "__version__", "3.10.1")
    interpreter.mend()
    assert theirs._patch_lang_tensor is before
