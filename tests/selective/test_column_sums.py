"""Blockwise column sums against the whole softmax matrix; padding, chunks, evicted keys, memory."""

import contextlib

import pytest
import torch

from pqcache import kernels
from pqcache.selective import column_sums
from pqcache.selective.column_sums import QueryWindow, add_column_sums
from tests.drawn import Pick, examples
from tests.largest import Largest


def inputs(n: int, h: int, h_kv: int, t: int, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(n, h, t, 8, generator=generator), torch.randn(n, h_kv, m, 8, generator=generator)


def naive(q: torch.Tensor, k: torch.Tensor, stored: list[int], counts: list[int], scaling: float) -> torch.Tensor:
    """The matrix of all probabilities, padded queries' rows set to 0, summed."""
    n, h, t, _ = q.shape
    m = k.shape[2]
    logits = (q @ k.repeat_interleave(h // k.shape[1], 1).transpose(2, 3)) * scaling
    column, rows = torch.arange(m), torch.tensor(stored)[:, None, None, None]
    seen = (column <= rows - t + torch.arange(t)[:, None]) & (column < rows)  # the newest query at the newest key
    real = (torch.arange(t) >= t - torch.tensor(counts)[:, None])[:, None, :, None]
    return (logits.masked_fill(~seen, -torch.inf).softmax(-1) * real).nan_to_num().sum(2)


def sums(
    q: torch.Tensor, k: torch.Tensor, stored: list[int], counts: list[int], block: int, native: bool = False
) -> torch.Tensor:
    """native: by the CPU's kernel; else in plain torch."""
    out = torch.zeros(q.shape[0], q.shape[1], k.shape[2])
    with contextlib.nullcontext() if native else kernels.plain_torch():
        add_column_sums(out, q, k, stored, counts, 0.3, block)
    return out


@pytest.mark.parametrize("native", [True, False])
@examples(40)
def test_equal_to_the_whole_matrix_for_any_block_padding_and_past(native: bool, pick: Pick) -> None:
    """Any block size, any left padding, any number of keys from before (chunks, or what an eviction left)."""
    n, h_kv, g = pick(1, 3), pick(1, 2), pick(1, 3)
    t = pick(1, 20)
    counts = [pick(0, t) for _ in range(n)]
    stored = [max(1, count + pick(0, 15)) for count in counts]
    q, k = inputs(n, h_kv * g, h_kv, t, max(stored) + pick(0, 3), pick(0, 99))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_sums, "TILE", pick(1, 40))
        patch.setattr(column_sums, "TOGETHER", pick([0, 200, 1 << 20]))  # one KV head, some, all
        got = sums(q, k, stored, counts, pick(1, 25), native)
    torch.testing.assert_close(got, naive(q, k, stored, counts, 0.3), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.sum(-1), torch.tensor(counts, dtype=torch.float32)[:, None].expand(n, h_kv * g))


@examples(10)
def test_queries_that_see_a_window_only(pick: Pick) -> None:
    seed, s, t, w, block = pick.seed, pick(1, 40), pick(1, 20), pick(1, 50), pick(1, 9)
    dtype = pick([torch.float64, torch.float32])
    t = min(s, t)
    q, k = (x.to(dtype) for x in inputs(1, 4, 2, t, s, seed))
    sums = torch.zeros(1, 4, s, dtype=dtype)
    add_column_sums(sums, q, k, [s], [t], 0.3, block, windows=[w])
    at, j = torch.arange(s - t, s)[:, None], torch.arange(s)[None]
    probs = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(j > at, -torch.inf).softmax(-1)
    torch.testing.assert_close(sums, (probs * (at - j < w)).sum(2))


def test_constant_zero_and_extreme_inputs_stay_finite() -> None:
    for value in (0.0, 1.0, 65504.0, -65504.0):
        q = torch.full((1, 2, 9, 8), value, dtype=torch.float16)
        out = torch.zeros(1, 2, 9)
        add_column_sums(out, q, q[:, :1], [9], [9], 0.3)
        torch.testing.assert_close(out.sum(-1), torch.full((1, 2), 9.0))
    torch.testing.assert_close(sums(*inputs(1, 2, 1, 1, 1, 0), [1], [1], 4), torch.ones(1, 2, 1))


def test_a_window_lets_the_prompts_queries_go() -> None:
    window = QueryWindow(4)
    window.push(torch.randn(1, 2, 100, 8), [100])
    window.push(torch.randn(1, 2, 100, 8), [100])
    assert window.tensors()["device"][0].untyped_storage().nbytes() == 2 * 4 * 8 * 4


def test_scratch_of_a_long_prompt_is_one_block_of_one_group() -> None:
    """4 query heads x 64 queries x 32768 keys; all heads would be twice as many, all queries of the prompt 512 times."""
    (q, _), (_, k) = inputs(1, 8, 2, 256, 1, 0), inputs(1, 8, 2, 1, 32768, 1)
    with kernels.plain_torch(), Largest([q, k, out := torch.zeros(1, 8, 32768)]) as seen:
        add_column_sums(out, q, k, [32768], [256], 0.3, block=64)
    assert seen.numel <= 4 * 64 * 32768
