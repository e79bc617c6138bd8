"""What holds for every evictor, at one layer of any geometry, precision and batch: what stays, whose bits, and for whom."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pqcache.selective import Budget
from pqcache.selective.attention import partial
from tests.baselines.common import OneLayer, made
from tests.baselines.drive import held, run
from tests.drawn import Pick, examples
from tests.invariants.cases import CASES, Case
from tests.thin import thin

D = 8
EVICTORS = ("streaming", "h2o", "h2o_c", "snapkv", "pyramidkv", "tova", "keydiff", "kvcrush")
# but for the rolling StreamingLLM, which un-rotates its keys
SETTINGS = [case for case in CASES if case.name in EVICTORS and case.id != "streaming-2"]


def draw_inputs(n: int, h: int, h_kv: int, t: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, t, D, generator=generator).to(dtype) for heads in (h, h_kv, h_kv)]


@pytest.mark.parametrize("case", thin(SETTINGS, 2), ids=lambda case: case.id)
@examples(8)
def test_what_stays(case: Case, pick: Pick) -> None:
    """Budget, order, forced tokens, bits; and a step attends what is held."""
    h_kv, g, seed = (pick(*limits) for limits in ((1, 3), (1, 3), (0, 99)))
    lengths = pick.some(2, 70)
    dtype = pick([torch.float32, torch.bfloat16])
    n, t, method = len(lengths), max(lengths), case.make(budget=Budget(ratio=pick(0.1, 0.9)))
    q, k, v = draw_inputs(n, h_kv * g, h_kv, t, dtype, seed)
    one = OneLayer(method, k, v, h_kv * g, lengths, q)
    before, page = [held(one.layer, row) for row in range(n)], getattr(method, "page", 1)
    for row, s in enumerate(lengths):
        plan = method.plan(s, 0, 1)
        length = one.layer.store.lengths[row]
        assert min(s, plan.total) - page < length <= min(s, plan.total)
        for head, stored in enumerate(before[row]):
            assert stored == one.layer.where(one.layer.store.lengths)[row, head, :length].tolist()
            assert stored == sorted(set(stored)) and stored[-1] < s
            recent = max(0, min(plan.local, s) - (page - 1))  # a last page that is not full shortens the window
            assert {*range(min(plan.sinks, s)), *range(s - recent, s)} <= set(stored)
            for kept, whole in zip(one.layer.store.view(), (k, v), strict=True):
                assert torch.equal(kept[row, head, :length], whole[row, head, stored])
    # attention over what is held equals attention over everything with the dropped tokens at -inf
    qs, ks, vs = draw_inputs(n, h_kv * g, h_kv, 1, dtype, seed + 1000)
    out = one.step(qs, ks, vs)
    for row, s in enumerate(lengths):
        seen = torch.zeros(h_kv, s + 1, dtype=torch.bool)
        seen[:, s] = True
        for head, positions in enumerate(before[row]):
            seen[head, positions] = True
        keys, values = (torch.cat([a[row : row + 1, :, :s], b[row : row + 1]], 2) for a, b in ((k, ks), (v, vs)))
        mask = seen.repeat_interleave(g, 0)[None, :, None]
        want = partial(qs[row : row + 1], keys, values, D**-0.5, mask).out.transpose(1, 2)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out[row : row + 1].float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "method",
    [
        made("snapkv", 0.25, w=8, n_sink=4),
        made("pyramidkv", 0.25, w=8, n_sink=4),
        made("kvcrush", 0.25, base_options={"w": 8, "n_sink": 4}),
        made("kvcrush", 0.25, base="h2o", page=8, base_options={"n_sink": 4}),
    ],
    ids=["snapkv", "pyramidkv", "kvcrush", "kvcrush-pages"],
)
def test_a_new_turn_prunes_what_was_kept_and_itself(llama: PreTrainedModel, method: Any) -> None:
    """Positions go on, the union is pruned to the budget of all tokens seen, and nothing dropped before comes back."""
    first, second = run(llama, method, 120, steps=10), run(llama, method, 120, steps=10, turn=30)
    for index, (before, layer) in enumerate(zip(first.layers, second.layers, strict=True)):
        plan, page = method.plan(160, index, 3), getattr(method, "page", 1)
        for known, positions in zip(held(before), held(layer), strict=True):
            assert plan.total - page < len(positions) <= plan.total
            assert set(positions) >= {*range(4), *range(160 - (plan.local - page + 1), 160)}
            assert {p for p in positions if p < 130} <= set(known)


@pytest.mark.parametrize("mode", ["dynamic", "rolling"])
def test_a_prompt_shorter_than_the_sinks_loses_none_of_the_first(llama: PreTrainedModel, mode: str) -> None:
    layer = run(llama, made("streaming", mode=mode, budget=0.5), 20, steps=4).layers[0]
    assert held(layer)[0] == [*range(19), 23]
