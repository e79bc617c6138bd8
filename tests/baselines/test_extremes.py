"""Constants, zeros, fp16's largest numbers and single tokens: every quantizer decodes finite numbers, row by row."""

from typing import Any

import pytest
import torch

from tests.baselines.coded_stores import METHODS, D
from tests.baselines.common import OneLayer

H, H_KV = 4, 2
LIMIT = torch.finfo(torch.float16).max
CASES = [  # queries, keys and values, dtype, lengths of the rows
    ("zero", "largest", torch.float32, [1]),  # codes of 255 before an exact tail
    ("random", "largest", torch.float16, [7, 30]),
    ("largest", "constant", torch.bfloat16, [30]),
    ("random", "zero", torch.float16, [1, 13, 29]),
    ("constant", "one channel", torch.bfloat16, [3, 20]),
    ("all largest", "all largest", torch.float32, [17]),
]


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


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.rest
def test_quantizers(name: str) -> None:
    for seed, (queries, keys, dtype, lengths) in enumerate(CASES):
        parts = rows((queries, keys), lengths, dtype, seed)
        together = decoded(METHODS[name], parts, lengths)
        for r, s in enumerate(lengths):
            assert together[r].isfinite().all()
            if len(lengths) > 1:
                alone = decoded(METHODS[name], parts[r : r + 1], [s])[0]
                rtol = 1e-4 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(together[r].float(), alone.float(), rtol=rtol, atol=rtol)
