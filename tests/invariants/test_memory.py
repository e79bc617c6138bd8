"""What a cache held is free again with the last reference to it, whatever the garbage collector does."""

import gc
import weakref

import torch
from transformers import PreTrainedModel

from pqcache.api.drive import Session, tokens
from pqcache.selective import SelectiveCache, attach
from tests.invariants.cases import Case


def test_a_dropped_cache_is_freed_at_once(model: PreTrainedModel, case: Case) -> None:
    gc.disable()
    try:
        with attach(model), torch.no_grad():
            cache = SelectiveCache(model, case.make())
            session = Session(model, cache, [tokens(60, 1)])
            session.step([5])
        held = [weakref.ref(t) for layer in cache.layers for part in layer.tensors().values() for t in part]
        assert held
        del cache, session
        assert not [ref for ref in held if ref() is not None]
    finally:
        gc.enable()
