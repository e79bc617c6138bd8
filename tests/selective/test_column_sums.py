"""Blockwise column sums against the whole softmax matrix; padding, chunks, evicted keys, memory."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache import kernels
from pqcache.selective import column_sums
from pqcache.selective.column_sums import QueryWindow, add_column_sums
from tests.masks import causal_mask

REPO = Path(__file__).resolve().parents[2]


def inputs(n: int, h: int, h_kv: int, t: int, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(n, h, t, 8, generator=generator), torch.randn(n, h_kv, m, 8, generator=generator)


def naive(q: torch.Tensor, k: torch.Tensor, stored: list[int], counts: list[int], scaling: float) -> torch.Tensor:
    """The matrix of all probabilities, padded queries' rows set to 0, summed."""
    n, h, t, _ = q.shape
    m = k.shape[2]
    logits = (q @ k.repeat_interleave(h // k.shape[1], 1).transpose(2, 3)) * scaling
    past = [a - b for a, b in zip(stored, counts, strict=True)]
    seen = causal_mask(past, counts, t, m, q.device) & (torch.arange(m) < torch.tensor(stored)[:, None])[:, None, None]
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
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_equal_to_the_whole_matrix_for_any_block_padding_and_past(native: bool, data: st.DataObject) -> None:
    """Any block size, any left padding, any number of keys from before (chunks, or what an eviction left)."""
    n, h_kv, g = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    t = data.draw(st.integers(1, 20))
    counts = [data.draw(st.integers(0, t)) for _ in range(n)]
    stored = [max(1, count + data.draw(st.integers(0, 15))) for count in counts]
    q, k = inputs(n, h_kv * g, h_kv, t, max(stored) + data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_sums, "TILE", data.draw(st.integers(1, 40)))
        patch.setattr(column_sums, "TOGETHER", data.draw(st.sampled_from([0, 200, 1 << 20])))  # one KV head, some, all
        got = sums(q, k, stored, counts, data.draw(st.integers(1, 25)), native)
    torch.testing.assert_close(got, naive(q, k, stored, counts, 0.3), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.sum(-1), torch.tensor(counts, dtype=torch.float32)[:, None].expand(n, h_kv * g))


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    s=st.integers(1, 40),
    t=st.integers(1, 20),
    w=st.integers(1, 50),
    block=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, torch.float32]),  # plain torch, and the CPU's kernel
)
def test_queries_that_see_a_window_only(seed: int, s: int, t: int, w: int, block: int, dtype: torch.dtype) -> None:
    t = min(s, t)
    q, k = (x.to(dtype) for x in inputs(1, 4, 2, t, s, seed))
    sums = torch.zeros(1, 4, s, dtype=dtype)
    add_column_sums(sums, q, k, [s], [t], 0.3, block, windows=[w])
    at, j = torch.arange(s - t, s)[:, None], torch.arange(s)[None]
    probs = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(j > at, -torch.inf).softmax(-1)
    torch.testing.assert_close(sums, (probs * (at - j < w)).sum(2))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 20))
def test_chunks_add_up_and_the_window_survives_them(chunk: int, w: int, pad: int) -> None:
    s, rows = 30, [30, 30 - pad]
    q, k = inputs(2, 4, 2, s, s, 3)
    k[1] = torch.cat([k[1, :, pad:], torch.zeros(2, pad, 8)], 1)  # stored without its padding
    whole, parts = sums(q, k, rows, rows, 64), torch.zeros(2, 4, s)
    window, once = QueryWindow(w), QueryWindow(w)
    for start in range(0, s, chunk):
        stop = min(start + chunk, s)
        stored = [min(length, max(0, stop - (s - length))) for length in rows]
        counts = [min(stop - start, held) for held in stored]
        block = q[:, :, start:stop]
        add_column_sums(parts, block, k, stored, counts, 0.3)
        window.push(q[:, :, start:stop], counts)
    torch.testing.assert_close(parts, whole)
    once.push(q, rows)
    assert window.counts == once.counts == [min(w, length) for length in rows]
    torch.testing.assert_close(window.column_sums(k, rows, 0.3), once.column_sums(k, rows, 0.3))
    last = naive(q[:, :, -w:], k, rows, [min(w, length) for length in rows], 0.3)
    torch.testing.assert_close(once.column_sums(k, rows, 0.3), last)


def test_a_row_is_the_same_bits_alone() -> None:
    q, k = inputs(2, 4, 2, 40, 40, 5)
    both, alone = torch.zeros(2, 4, 40), torch.zeros(1, 4, 25)
    add_column_sums(both, q, k, [40, 25], [40, 25], 0.3, 16)
    add_column_sums(alone, q[1:, :, 15:], k[1:, :, :25], [25], [25], 0.3, 16)
    assert torch.equal(both[1:, :, :25], alone)


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


_LONG = r"""
import torch
import ctypes, re
from pqcache.measure.peak import peak_memory
from pqcache.selective.column_sums import add_column_sums
torch.set_num_threads(1)
s, w, d = 32768, 256, 128
q, k = torch.randn(1, 8, w, d), torch.randn(1, 2, s, d, dtype=torch.bfloat16)
sums = torch.zeros(1, 8, s)
add_column_sums(sums, q[:, :, :1], k, [64], [1], 0.1)
extra = []
for _ in range(3):
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would be used first, unseen
    before = int(re.search(r"VmRSS:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
    with peak_memory(q.device) as peak:
        add_column_sums(sums, q, k, [s], [w], 0.1, block=64)
    extra.append(peak.bytes - before)
print(min(extra))  # whatever else the process does only adds
"""


@pytest.mark.rest
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
def test_process_memory_at_32k_is_one_block_of_one_group() -> None:
    """4 query heads x 64 queries x 32768 keys in fp32 are 32 MiB; all heads would be 64, all queries of the prompt 16 GiB."""
    block = 4 * 64 * 32768 * 4
    command = [sys.executable, "-c", _LONG]
    (one,) = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO).stdout.split()
    assert 0.9 * block < int(one) < 1.5 * block


@pytest.mark.gpu
def test_a_whole_layer_at_32k_on_the_gpu() -> None:
    s, g = 32768, 4
    q = torch.randn(1, 8, s, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2, s, 128, device="cuda", dtype=torch.bfloat16)
    sums = torch.zeros(1, 8, s, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_column_sums(sums, q, k, [s], [s], 128**-0.5)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * g * column_sums.BLOCK * s * 4
    torch.testing.assert_close(sums.sum(-1), torch.full_like(sums[..., 0], s), rtol=1e-4, atol=0)
