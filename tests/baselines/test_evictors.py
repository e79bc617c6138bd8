"""What holds for every evictor, at one layer of any geometry, precision and batch: what stays, whose bits, and for whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from baselines.h2o import H2O
from baselines.h2o_c import H2OC
from baselines.keydiff import KeyDiff
from baselines.kvcrush import KVCrush
from baselines.pyramidkv import PyramidKV
from baselines.snapkv import SnapKV
from baselines.streaming import StreamingLLM
from baselines.tova import TOVA
from pqcache.selective import Budget
from pqcache.selective.attention import partial
from pqcache.selective.eviction import EvictionLayer, EvictionMethod
from pqcache.selective.layer import LayerContext, Step
from pqcache.selective.ledger import Ledger
from pqcache.selective.shape import ModelShape
from tests.baselines.drive import held, run
from tests.masks import causal_mask

D = 8
EVICTORS: dict[str, tuple[type[EvictionMethod], dict[str, Any]]] = {
    "streaming": (StreamingLLM, {"n_sink": 3, "mode": "static"}),
    "streaming-dynamic": (StreamingLLM, {"n_sink": 3, "mode": "dynamic"}),
    "h2o": (H2O, {"n_sink": 3}),
    "h2o-static": (H2O, {"mode": "static", "recent": 5, "protocol": "paper"}),
    "h2o_c": (H2OC, {"n_sink": 3}),
    "snapkv": (SnapKV, {"n_sink": 3, "w": 6, "kernel": 5}),
    "snapkv-avg": (SnapKV, {"published": "listing", "w": 4, "protocol": "paper"}),
    "pyramidkv": (PyramidKV, {"n_sink": 0, "w": 4, "exact_total": True}),
    "tova": (TOVA, {"n_sink": 3}),
    "tova-paper": (TOVA, {"mode": "static", "protocol": "paper"}),
    "keydiff": (KeyDiff, {"n_sink": 3}),
    "kvcrush": (KVCrush, {"anchor": "mean", "base_options": {"n_sink": 3, "w": 6}}),
    "kvcrush-h2o-pages": (KVCrush, {"base": "h2o", "page": 4, "anchor": "inv_mean", "base_options": {"n_sink": 3}}),
    "kvcrush-kmeans": (KVCrush, {"grouping": "kmeans", "base_options": {"n_sink": 0, "w": 6}}),
    "kvcrush-alternate": (KVCrush, {"base": "pyramidkv", "pick": "random", "base_options": {"n_sink": 0}}),
}
N_LAYERS, LAYER = 4, 1  # PyramidKV's share depends on them


def make(name: str, budget: Budget) -> EvictionMethod:
    cls, hyper = EVICTORS[name]
    return cls(budget=budget, **hyper)


class OneLayer:
    """One eviction layer without a model: a left-padded prompt in blocks, then steps."""

    def __init__(self, method: EvictionMethod, shape: ModelShape, lengths: list[int]) -> None:
        self.method, self.shape, self.lengths = method, shape, lengths
        self.layer: EvictionLayer = method.make_layer(LAYER, shape)
        self.past = [0] * len(lengths)

    def context(self, x: torch.Tensor, step: Step) -> LayerContext:
        nothing: Any = None
        cache: Any = SimpleNamespace(
            ledger=Ledger(),
            attn="sdpa",
            observers=[],
            watchers=[],
            kernel=sdpa_attention_forward,
            note_resident=lambda: None,
        )
        module: Any = SimpleNamespace(num_key_value_groups=self.shape.group, is_causal=True, training=False)
        ctx = LayerContext(LAYER, module, cache, x, nothing, nothing, nothing, [], nothing, step)
        ctx.scaling = D**-0.5
        return ctx

    def prompt(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int | None = None) -> OneLayer:
        """q (n, h, t, D), k and v (n, h_kv, t, D), row r's last lengths[r] columns real."""
        t = q.shape[2]
        for start in range(0, t, chunk or t):
            stop = min(start + (chunk or t), t)
            counts = [max(0, stop - max(start, t - length)) for length in self.lengths]
            step = Step(False, stop - start, self.past, counts, self.lengths, stop == t, start == 0)
            x = q[:, :, start:stop]
            mask = causal_mask(self.past, counts, stop - start, stop - start, q.device)
            self.layer.attend(x, k[:, :, start:stop], v[:, :, start:stop], mask, self.context(x, step))
            self.past = step.total
        return self

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One token per row -> (n, 1, h, D)."""
        step = Step(True, 1, self.past, [1] * len(self.past), self.lengths, False, False)
        out = self.layer.attend(q, k, v, None, self.context(q, step))
        self.past = step.total
        return out

    def held(self, row: int = 0) -> list[list[int]]:
        return held(self.layer, row)


def draw_inputs(n: int, h: int, h_kv: int, t: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, t, D, generator=generator).to(dtype) for heads in (h, h_kv, h_kv)]


geometries = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]))  # h_kv, g
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.mark.parametrize("name", EVICTORS)
@settings(max_examples=12, deadline=None)
@given(
    geometries, dtypes, st.lists(st.integers(2, 70), min_size=1, max_size=3), st.floats(0.1, 0.9), st.integers(0, 99)
)
def test_what_stays(
    name: str, geometry: tuple[int, int], dtype: torch.dtype, lengths: list[int], ratio: float, seed: int
) -> None:
    """Budget, order, forced tokens, bits; the attention of a step; each row as if alone; the same in chunks, and again."""
    h_kv, g = geometry
    shape = ModelShape(N_LAYERS, h_kv * g, h_kv, D)
    t, method = max(lengths), make(name, Budget(ratio=ratio))
    q, k, v = draw_inputs(len(lengths), h_kv * g, h_kv, t, dtype, seed)
    one = OneLayer(method, shape, lengths).prompt(q, k, v)
    page = getattr(method, "page", 1)
    for row, s in enumerate(lengths):
        plan = method.plan(s, LAYER, N_LAYERS)
        length = one.layer.store.lengths[row]
        assert plan is not None and one.layer.positions is not None
        total = min(s, plan.total)
        assert total - page < length <= total
        for head in range(h_kv):
            stored = one.layer.where(one.layer.store.lengths)[row, head, :length].tolist()
            assert stored == sorted(set(stored)) and stored[-1] < s
            recent = max(0, min(plan.local, s) - (page - 1))  # a last page that is not full shortens the window
            assert {*range(min(plan.sinks, s)), *range(s - recent, s)} <= set(stored)
            columns = [p + t - s for p in stored]
            for kept, whole in zip(one.layer.store.view(), (k, v), strict=True):
                assert torch.equal(kept[row, head, :length], whole[row, head, columns])
    again = OneLayer(method, shape, lengths).prompt(q, k, v)
    chunked = OneLayer(method, shape, lengths).prompt(q, k, v, chunk=max(1, t // 3))
    for row, s in enumerate(lengths):
        alone = OneLayer(method, shape, [s]).prompt(*(x[row : row + 1, :, t - s :] for x in (q, k, v)))
        assert one.held(row) == again.held(row) == alone.held()
        if dtype == torch.float32:
            assert one.held(row) == chunked.held(row)
    # a step: attention over what is held equals attention over everything with the dropped tokens at -inf
    qs, ks, vs = draw_inputs(len(lengths), h_kv * g, h_kv, 1, dtype, seed + 1000)
    before = [one.held(row) for row in range(len(lengths))]
    out = one.step(qs, ks, vs)
    assert bool(out.isfinite().all())
    for row, s in enumerate(lengths):
        seen = torch.zeros(h_kv, s + 1, dtype=torch.bool)
        for head, positions in enumerate(before[row]):
            seen[head, positions] = True
        seen[:, s] = True
        keys, values = (torch.cat([a[row : row + 1, :, t - s :], b[row : row + 1]], 2) for a, b in ((k, ks), (v, vs)))
        mask = seen.repeat_interleave(g, 0)[None, :, None]
        want = partial(qs[row : row + 1], keys, values, D**-0.5, mask).out.transpose(1, 2)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out[row : row + 1].float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", [name for name in EVICTORS if "alternate" not in name])  # its anchor counts the heads
@settings(max_examples=8, deadline=None)
@given(st.integers(8, 60), st.floats(0.1, 0.9), st.integers(0, 99))
def test_heads(name: str, s: int, ratio: float, seed: int) -> None:
    """Repeated query heads change nothing; permuted groups give permuted choices."""
    q, k, v = draw_inputs(1, 3, 3, s, torch.float32, seed)
    method = make(name, Budget(ratio=ratio))
    mha = OneLayer(method, ModelShape(N_LAYERS, 3, 3, D), [s]).prompt(q, k, v)
    repeated = OneLayer(method, ModelShape(N_LAYERS, 6, 3, D), [s]).prompt(q.repeat_interleave(2, 1), k, v)
    assert mha.held() == repeated.held()
    order = [2, 0, 1]
    permuted = OneLayer(method, ModelShape(N_LAYERS, 3, 3, D), [s]).prompt(q[:, order], k[:, order], v[:, order])
    assert permuted.held() == [mha.held()[i] for i in order]


@pytest.mark.parametrize("name", ["h2o", "h2o_c", "streaming-dynamic", "tova"])
@settings(max_examples=8, deadline=None)
@given(geometries, st.integers(20, 60), st.floats(0.2, 0.6), st.integers(0, 99))
def test_dynamic_steps(name: str, geometry: tuple[int, int], s: int, ratio: float, seed: int) -> None:
    """Never more than after the prompt, the window always there, nothing returns, what stays keeps its bits."""
    h_kv, g = geometry
    method = make(name, Budget(ratio=ratio))
    q, k, v = draw_inputs(1, h_kv * g, h_kv, s + 15, torch.float32, seed)
    one = OneLayer(method, ModelShape(N_LAYERS, h_kv * g, h_kv, D), [s]).prompt(*(x[:, :, :s] for x in (q, k, v)))
    plan = method.plan(s, LAYER, N_LAYERS)
    assert plan is not None
    capacity = max(plan.total, plan.sinks + 1)
    for at in range(s, s + 15):
        before = one.held()
        one.step(*(x[:, :, at : at + 1] for x in (q, k, v)))
        assert one.layer.positions is not None
        for head, positions in enumerate(one.held()):
            assert len(positions) <= capacity
            assert set(positions) <= {*before[head], at}
            assert {*range(plan.sinks), *range(at + 1 - max(1, plan.local), at + 1)} <= set(positions)
            order = one.layer.positions.data[0, head, : len(positions)].long()
            for kept, whole in zip(one.layer.store.view(), (k, v), strict=True):
                assert torch.equal(kept[0, head, : len(positions)], whole[0, head, order])


@pytest.mark.parametrize("name", EVICTORS)
def test_static_ones_grow_by_a_token_a_step(name: str) -> None:
    """Also far beyond the budget; dynamic ones do not."""
    method = make(name, Budget(ratio=0.3))
    q, k, v = draw_inputs(1, 4, 2, 100, torch.float32, 1)
    one = OneLayer(method, ModelShape(N_LAYERS, 4, 2, D), [40]).prompt(*(x[:, :, :40] for x in (q, k, v)))
    start = one.layer.store.lengths[0]
    for at in range(40, 100):
        one.step(*(x[:, :, at : at + 1] for x in (q, k, v)))
    assert one.layer.store.lengths == [start + (0 if method.is_dynamic else 60)]


@pytest.mark.parametrize("name", EVICTORS)
def test_prompts_shorter_than_sinks_and_window_stay_whole(name: str) -> None:
    for s in (1, 2, 3, 4):
        q, k, v = draw_inputs(1, 4, 2, s, torch.float32, s)
        one = OneLayer(make(name, Budget(tokens=64)), ModelShape(N_LAYERS, 4, 2, D), [s]).prompt(q, k, v)
        assert one.held() == [list(range(s))] * 2


@pytest.mark.parametrize("chunk", [None, 9])
@pytest.mark.parametrize(
    "method",
    [
        SnapKV(budget=Budget(ratio=0.25), w=8, n_sink=4),
        PyramidKV(budget=Budget(ratio=0.25), w=8, n_sink=4),
        KVCrush(budget=Budget(ratio=0.25), base_options={"w": 8, "n_sink": 4}),
        KVCrush(budget=Budget(ratio=0.25), base="h2o", page=8, base_options={"n_sink": 4}),
    ],
    ids=["snapkv", "pyramidkv", "kvcrush", "kvcrush-pages"],
)
def test_a_new_turn_prunes_what_was_kept_and_itself(llama: PreTrainedModel, method: Any, chunk: int | None) -> None:
    """Positions go on, the union is pruned to the budget of all tokens seen, and nothing dropped before comes back."""
    first = run(llama, method, 120, steps=10)
    layer: Any
    for index, (before, layer) in enumerate(
        zip(first.layers, run(llama, method, 120, steps=10, turn=30, chunk=chunk).layers)
    ):
        plan = method.plan(160, index, 3)
        known = [set(head) for head in held(before)]
        for head, positions in enumerate(held(layer)):
            assert plan.total - getattr(method, "page", 1) < len(positions) <= plan.total
            recent = plan.local - (getattr(method, "page", 1) - 1)
            assert set(positions) >= {*range(4), *range(160 - recent, 160)}
            if chunk is None:
                assert {p for p in positions if p < 130} <= known[head]
