"""What feeds tokens through a model (pqcache.api.drive), and a long run of several turns."""

import torch
from transformers import PreTrainedModel

from pqcache.api.drive import VOCABULARY, Session, logits, pad_left, tokens
from pqcache.selective import Method, SelectiveCache, attach

__all__ = ["VOCABULARY", "Session", "logits", "long_run", "pad_left", "tokens"]


@torch.no_grad()
def long_run(model: PreTrainedModel, method: Method) -> SelectiveCache:
    """Rows of different length, 30 steps, a second turn, rows exchanged, 5 steps: rows end with 88, 60 and 145 tokens."""
    cache = SelectiveCache(model, method)
    with attach(model):
        session = Session(model, cache, [tokens(n, n) for n in (90, 33, 5)])
        for token in tokens(30, 2):
            session.step([token] * 3)
        session.turn([tokens(20, 7)] * 3)
        session.reorder([1, 2, 0])
        for token in tokens(5, 3):
            session.step([token] * 3)
    return cache
