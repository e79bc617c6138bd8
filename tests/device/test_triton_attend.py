"""Triton's attention against plain torch: on a CUDA device if there is one, else through Triton's interpreter."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.selective.attention import attend_one

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)
from pqcache.device import triton_attend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def reference(q, k, v, every, scaling):
    """Row by row and KV head by KV head in fp32: `every` (n, h_kv) lists of positions."""
    n, h_kv = k.shape[:2]
    g = q.shape[1] // h_kv
    out = torch.empty(n, 1, q.shape[1], q.shape[3])
    for r in range(n):
        for head in range(h_kv):
            query = q[r : r + 1, head * g : head * g + g].float().cpu()
            keys, values = (x[r, head, every[r][head]].float().cpu()[None, None] for x in (k, v))
            out[r, 0, head * g : head * g + g] = attend_one(query, keys, values, scaling)[0, 0]
    return out


@settings(max_examples=6, deadline=None)
@given(
    n=st.integers(1, 2),
    h_kv=st.integers(1, 2),
    g=st.sampled_from([1, 3, 4]),
    d=st.sampled_from([8, 24, 64]),
    length=st.integers(12, 400),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    scale=st.sampled_from([1.0, 20.0]),
    seed=st.integers(0, 99),
)
def test_sinks_chosen_and_recent(n, h_kv, g, d, length, dtype, scale, seed):
    gen = torch.Generator().manual_seed(seed)
    capacity = length + 40
    k, v = (torch.randn(n, h_kv, capacity, d, generator=gen).to(dtype).to(DEVICE) for _ in range(2))
    q = (torch.randn(n, h_kv * g, 1, d, generator=gen) * scale).to(dtype).to(DEVICE)
    sinks, local = 3, max(1, length // 6)
    lengths = [length - r for r in range(n)]  # the new token included
    counts = [max(1, (length - sinks - local - 3) // 2 - r) for r in range(n)]
    hi = [m - 1 - local for m in lengths]
    required = [min(count, h - sinks) for count, h in zip(counts, hi, strict=True)]
    indices = torch.zeros(n, h_kv, max(required), dtype=torch.int32)
    every = []
    for r in range(n):
        rows = []
        for head in range(h_kv):
            pick = torch.randperm(hi[r] - sinks, generator=gen)[: required[r]].sort().values + sinks
            indices[r, head, : required[r]] = pick.int()
            rows.append([*range(sinks), *pick.tolist(), *range(lengths[r] - local - 1, lengths[r])])
        every.append(rows)
    indices = indices.to(DEVICE)
    cursor = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1
    plan = torch.tensor([[sinks, count, local, 0] for count in required], dtype=torch.int32, device=DEVICE)
    scaling = d**-0.5
    expected = reference(q, k, v, every, scaling)
    common = {"ring": capacity, "tokens": length, "scaling": scaling}
    whole = triton_attend.attend(q, (k, v), (k, v), (k, v), indices, cursor, plan, one=True, **common)
    assert whole.dtype == dtype
    torch.testing.assert_close(whole.float().cpu(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])

    # the same from a host store: sinks, rows in order as a block cache hands them over, or read in pinned memory, a ring
    pin = (lambda x: x.cpu().pin_memory()) if DEVICE.type == "cuda" else (lambda x: x)
    far = tuple(pin(x[:, :, sinks:].contiguous()) for x in (k, v))
    fetched = tuple(torch.zeros(n, h_kv, max(required), d, dtype=dtype, device=DEVICE) for _ in range(2))
    for r in range(n):
        for head in range(h_kv):
            for x, to in zip((k, v), fetched, strict=True):
                to[r, head, : required[r]] = x[r, head, indices[r, head, : required[r]].long()]
    size = local + 7
    ring = tuple(torch.full((n, h_kv, size, d), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    for r in range(n):
        for position in range(lengths[r] - local - 1, lengths[r]):
            for x, to in zip((k, v), ring, strict=True):
                to[r, :, position % size] = x[r, :, position]
    first = tuple(x[:, :, :sinks].contiguous() for x in (k, v))
    common["ring"] = size
    split = triton_attend.attend(q, first, fetched, ring, None, cursor, plan, **common)
    torch.testing.assert_close(split.float().cpu(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    direct = triton_attend.attend(q, first, far, ring, indices, cursor, plan, n_sink=sinks, **common)
    torch.testing.assert_close(direct.float().cpu(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_everything_and_the_cursor():
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, 300, 16, generator=gen).to(DEVICE) for _ in range(2))
    q = torch.randn(2, 6, 1, 16, generator=gen).to(DEVICE)
    cursor = torch.tensor([249, 99], dtype=torch.int32, device=DEVICE)
    plan = torch.tensor([[0, 0, 0, 1]] * 2, dtype=torch.int32, device=DEVICE)
    every = [[[*range(length)]] * 2 for length in (250, 100)]
    out = triton_attend.attend(
        q, (k, v), None, (k, v), None, cursor, plan, ring=300, tokens=300, scaling=0.25, one=True, advance=True
    )
    torch.testing.assert_close(out.cpu(), reference(q, k, v, every, 0.25), rtol=2e-5, atol=2e-5)
    assert cursor.tolist() == [250, 100]
