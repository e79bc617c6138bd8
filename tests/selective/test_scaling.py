"""Soft-capped scores and attention sinks: every path against the formula, softmax over [cap * tanh(logits / cap), sink]."""

import contextlib
from copy import deepcopy
from typing import Any

import pytest
import torch

from pqcache import kernels
from pqcache.api.drive import logits, tokens
from pqcache.kernels.scaling import Scaling
from pqcache.selective.attention import (
    attend_adding,
    attend_exactly,
    attend_one,
    attend_rows,
    merge,
    partial,
    row_mask,
    with_sinks,
)
from pqcache.selective.column_sums import QueryWindow, attend_and_sum
from pqcache.selective.group import group_reduce
from pqcache.selective.index import Selection
from pqcache.selective.support import standard_probabilities
from tests.invariants.cases import BY_ID
from tests.invariants.conftest import build
from tests.thin import thin

N, H, H_KV, D, D_V = 2, 4, 2, 16, 8
SCALINGS = {
    "plain": 0.6,
    "cap": Scaling(0.6, cap=1.5),
    "sinks": Scaling(0.6, sinks=torch.tensor([-1.0, 0.5, 2.0, 4.0])),
    "both": Scaling(0.6, 2.0, torch.tensor([3.0, 0.0, -2.0, 1.0])),
}


@pytest.fixture(params=SCALINGS.values(), ids=SCALINGS)
def scaling(request: pytest.FixtureRequest) -> float:
    return request.param


def draw(t: int, m: int, d_v: int = D) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(t + m)
    return torch.randn(N, H, t, D), torch.randn(N, H_KV, m, D), torch.randn(N, H_KV, m, d_v)


def weights(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scaling: float) -> torch.Tensor:
    """The formula: (n, h, t, m) of the tokens; the rest up to 1 is the sink's."""
    logits = q @ k.repeat_interleave(H // H_KV, 1).mT * float(scaling)
    if (cap := getattr(scaling, "cap", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(~seen, -torch.inf)
    if (sinks := getattr(scaling, "sinks", None)) is None:
        return logits.softmax(-1)
    sink = sinks[:, None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def causal(t: int, m: int) -> torch.Tensor:
    return torch.ones(t, m, dtype=torch.bool).tril(m - t)


def values(probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (probs @ v.repeat_interleave(H // H_KV, 1)).transpose(1, 2)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("switch", [contextlib.nullcontext, kernels.plain_torch])
def test_a_block_of_a_prompt_and_what_its_keys_receive(scaling: Scaling, switch: Any) -> None:
    q, k, v = draw(150, 190, D_V)
    seen = causal(150, 190)
    expected = weights(q, k, seen, scaling)
    close(attend_exactly(q, k, v, None, scaling), values(expected, v))
    close(standard_probabilities(q, k, None, scaling), expected)
    masked = seen & (torch.arange(190) > 20)
    close(attend_exactly(q, k, v, masked[None, None], scaling), values(weights(q, k, masked, scaling), v))
    with switch():
        out, sums = attend_and_sum(q, k, v, scaling)
    close(out, values(expected, v))
    close(sums, expected.sum(2))
    window = QueryWindow(5)
    window.push(q, [150] * N)
    close(window.column_sums(k, [190] * N, scaling), expected[:, :, -5:].sum(2))
    held = torch.arange(189, 0, -2)  # entries in any order, some tokens dropped
    expected = weights(q, k, seen & torch.isin(torch.arange(190), held), scaling)[:, :, -5:].sum(2)[..., held]
    close(window.sums_at(k[:, :, held], held.expand(N, H_KV, -1), [95] * N, [190] * N, scaling), expected)


@pytest.mark.parametrize("m", [40, 5000])  # a kernel takes the many
def test_one_query_over_all_tokens_of_its_row(scaling: Scaling, m: int) -> None:
    q, k, v = draw(1, m)
    for lengths in ([m, m], [m, m - 7]):
        mask = row_mask(lengths, m, q.device)
        seen = torch.ones(N, 1, m, dtype=torch.bool) if mask is None else mask
        expected = weights(q, k, seen[:, :, None], scaling)
        close(attend_rows(q, k, v, lengths, scaling), values(expected, v))
        some = torch.rand(N, H_KV, m) < 0.5
        expected_some = weights(q, k, some.repeat_interleave(H // H_KV, 1)[:, :, None], scaling)
        close(attend_one(q, k, v, scaling, some), values(expected_some, v))
        sums = torch.zeros(N, H_KV, m)
        close(attend_adding(q, k, v, lengths, scaling, sums), values(expected, v))
        close(sums, expected[:, :, 0].unflatten(1, (H_KV, -1)).mean(2))


def test_segments_and_an_estimate_of_the_rest_join_to_the_whole(scaling: Scaling) -> None:
    """The exact share and mean of the tokens left out make the estimate exact."""
    q, k, v = draw(1, 60)
    every = torch.ones(1, 60, dtype=torch.bool)
    expected = values(weights(q, k, every, scaling), v)
    near, far = (partial(q, k[:, :, part], v[:, :, part], scaling) for part in (slice(0, 25), slice(25, 60)))
    whole = merge([near, far])
    close(with_sinks(whole, scaling).out.transpose(1, 2), expected)
    share = torch.exp(near.lse - whole.lse)[..., 0]
    estimate = Selection(torch.zeros(N, H, 0), share=share, mean=far.out[:, :, 0])
    close(with_sinks(estimate.with_rest(near), scaling).out.transpose(1, 2), expected)


def test_a_ranking_over_all_tokens_knows_the_sinks_of_its_heads() -> None:
    """A head whose sink takes nearly everything has no say, though its softmax over the tokens alone is sharp."""
    logits = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 1.0, 0.5]]])
    assert group_reduce(logits, 1, "sum_softmax")[0, 0].argmax() == 0
    quiet = Scaling(1.0, sinks=torch.tensor([30.0, -30.0]))
    assert group_reduce(logits, 1, "sum_softmax", scaling=quiet)[0, 0].argmax() == 1


@pytest.mark.parametrize("name", thin(["oracle", "pqcache", "pqcache-1", "sparq-1", "h2o", "coded-1", "infllm"], 3))
@pytest.mark.rest
def test_kernels_and_plain_torch_agree_on_a_model_with_sinks(name: str) -> None:
    model, case = deepcopy(build("gpt-oss")).float(), BY_ID[name]
    prompt, steps = [tokens(90, 1)], [[t] for t in tokens(6, 9)]
    fast = logits(model, case.make(), prompt, steps)
    with kernels.plain_torch():
        slow = logits(model, case.make(), prompt, steps)
    torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-4)
