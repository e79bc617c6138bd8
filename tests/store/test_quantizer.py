"""The quantizer's bounds, its granularities and the packing of codes."""

import pytest
import torch

from pqcache.store.quantizer import LIMIT, Quantized, dequantize, pack_codes, packed_width, quantize, unpack_codes
from tests.drawn import Pick, examples
from tests.thin import thin

# how the axes of (n, h_kv, t, d) are cut: a view of x, and the axes that share one (step, low)
GRANULARITIES = {
    "token": (lambda x: x, (1, 3)),
    "token per head": (lambda x: x, 3),
    "channel": (lambda x: x, 2),
    "group of channels": (lambda x: x.unflatten(-1, (-1, 4)), 4),
    "group of tokens": (lambda x: x.unflatten(2, (-1, 4)), 3),
}


def draw(seed: int, shape: tuple[int, ...] = (2, 3, 12, 8), scale: float = 1.0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * scale * (1 + 20 * torch.rand(shape[-1], generator=torch.Generator().manual_seed(seed + 1)))


def bound(packed: Quantized, bits: int) -> torch.Tensor:
    """Half a step, and what rounding low and step to fp16 may add: half a unit in the last place, of small ones 2**-25."""
    low, step = (x.float().abs() for x in (packed.low, packed.step))
    rounding = (low * 2**-11).clamp_min(2**-25) + (2**bits - 1) * (step * 2**-11).clamp_min(2**-25)
    return step * (0.5 + 1e-5) + rounding + 1e-7


@examples(30)
def test_error_is_at_most_half_a_step(pick: Pick) -> None:
    seed, bits, granularity = pick.seed, pick([1, 2, 3, 4, 8]), pick(list(GRANULARITIES))
    scale = pick([1e-3, 1.0, 100.0])
    cut, dim = GRANULARITIES[granularity]
    x = cut(draw(seed, scale=scale))
    packed = quantize(x, bits, dim)
    back = dequantize(packed, torch.float32)
    assert ((back - x).abs() <= bound(packed, bits)).all()
    low, step = (part.float().amin(dim) for part in (packed.low, packed.step))
    fine = low.abs() * 2**-11 < 0.5 * step  # else rounding low to fp16 may move it by more than half a step
    assert torch.equal(back.amin(dim)[fine], low[fine])  # the smallest value is reproduced as stored
    top = (back.amax(dim) - x.amax(dim)).abs()
    assert (top <= bound(packed, bits).amax(dim)).all()


@examples(60)
def test_codes_survive_packing(pick: Pick) -> None:
    bits, d, seed = pick(1, 8), pick(1, 70), pick.seed
    codes = torch.randint(0, 2**bits, (2, 3, d), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_width(d, bits))
    assert torch.equal(unpack_codes(packed, bits, d), codes)


def test_packed_widths() -> None:
    assert [packed_width(128, bits) for bits in (1, 2, 3, 4, 8)] == [16, 32, 48, 64, 128]
    assert [packed_width(5, bits) for bits in (1, 2, 3, 4, 8)] == [1, 2, 3, 3, 5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bits", thin([1, 2, 4, 8], 2))
def test_edge_values(dtype: torch.dtype, granularity: str, bits: int) -> None:
    cut, dim = GRANULARITIES[granularity]
    for value in (0.0, 1.0, -3.5, 2.0**-20, LIMIT, -LIMIT):
        x = cut(torch.full((2, 2, 4, 4), value).to(dtype))
        back = dequantize(quantize(x, bits, dim), dtype)
        expected = x.float().clamp(-LIMIT, LIMIT).to(dtype)  # bfloat16 rounds the limit up
        assert torch.equal(back, expected), value  # a constant slice is exact
    x = torch.full((2, 2, 4, 4), LIMIT)
    x[..., ::2] = -LIMIT
    x[:, :, ::3] *= -1
    assert dequantize(quantize(cut(x.to(dtype)), bits, dim), dtype).isfinite().all()
    assert dequantize(quantize(cut(torch.full((1, 1, 4, 4), 1e38)), bits, dim), torch.float16).isfinite().all()
