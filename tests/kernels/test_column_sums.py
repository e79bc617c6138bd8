"""The CPU's kernel for the attention of a prompt's queries and its column sums, against the whole matrix in float64."""

from __future__ import annotations

import pytest
import torch

from pqcache.kernels import threads

pytest.importorskip("numba")
from pqcache.kernels import column_sums
from pqcache.kernels.column_sums import add_sums, serves


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_matrix(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scaling: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (h, t, d') and sums (h, m)."""
    g, j = q.shape[0] // k.shape[0], torch.arange(k.shape[1])
    k, v = (x.double().repeat_interleave(g, 0) for x in (k, v))
    logits = (q.double() @ k.mT * scaling).masked_fill(j >= seen[:, None], -torch.inf)
    probs = logits.softmax(-1)
    counted = probs if window is None else probs * (j >= seen[:, None] - window)
    return probs @ v, counted.sum(1)


CASES = [  # h_kv, g, d, d', keys, queries, window
    (2, 4, 64, 64, 1300, 700, None),  # several tiles of keys, several blocks of queries
    (1, 1, 16, 16, 1, 1, None),
    (3, 1, 32, 32, 530, 530, 40),
    (1, 7, 80, 80, 100, 90, 600),
    (2, 3, 20, 33, 75, 75, 10),  # no whole registers
    (1, 71, 64, 64, 40, 40, None),
]


@pytest.mark.parametrize(("h_kv", "g", "d", "d_v", "m", "t", "window"), CASES)
@pytest.mark.parametrize("workers", [1, 2])
def test_equals_the_whole_matrix(
    h_kv: int,
    g: int,
    d: int,
    d_v: int,
    m: int,
    t: int,
    window: int | None,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    q, k, v = drawn(1, h_kv * g, t, d), drawn(2, h_kv, m, d), drawn(3, h_kv, m, d_v)
    seen = torch.arange(m - t + 1, m + 1)
    sums, out = drawn(4, h_kv * g, m), torch.full((t, h_kv * g, d_v), torch.nan)
    before = sums.clone()
    add_sums(sums, q, k, seen, 0.3, window, (v, out.transpose(0, 1)))
    want, received = by_matrix(q, k, v, seen, 0.3, window)
    torch.testing.assert_close(out.transpose(0, 1).double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((sums - before).double(), received, rtol=1e-5, atol=1e-5)


def test_any_queries_of_a_prompt_in_views() -> None:
    """Probes: they see ever more keys, some as many as the one before. Tensors as a model has them, tokens before heads."""
    q, k = drawn(5, 50, 4, 24).transpose(0, 1), drawn(6, 2000, 2, 24).transpose(0, 1)
    seen = torch.randint(1, 2001, (50,), generator=torch.Generator().manual_seed(7)).sort().values
    seen[10] = seen[9]
    assert serves(q, k) and not q.is_contiguous()
    sums = torch.zeros(4, 2000)
    add_sums(sums, q, k, seen, 0.2)
    torch.testing.assert_close(sums.double(), by_matrix(q, k, k, seen, 0.2, None)[1], rtol=1e-5, atol=1e-5)


def test_logits_that_grow_and_fall_by_hundreds() -> None:
    """The largest logit is in the last tile for some queries, in the first for others; what it makes negligible is 0."""
    m = 3 * column_sums._TILE
    k = torch.linspace(-1, 1, m)[None, :, None] * torch.ones(1, 1, 16)
    q = torch.tensor([1.0, -1.0, 0.01])[None, :, None] * 40 * torch.ones(1, 1, 16)
    sums, out, seen = torch.zeros(1, m), torch.zeros(1, 3, 16), torch.tensor([m - 2, m - 1, m])
    add_sums(sums, q, k, seen, 1.0, None, (k, out))
    want, received = by_matrix(q, k, k, seen, 1.0, None)
    torch.testing.assert_close(sums.double(), received, rtol=1e-3, atol=1e-5)  # logits of 640 round by 3e-5
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_nan_stays_with_its_query() -> None:
    q, k = drawn(8, 2, 30, 16), drawn(9, 1, 600, 16)
    q[1, 3] = torch.nan
    sums, out = torch.zeros(2, 600), torch.zeros(2, 30, 16)
    add_sums(sums, q, k, torch.arange(571, 601), 0.3, None, (k, out))
    assert out[1, 3].isnan().all() and sums[1, :574].isnan().all()
    assert out[0].isfinite().all() and sums[0].isfinite().all() and out[1, 4:].isfinite().all()


def test_who_is_served() -> None:
    q = drawn(10, 2, 8, 16)
    assert serves(q) and not serves(q.double()) and not serves(q, q.bfloat16()) and not serves(q.mT)
