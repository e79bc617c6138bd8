"""One layer without a model, for the tests of its decode steps."""

from types import SimpleNamespace
from typing import Any

import torch

from pqcache.pq import PQCache
from pqcache.selective import Budget
from pqcache.selective.dense import DenseLayer
from pqcache.selective.layer import LayerContext, Step, Watcher
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from pqcache.store.lanes import Lanes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = ModelShape(n_layers=1, h=4, h_kv=2, d=16)
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Driven(Watcher):
    """A layer, a random prompt and some steps: what each step gave and chose."""

    def __init__(self, layer, lengths, dtype=torch.float32, seed=0):
        self.gen = torch.Generator().manual_seed(seed)
        self.layer, self.lengths, self.dtype, self.ledger = layer, list(lengths), dtype, Ledger()
        self.chosen: list[torch.Tensor] = []
        k, v = self.draw(SHAPE.h_kv, max(lengths)), self.draw(SHAPE.h_kv, max(lengths))
        if isinstance(layer, DenseLayer):
            layer.store.load(k, v, self.lengths)
        else:
            layer.settle(k, v, self.lengths, self.context(False))
        layer.columns = max(lengths)

    def draw(self, heads, t):
        return torch.randn(len(self.lengths), heads, t, SHAPE.d, generator=self.gen).to(self.dtype).to(DEVICE)

    def context(self, decode):
        self.ledger.decoding = decode
        past = [length - (not decode) for length in self.lengths]
        step = Step(decode, 1, past, [1] * len(past), self.lengths, ends_prompt=not decode, first=False)
        nothing: Any = None
        cache: Any = SimpleNamespace(
            ledger=self.ledger,
            lanes=Lanes(),
            observers=[],
            watchers=[self] if decode else [],
            recording=False,
            expected=0,
        )
        ctx = LayerContext(0, nothing, cache, nothing, nothing, nothing, None, [], nothing, step)
        ctx.scaling = SHAPE.d**-0.5
        return ctx

    def step(self):
        q, k, v = self.draw(SHAPE.h, 1), self.draw(SHAPE.h_kv, 1), self.draw(SHAPE.h_kv, 1)
        out = self.layer.attend(q, k, v, None, self.context(True))
        self.lengths = [length + 1 for length in self.lengths]
        self.ledger.end_step()
        return out.float().cpu()

    def watch(self, call):
        if call.layer.selected is not None:
            self.chosen.append(call.layer.selected.indices)

    def reorder(self, rows):
        self.layer.reorder_cache(torch.tensor(rows))
        self.lengths = list(self.layer.store.lengths)


def made(store="resident", ratio=0.2, **hyper):
    """A PQCache layer of small sizes."""
    hyper = {"m": 2, "b": 4, "n_sink": 4, **hyper}
    return PQCache(budget=Budget(ratio=ratio), store=store, **hyper).make_layer(0, SHAPE)
