"""The asymmetric uniform quantizer: the primitive of every codec."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Quantized(NamedTuple):
    """codes uint8; step and low fp16, broadcastable to the codes: x is about codes * step + low."""

    codes: torch.Tensor
    step: torch.Tensor
    low: torch.Tensor


def quantize(x: torch.Tensor, bits: int, dim: int | tuple[int, ...] = -1) -> Quantized:
    """Quantize x with one (step, low) per slice along `dim` (kept as size 1): codes in [0, 2^bits - 1], bits <= 8.

    step = (max - min) / (2^bits - 1); code = round((x - low) / step), half to even. The parameters are rounded to fp16
    before the codes are computed, so that quantizer and dequantizer agree; a slice whose step is zero there is stored as its
    minimum (codes 0) instead of dividing by zero. Parameters beyond fp16's range are clamped to it.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits}: allowed is 1..8")
    top = 2**bits - 1
    x32 = x.float()
    limit = torch.finfo(torch.float16).max
    low = x32.amin(dim, keepdim=True)
    step = ((x32.amax(dim, keepdim=True) - low) / top).clamp(max=limit).half()
    low = low.clamp(-limit, limit).half()
    safe = torch.where(step == 0, torch.ones_like(step), step).float()
    codes = ((x32 - low.float()) / safe).round().clamp(0, top)
    codes = torch.where(step == 0, torch.zeros_like(codes), codes)
    return Quantized(codes.to(torch.uint8), step, low)


def dequantize(packed: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """codes * step + low, computed in fp32."""
    return (packed.codes.float() * packed.step.float() + packed.low.float()).to(dtype)
