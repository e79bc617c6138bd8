"""What an index may say of its choice: log-weights per token, an estimate of the tokens left out; and its state per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pqcache.selective import Budget, LayerContext, ModelShape
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.retrieval import RetrievalMethod
from tests.baselines.common import OneLayer

N_SINK, SHAPE = 4, ModelShape(n_layers=1, h=4, h_kv=2, d=8)
STORES, HEADS = ("resident", "host", "block_cache"), ("one", "kv", "query")
OPTIONS = [{"store": store, "heads": heads} for store in STORES for heads in HEADS]
OPTIONS += [{"mean_heads": SHAPE.h_kv}, {"mean_heads": SHAPE.h}]


class Drawn(Index):
    """Draws positions at random, at most k per row and head, with log-weights and an estimate of the rest."""

    def __init__(self, method: Sampler) -> None:
        self.method, self.draw = method, torch.Generator().manual_seed(0)
        self.chosen: Selection | None = None

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        n, h, _, d = q.shape
        heads, k = {"one": 1, "kv": h_kv, "query": h}[self.method.heads], max(cand.k)
        indices = torch.full((n, heads, k), -1)
        for row, (end, count) in enumerate(zip(cand.ends, cand.k, strict=True)):
            for head in range(heads):
                some = torch.randperm(end - cand.sinks, generator=self.draw)[:count] + cand.sinks
                indices[row, head, : count - self.method.gaps] = some[: count - self.method.gaps].sort().values
        rand = lambda *sizes: torch.rand(*sizes, generator=self.draw)  # noqa: E731
        self.chosen = Selection(
            indices,
            padded=True,
            log_weight=3 * rand(n, heads, k),
            share=rand(n, h) if self.method.mean_heads else None,
            mean=rand(n, self.method.mean_heads, d) if self.method.mean_heads else None,
        )
        return self.chosen


@dataclass(kw_only=True)
class Sampler(RetrievalMethod):
    name: ClassVar[str] = "sampler"

    n_sink: int = N_SINK
    heads: str = "kv"
    gaps: int = 0
    mean_heads: int = 0

    def make_index(self, layer_idx: int, shape: ModelShape) -> Drawn:
        return Drawn(self)


def one_step(method: RetrievalMethod, lengths: list[int]) -> tuple[OneLayer, tuple, torch.Tensor]:
    """A layer with rows of these lengths, its q, all K and V after one step, and the step's output."""
    draw = torch.Generator().manual_seed(0)
    n, s = len(lengths), max(lengths)
    k, v = (torch.randn(n, SHAPE.h_kv, s, SHAPE.d, generator=draw) for _ in "kv")
    q = torch.randn(n, SHAPE.h, 1, SHAPE.d, generator=draw)
    new = [torch.randn(n, SHAPE.h_kv, 1, SHAPE.d, generator=draw) for _ in "kv"]
    layer = OneLayer(method, k, v, SHAPE.h, lengths)
    out = layer.step(q, *new)
    rows = [[torch.cat([x[r, :, :length], y[r]], 1) for r, length in enumerate(lengths)] for x, y in zip((k, v), new)]
    return layer, (q, *rows), out


def reference(layer: OneLayer, q: torch.Tensor, keys: list, values: list) -> torch.Tensor:
    """softmax(logits + log_weight) over the attended tokens in float64, then the estimate: (n, 1, h, d)."""
    chosen, (cand, local) = layer.layer.index.chosen, layer.layer.candidates()
    heads = lambda x: x[row].repeat_interleave(SHAPE.h // x.shape[1], 0)  # noqa: E731
    outs = []
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
        bias = torch.full((SHAPE.h, 1, k.shape[1]), -torch.inf, dtype=torch.float64)
        bias[..., : cand.sinks] = bias[..., k.shape[1] - 1 - local[row] :] = 0
        for head, at, weight in zip(bias[:, 0], heads(chosen.indices), heads(chosen.log_weight).double(), strict=True):
            head[at[at >= 0]] = weight[at >= 0]
        given = (x[None].double() for x in (q[row], k, v))
        outs.append(scaled_dot_product_attention(*given, bias[None], enable_gqa=True)[0])
        if chosen.share is not None:
            outs[-1] = torch.lerp(
                heads(chosen.mean)[:, None].double(), outs[-1], heads(chosen.share)[:, None, None].double()
            )
    return torch.stack(outs).transpose(1, 2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("lengths", "gaps"), [([60], 0), ([60], 2), ([60, 41], 1)])
def test_log_weights_enter_the_softmax_and_the_rest_is_estimated(options: dict, lengths: list[int], gaps: int) -> None:
    layer, given, out = one_step(Sampler(budget=Budget(ratio=0.4), gaps=gaps, **options), lengths)
    torch.testing.assert_close(out.double(), reference(layer, *given), rtol=1e-5, atol=1e-5)
