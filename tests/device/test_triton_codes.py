"""Triton's selection kernels against plain torch: on a CUDA device if there is one, else through Triton's interpreter.

A missing triton fails here, on Linux: it belongs to the dev extra.
"""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.pq import codebook
from pqcache.selective.group import group_reduce, top_tokens

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
from pqcache.device import triton_codes
from tests.thin import thin

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAPACITY = 512


class Made:
    """A small index of random keys, one row shorter than the other, and one step's query and token."""

    def __init__(self, n, h_kv, g, m, b, sub, tokens, k, local, dtype=torch.float32, scale=1.0, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.n, self.h_kv, self.m, self.c = n, h_kv, m, 2**b
        self.n_sink, self.d = 3, m * sub

        def draw(*shape):
            return (torch.randn(*shape, generator=gen) * scale).to(dtype).to(DEVICE)

        self.k, self.v = draw(n, h_kv, 1, self.d), draw(n, h_kv, 1, self.d)
        self.q = draw(n, h_kv * g, 1, self.d)
        self.centroids = draw(n, h_kv, m, self.c, sub)
        code_type = torch.uint8 if b <= 8 else torch.int16
        self.codes = torch.randint(0, self.c, (n, h_kv * m, CAPACITY), generator=gen).to(code_type).to(DEVICE)
        self.lengths = [tokens - 5 * r for r in range(n)]  # before the step
        self.local = [max(1, local - r) for r in range(n)]
        self.hi = [length - window for length, window in zip(self.lengths, self.local, strict=True)]
        self.wanted = [max(1, min(k - r, hi - self.n_sink)) for r, hi in enumerate(self.hi)]
        self.cursor = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        rows = [[self.n_sink, a, b, 0] for a, b in zip(self.wanted, self.local, strict=True)]
        self.plan = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        self.near = tuple(torch.zeros(n, h_kv, CAPACITY, self.d, dtype=dtype, device=DEVICE) for _ in range(2))
        self.scaling = self.d**-0.5

    def select(self):
        amount = triton_codes.histogram(self.codes, self.cursor, self.plan, self.n_sink, self.h_kv, self.m, self.c)
        entered = triton_codes.enter(
            self.k, self.v, self.near, CAPACITY, self.cursor, self.plan, n_sink=self.n_sink, q=self.q,
            centroids=self.centroids, codes=self.codes, amount=amount, scaling=self.scaling,
        )  # fmt: skip
        chosen = triton_codes.select(
            entered, self.codes, self.cursor, self.plan, self.n_sink, max(self.wanted), CAPACITY
        )
        return entered[0], chosen

    def weights(self):
        codes = self.codes.view(self.n, self.h_kv, self.m, -1)[..., : max(self.hi) - self.n_sink]
        logits = codebook.score(self.q, codes, self.centroids) * self.scaling
        column = torch.arange(codes.shape[-1], device=DEVICE) + self.n_sink
        valid = (column[None] < torch.tensor(self.hi, device=DEVICE)[:, None])[:, None]
        return group_reduce(logits, self.h_kv, "sum_softmax", valid)


@settings(max_examples=8, deadline=None)
@given(
    n=st.integers(1, 2),
    h_kv=st.integers(1, 2),
    g=st.integers(1, 4),
    bits=st.sampled_from([(1, 4), (2, 3), (2, 6), (4, 3), (2, 7), (1, 9), (8, 2)]),
    tokens=st.integers(20, 400),
    k=st.integers(1, 120),
    scale=st.sampled_from([0.1, 1.0, 6.0]),
    seed=st.integers(0, 99),
)
def test_selection_equals_the_definition(n, h_kv, g, bits, tokens, k, scale, seed):
    made = Made(n, h_kv, g, *bits, 8, tokens, k, 6, scale=scale, seed=seed)
    _, chosen = made.select()
    weights = made.weights()
    for r in range(n):
        for head in range(h_kv):
            mine = chosen[r, head, : made.wanted[r]].long()
            assert mine.ge(made.n_sink).all() and mine.lt(made.hi[r]).all() and mine.diff().gt(0).all()
            own = weights[r, head]
            best = own.topk(made.wanted[r]).values
            torch.testing.assert_close(own[mine - made.n_sink].sort(descending=True).values, best, rtol=2e-5, atol=0)


@pytest.mark.parametrize("bits", [(2, 4), (2, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_same_selection_as_the_general_path(bits, dtype):
    made = Made(2, 2, 3, *bits, 8, 300, 40, 10, dtype=dtype)
    _, chosen = made.select()
    general = top_tokens(made.weights(), made.wanted) + made.n_sink
    for r, count in enumerate(made.wanted):
        assert torch.equal(chosen[r, :, :count].long(), general[r, :, :count])


@pytest.mark.parametrize("dtype", thin([torch.float32, torch.float16, torch.bfloat16], 3))
@pytest.mark.parametrize("bits", [(2, 6), (1, 9), (4, 3)])
def test_the_new_token_is_stored_and_coded_and_the_query_tabled(bits, dtype):
    made = Made(2, 2, 2, *bits, 24, 100, 10, 6, dtype=dtype)  # 24: a sub-space that is no power of two
    tables, _ = made.select()
    codes = codebook.encode(made.k, made.centroids)[..., 0]
    for r, length in enumerate(made.lengths):
        assert torch.equal(made.near[0][r, :, length], made.k[r, :, 0])
        assert torch.equal(made.near[1][r, :, length], made.v[r, :, 0])
        assert torch.equal(made.codes[r, :, length - made.n_sink].view(2, made.m).long(), codes[r])
    assert all(near.count_nonzero() <= 2 * 2 * made.d for near in made.near)  # nothing else was written
    expected = codebook.tables(made.q, made.centroids) * made.scaling
    torch.testing.assert_close(tables.permute(0, 1, 3, 4, 2), expected, rtol=1e-4, atol=1e-5)


def test_tokens_go_to_the_host_and_wrap_around_a_ring():
    made = Made(2, 2, 1, 2, 3, 8, 100, 10, 6)
    ring = tuple(torch.zeros(2, 2, 16, made.d, device=DEVICE) for _ in range(2))
    pinned = {"pin_memory": True} if DEVICE.type == "cuda" else {}
    far = tuple(torch.zeros(2, 2, 128, made.d, **pinned) for _ in range(2))
    triton_codes.enter(made.k, made.v, ring, 16, made.cursor, made.plan, far=far, n_sink=made.n_sink)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for r, length in enumerate(made.lengths):
        for new, near, host in zip((made.k, made.v), ring, far, strict=True):
            assert torch.equal(near[r, :, length % 16], new[r, :, 0])
            assert torch.equal(host[r, :, length - made.n_sink], new[r, :, 0].cpu())


def test_the_histogram_follows_the_candidates():
    made = Made(1, 2, 1, 2, 2, 8, 60, 10, 6)
    counted = triton_codes.histogram(made.codes, made.cursor, made.plan, made.n_sink, 2, 2, 4)
    for _ in range(4):
        triton_codes.enter(
            made.k, made.v, made.near, CAPACITY, made.cursor, made.plan, n_sink=made.n_sink, q=made.q,
            centroids=made.centroids, codes=made.codes, amount=counted,
        )  # fmt: skip
        made.cursor += 1
    assert torch.equal(counted, triton_codes.histogram(made.codes, made.cursor, made.plan, made.n_sink, 2, 2, 4))
    assert counted.sum().item() == 2 * (60 + 4 - 6 - 1 - made.n_sink)
    assert triton_codes.histogram(made.codes, made.cursor, made.plan, made.n_sink, 2, 2, 256) is None


@pytest.mark.parametrize("bits", [(2, 2), (2, 7)])
@pytest.mark.parametrize(("k", "expected"), [(20, [*range(33, 53)]), (30, [*range(3, 12), *range(33, 54)])])
def test_equal_codes_go_to_the_lower_position(bits, k, expected):
    made = Made(1, 1, 2, *bits, 8, 60, k, 6)
    made.codes.zero_()
    made.codes[0, 0, 30:] = 1  # positions from 33 on score higher, and all alike
    made.centroids[:, :, 0, 1], made.centroids[:, :, 0, 0] = made.q[:, :1, 0, :8] * 9, 0
    made.q[:, 1] = made.q[:, 0]
    assert made.hi == [54]
    assert made.select()[1][0, 0].tolist() == expected


def test_many_codes_are_ranked_by_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each of 131,072 tokens has a weight: a program per block of them, but for the last few counts."""
    from pqcache.device import triton_wide

    made = []
    monkeypatch.setattr(triton_wide, "prepared", lambda kernel, grid, **_: made.append((kernel, grid)))
    tokens, heads = 131_072, 8
    blocks = -(-tokens // triton_wide.BLOCK)
    assert blocks >= 32
    codes, rows = torch.zeros((1, 2 * heads, 16), dtype=torch.uint8), torch.zeros((1, 4), dtype=torch.int32)
    triton_wide.prepare_wide(1, heads, 4, 2, 256, codes, rows, rows, 32, blocks)
    assert made.pop() == (triton_wide._wide_level, (heads,))
    assert [grid for _, grid in made] == 6 * [(blocks, heads)]
    assert {kernel for kernel, _ in made} == {triton_wide._wide_sums, triton_wide._wide_weigh, triton_wide._wide_digits}
