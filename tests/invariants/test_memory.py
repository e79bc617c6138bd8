"""What a cache held is free again with the last reference to it, whatever the garbage collector does."""

import gc
import weakref

import pytest
import torch

from pqcache.selective import SelectiveCache, attach
from tests.invariants.cases import CASES, Case
from tests.invariants.drive import Session, tokens


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_dropped_cache_is_freed_at_once(llama, case: Case):
    gc.collect()
    gc.disable()
    try:
        with attach(llama), torch.no_grad():
            cache = SelectiveCache(llama, case.make())
            session = Session(llama, cache, [tokens(60, 1)])
            session.step([5])
        held = [weakref.ref(t) for layer in cache.layers for part in layer.tensors().values() for t in part]
        assert held
        del cache, session
        assert not [ref for ref in held if ref() is not None]
    finally:
        gc.enable()
