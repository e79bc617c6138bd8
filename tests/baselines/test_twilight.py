"""Twilight attends the fewest tokens whose weights reach p, whatever made the ranking."""

import pytest
import torch

from baselines.combined.twilight import Twilight, nucleus
from pqcache.selective import Budget
from tests.baselines.common import OneLayer


def test_the_nucleus_by_hand() -> None:
    weights = torch.tensor([[0.1, 0.5, 0.1, 0.3], [0.25, 0.25, 0.25, 0.25]])
    assert nucleus(weights, 0.79).tolist() == [[False, True, False, True], [True, True, True, True]]
    assert nucleus(weights, 0.45).tolist() == [[False, True, False, False], [True, True, False, False]]
    assert nucleus(weights, 0.85).tolist()[0] == [True, True, False, True]  # of equals the earlier one


@pytest.mark.parametrize("first", ["oracle", "quest"])
@pytest.mark.parametrize("p", [0.5, 0.9])
def test_every_head_attends_the_fewest_tokens_that_reach_p(first: str, p: float) -> None:
    """Exact weights: what a head attends sums to p of what was selected; without its lightest token it would not."""
    draw = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 1, 2, 300, 16, generator=draw) * 2
    options = {"second": "oracle", "second_options": {}, "protocol": "release"}
    one = OneLayer(Twilight(budget=Budget(ratio=0.3), p=p, first=first, **options), k, v, h=6)
    shortlists: list[torch.Tensor] = []
    shorten = one.layer.index.shorten
    one.layer.index.shorten = lambda *args: shortlists.append(shorten(*args)) or shortlists[-1]
    q, key, value = (torch.randn(1, heads, 1, 16, generator=draw) for heads in (6, 2, 2))
    one.step(q, key, value)
    keys = torch.cat([k, key], 2)[0].repeat_interleave(3, 0)
    counts = set()
    for head in range(6):
        chosen, listed = (
            [*filter(lambda x: x >= 0, row[head % len(row)].tolist())] for row in (one.selected[0], shortlists[0][0])
        )
        always = [299, 300]  # the window's token and the current one
        logits = (keys[head, [*always, *listed]] @ q[0, head, 0] / 4).softmax(-1)
        weight = dict(zip([*always, *listed], logits.tolist(), strict=True))
        got = sum(weight[i] for i in [*always, *chosen])
        assert got >= p - 1e-6
        if chosen:
            least = min(weight[i] for i in chosen)
            assert sum(x for x in weight.values() if x > least) < p
            assert least >= max([weight[i] for i in listed if i not in chosen], default=0)
        counts.add(len(chosen))
    assert len(counts) > 1  # a number of its own for every head
