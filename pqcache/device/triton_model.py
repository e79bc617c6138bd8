"""The model's own small operations for one token per row, a kernel each: RMSNorm, with the residual sum before it, and rotation.

transformers runs them as 6 to 8 kernels for a norm and 10 for the rotation of q and k. Here every operation is rounded where
transformers rounds it, so a result differs at most by the order in which a norm's fp32 squares are added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pqcache.device.switch import power_of_2, prepared


@triton.jit
def _norm(x, add, weight, total, out, eps, D: tl.constexpr, DIMS: tl.constexpr, ADD: tl.constexpr):
    """Program = row: RMSNorm of x, or of x + add, which becomes `total`. All (rows, D), dense, of one dtype; weight (D,)."""
    start = tl.program_id(0).to(tl.int64) * D
    inside = tl.arange(0, DIMS)
    real = inside < D
    own = tl.load(x + start + inside, mask=real, other=0.0).to(tl.float32)
    if ADD:
        both = own + tl.load(add + start + inside, mask=real, other=0.0).to(tl.float32)
        rounded = both.to(total.dtype.element_ty)
        tl.store(total + start + inside, rounded, mask=real)
        own = rounded.to(tl.float32)
    variance = tl.sum(own * own, 0) / D
    normed = (own * tl.rsqrt(variance + eps)).to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + inside, mask=real, other=0.0).to(tl.float32)
    tl.store(out + start + inside, scaled.to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotate(
    q, k, cos, sin, out_q, out_k, step,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Program = (row, query or KV head): x cos + rotate_half(x) sin. q (n, H, D), k (n, H_KV, D); cos, sin at row * step."""
    task = tl.program_id(0).to(tl.int64)
    row, head = task // (H + H_KV), task % (H + H_KV)
    inside = tl.arange(0, DIMS)
    real = inside < D
    first = inside < D // 2
    other = tl.where(first, inside + D // 2, inside - D // 2)
    source, to = q + (row * H + head) * D, out_q + (row * H + head) * D
    if head >= H:
        source, to = k + (row * H_KV + head - H) * D, out_k + (row * H_KV + head - H) * D
    dtype = out_q.dtype.element_ty
    x = tl.load(source + inside, mask=real, other=0.0).to(tl.float32)
    half = tl.load(source + other, mask=real, other=0.0).to(tl.float32)
    half = tl.where(first, -half, half)
    a = x * tl.load(cos + row * step + inside, mask=real, other=0.0).to(tl.float32)
    b = half * tl.load(sin + row * step + inside, mask=real, other=0.0).to(tl.float32)
    tl.store(to + inside, (a.to(dtype).to(tl.float32) + b.to(dtype).to(tl.float32)).to(dtype), mask=real)


class Sizes(NamedTuple):
    """What the kernels are made for."""

    rows: int
    hidden: int  # numbers of a hidden state
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class ModelParts:
    """The operations for one token of each of `rows` rows. Launches go to the current device, which must be the tensors' own."""

    def __init__(self, sizes: Sizes) -> None:
        n, hidden, h, h_kv, d, dtype, device = self.sizes = sizes
        # two roundings, as two kernels would make: no multiplication is fused with an addition
        how = {
            "D": hidden,
            "DIMS": power_of_2(hidden),
            "num_warps": 8 if hidden > 2048 else 4,
            "enable_fp_fusion": False,
        }
        self._norm = prepared(_norm, (n,), ADD=False, **how)
        self._add_norm = prepared(_norm, (n,), ADD=True, **how)
        self._rotate = prepared(
            _rotate, (n * (h + h_kv),), H=h, H_KV=h_kv, D=d, DIMS=power_of_2(d), num_warps=1, enable_fp_fusion=False
        )
        self.q_shape, self.k_shape = (n, h, 1, d), (n, h_kv, 1, d)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of x (n, 1, hidden)."""
        out = torch.empty_like(x)
        self._norm(x, x, weight, out, out, eps)
        return out

    def add_norm(
        self, x: torch.Tensor, add: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + add, and its RMSNorm. Both (n, 1, hidden)."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._add_norm(x, add, weight, total, out, eps)
        return total, out

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q (n, 1, h * d) and k (n, 1, h_kv * d), rotated as the model does: (n, h, 1, d), (n, h_kv, 1, d).

        cos, sin (1 or n, 1, d), dense.
        """
        out_q = torch.empty(self.q_shape, dtype=q.dtype, device=q.device)
        out_k = torch.empty(self.k_shape, dtype=k.dtype, device=k.device)
        self._rotate(q, k, cos, sin, out_q, out_k, 0 if cos.shape[0] == 1 else cos.stride(0))
        return out_q, out_k
