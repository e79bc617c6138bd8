"""What tests of the methods share: a method by its name, one layer of a large model's geometry, filled directly."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from baselines.infinigen import InfiniGen, SpeculativeIndex, partial_basis, skew
from pqcache.registry import method_class
from pqcache.selective import Budget, Method
from pqcache.selective.layer import LayerContext, Step
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from pqcache.store.lanes import Lanes

RETRIEVERS: dict[str, dict[str, Any]] = {  # options for prompts of a hundred tokens, sinks apart
    "clusterkv": {"tokens_per_cluster": 9, "window": 6, "window_clusters": 2},
    "oracle": {},
    "pqcache": {"b": 3},
    "quest": {"page": 4},
    "sparq": {"r": 3},
}


def made(name: str, budget: float | int = 1.0, **options: Any) -> Any:
    return method_class(name)(budget=Budget.parse(budget), **options)


def context(step: Step, shape: ModelShape, ledger: Ledger, module: nn.Module | None = None) -> LayerContext:
    """As much of a layer's context as a retrieval layer looks at."""
    # an observer, so that the layer notes its selection
    cache: Any = SimpleNamespace(ledger=ledger, lanes=Lanes(), observers=[1], watchers=[], expected=0, accelerator=None)
    nothing: Any = None
    ctx = LayerContext(0, module or nothing, cache, nothing, nothing, nothing, None, [], nothing, step)
    ctx.scaling = shape.d**-0.5
    return ctx


class OneLayer:
    """One layer under a method, without a model: a prompt of given K and V, then decode steps of given q, k, v."""

    def __init__(
        self,
        method: Method,
        k: torch.Tensor,
        v: torch.Tensor,
        h: int,
        lengths: Sequence[int] | None = None,
        q: torch.Tensor | None = None,
    ) -> None:
        """k, v (n, h_kv, s, d); row r holds its first lengths[r] tokens, all of them if not said.

        q (n, h, s, d), right-aligned: the prompt's queries, where the method looks at them.
        """
        n, h_kv, s, d = k.shape
        self.shape = ModelShape(n_layers=1, h=h, h_kv=h_kv, d=d)
        self.ledger = Ledger()
        self.lengths = [s] * n if lengths is None else list(lengths)
        self.module = nn.Module()  # stands for the attention module
        if isinstance(method, InfiniGen):  # a rotation of the whole space
            draw = torch.Generator().manual_seed(0)
            result = skew(torch.randn(1, h, 4 * d, d, generator=draw), torch.randn(1, h_kv, 4 * d, d, generator=draw))
            method.bases[self.module] = partial_basis(result, method.column_rule, method.partial_ratio)
        self.layer: Any = method.make_layer(0, self.shape)
        ctx = self.context(decode=False)
        if q is not None:
            ctx.hidden = q
            self.layer.observe(q, k, list(self.lengths), ctx)
        self.layer.settle(k, v, list(self.lengths), ctx)

    def context(self, decode: bool) -> LayerContext:
        self.ledger.decoding = decode
        past = [length - (not decode) for length in self.lengths]
        step = Step(decode, 1, past, [1] * len(past), self.lengths, ends_prompt=not decode, first=False)
        return context(step, self.shape, self.ledger, self.module)

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (n, h, 1, d), k and v (n, h_kv, 1, d) -> (n, 1, h, d). An index that speculates is told the true query."""
        if isinstance(getattr(self.layer, "index", None), SpeculativeIndex):
            self.ledger.decoding = True
            self.layer.index.speculate(q, self.shape.d**-0.5)
        out = self.layer.decode(q, k, v, self.context(decode=True))
        self.ledger.end_step()
        self.lengths = [length + 1 for length in self.lengths]
        return out

    @property
    def selected(self) -> torch.Tensor:
        """(n, H, k) positions of the last step."""
        return self.layer.selected.indices


def random_layer(method: Method, s: int = 8192) -> OneLayer:
    """fp16 keys and values of Mistral-7B's geometry, one decode step done."""
    draw, h, h_kv, d = torch.Generator().manual_seed(0), 32, 8, 128
    sizes = ((h_kv, s), (h_kv, s), (h, 1), (h_kv, 1), (h_kv, 1))
    k, v, *new = (torch.randn(1, heads, t, d, generator=draw).half() for heads, t in sizes)
    one = OneLayer(method, k, v, h)
    one.step(*new)
    return one
