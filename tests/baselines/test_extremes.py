"""Constants, zeros, fp16's largest numbers and single tokens: every quantizer decodes finite numbers, row by row."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baselines.gear import GEAR
from baselines.int8 import Int8
from baselines.kivi import KIVI
from baselines.zipcache import MiKV, ZipCache
from pqcache.selective import Budget
from tests.baselines.common import OneLayer

D, H, H_KV = 8, 4, 2
LIMIT = torch.finfo(torch.float16).max
KINDS = ["zero", "constant", "largest", "all largest", "one channel", "random"]
FIFTH = {"budget": Budget(ratio=0.2), "gap": 3}
QUANTIZERS: dict[str, Any] = {
    "int8": Int8(),
    "kivi": KIVI(group=4, residual=4),
    "gear": GEAR(residual=4),
    "gear-kivi": GEAR(bits=2, backbone="kivi", group=4, residual=4),
    "zipcache": ZipCache(**FIFTH),
    "zipcache-segment": ZipCache(**FIFTH, recompress="segment", scope="layer"),
    "zipcache-full": ZipCache(**FIFTH, norm="full", probes="recent"),
    "zipcache-token": ZipCache(**FIFTH, granularity="token"),
    "zipcache-group": ZipCache(**FIFTH, granularity="group", group=4),
    "mikv": MiKV(**FIFTH),
    "mikv-balancer": MiKV(**FIFTH, granularity="token", balancer=True),
}
cases = {
    "kinds": st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    "lengths": st.lists(st.integers(1, 30), min_size=1, max_size=3),
    "seed": st.integers(0, 10**6),
}


def numbers(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "one channel":
        x[..., 1:] = 0
    other = {"zero": x * 0, "constant": x * 0 + 3, "largest": x.sign() * LIMIT, "all largest": x * 0 + LIMIT}
    return other.get(kind, x).to(dtype)


def rows(kinds: tuple[str, str], lengths: list[int], dtype: torch.dtype, seed: int) -> list[list[torch.Tensor]]:
    """Each row's q, k, v (1, heads, length + 8, D), whatever stands beside it."""
    return [
        [numbers(kind, (1, heads, s + 8, D), dtype, seed + 10 * r + i) for i, (kind, heads) in enumerate(parts)]
        for r, s in enumerate(lengths)
        for parts in [((kinds[0], H), (kinds[1], H_KV), (kinds[1], H_KV))]
    ]


def decoded(method: Any, parts: list[list[torch.Tensor]], lengths: list[int]) -> list[torch.Tensor]:
    """Outputs of eight steps after a left-padded prompt, per row (8, H, D)."""
    n, t = len(lengths), max(lengths)
    q, k, v = (torch.zeros(n, heads, t, D, dtype=parts[0][0].dtype) for heads in (H, H_KV, H_KV))
    for r, (own, s) in enumerate(zip(parts, lengths, strict=True)):
        q[r, :, t - s :] = own[0][0, :, :s]  # queries are right-aligned, staged keys left-aligned
        k[r, :, :s], v[r, :, :s] = own[1][0, :, :s], own[2][0, :, :s]
    one = OneLayer(method, k, v, H, lengths, q)
    outs = []
    for i in range(8):
        new = [
            torch.cat([own[j][:, :, s + i : s + i + 1] for own, s in zip(parts, lengths, strict=True)])
            for j in range(3)
        ]
        outs.append(one.step(*new)[:, 0])
    for x in one.layer.store.view():
        assert x.isfinite().all()
    return list(torch.stack(outs, 1))


@pytest.mark.parametrize("name", QUANTIZERS)
@settings(max_examples=5, deadline=None)
@given(**cases)
@example(kinds=("zero", "largest"), dtype=torch.float32, lengths=[1], seed=0)  # codes of 255 before an exact tail
def test_quantizers(name: str, kinds: tuple[str, str], dtype: torch.dtype, lengths: list[int], seed: int) -> None:
    parts = rows(kinds, lengths, dtype, seed)
    together = decoded(QUANTIZERS[name], parts, lengths)
    for r, s in enumerate(lengths):
        assert together[r].isfinite().all()
        alone = decoded(QUANTIZERS[name], parts[r : r + 1], [s])[0]
        if kinds[0] not in ("largest", "all largest"):  # there a rounding of a logit is more than any logit elsewhere
            rtol = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(together[r].float(), alone.float(), rtol=rtol, atol=rtol)
