"""Constants, zeros, fp16's largest numbers and single tokens: every quantizer decodes finite numbers, row by row."""

from typing import Any

import pytest
import torch

from pqcache.store.codec import right_align
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


def decoded(method: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Outputs of eight steps after a prompt of rows of these lengths, (n, 8, H, D)."""
    s = max(lengths)
    one = OneLayer(method, k[:, :, :s], v[:, :, :s], H, lengths, right_align(q, [0] * len(lengths), lengths))
    outs = []
    for _ in range(8):
        ends = [length + 1 for length in one.lengths]
        outs.append(one.step(*(right_align(x, one.lengths, ends) for x in (q, k, v)))[:, 0])
    for x in one.layer.store.view():
        assert x.isfinite().all()
    return torch.stack(outs, 1)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.rest
def test_quantizers(name: str) -> None:
    for seed, (queries, keys, dtype, lengths) in enumerate(CASES):
        q, k, v = (
            numbers(kind, (len(lengths), heads, max(lengths) + 8, D), dtype, 10 * seed + i)
            for i, (kind, heads) in enumerate([(queries, H), (keys, H_KV), (keys, H_KV)])
        )
        together = decoded(METHODS[name], q, k, v, lengths)
        assert together.isfinite().all()
        rtol = 1e-4 if dtype == torch.float32 else 2e-2
        for r, s in enumerate(lengths) if len(lengths) > 1 else ():
            alone = decoded(METHODS[name], q[r : r + 1], k[r : r + 1], v[r : r + 1], [s])[0]
            torch.testing.assert_close(together[r].float(), alone.float(), rtol=rtol, atol=rtol)
