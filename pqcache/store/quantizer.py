"""The asymmetric uniform quantizer, its granularities, and codes packed into bytes: the primitives of every codec.

Granularity is which entries of x (n, h_kv, t, d) share one (step, low) pair:

    tokenwise           quantize(x, bits, dim=(1, 3))                  all channels of a token, KV heads jointly
    tokenwise per head  quantize(x, bits, dim=3)
    channelwise         quantize(x, bits, dim=2)                       one channel over all tokens
    groupwise(G)        quantize(x.unflatten(-1, (-1, G)), bits)       G consecutive channels of a token
                        quantize(x.unflatten(2, (-1, G)), bits, dim=3) G consecutive tokens of a channel
    channel-separable   quantize(x / c, bits, dim=(1, 3)), decoded times c, c = sqrt(max |x|) of a channel over its tokens
"""

from typing import NamedTuple

import torch

LIMIT = torch.finfo(torch.float16).max


class Quantized(NamedTuple):
    """codes uint8; step and low fp16, broadcastable to the codes: x is about codes * step + low."""

    codes: torch.Tensor
    step: torch.Tensor
    low: torch.Tensor


def parameters(x: torch.Tensor, bits: int, dim: int | tuple[int, ...] = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, low), fp16, of each slice of x along `dim` (kept as size 1): low = min, step = (max - min) / (2^bits - 1).

    Values beyond fp16's range are clamped.
    """
    x = x.float()
    return from_range(x.amin(dim, keepdim=True), x.amax(dim, keepdim=True), bits)


def from_range(low: torch.Tensor, high: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, low), fp16, of the ranges [low, high]; an empty range (low > high) gives (0, 0)."""
    empty = low > high
    low, high = low.masked_fill(empty, 0).clamp(-LIMIT, LIMIT), high.masked_fill(empty, 0).clamp(-LIMIT, LIMIT)
    return ((high - low) / (2**bits - 1)).clamp(max=LIMIT).half(), low.half()


def encode(x: torch.Tensor, step: torch.Tensor, low: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of x under given parameters, uint8: round((x - low) / step), half to even, clipped to [0, 2^bits - 1].

    Where the step is zero (a constant slice, or a range that fp16 cannot tell from one) the code is 0, which decodes to low.
    """
    flat = step == 0
    codes = x.float() - low.float()  # the only copy: a prompt's pages would be mapped anew for each
    codes.div_(step.float().masked_fill(flat, 1)).round_().clamp_(0, 2**bits - 1)
    return codes.masked_fill_(flat, 0).to(torch.uint8)


def quantize(x: torch.Tensor, bits: int, dim: int | tuple[int, ...] = -1) -> Quantized:
    """Quantize x with one (step, low) per slice along `dim`: codes in [0, 2^bits - 1], bits <= 8.

    The parameters are rounded to fp16 before the codes are computed, so that quantizer and dequantizer agree.
    """
    step, low = parameters(x, bits, dim)
    return Quantized(encode(x, step, low, bits), step, low)


def dequantize(packed: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """codes * step + low, computed in fp32."""
    return finite(packed.codes.float().mul_(packed.step.float()).add_(packed.low.float()), dtype)


def finite(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as `dtype`, clamped for fp16: a value at the edge of its range may decode half a step beyond, which would be inf."""
    return x.clamp(-LIMIT, LIMIT).half() if dtype == torch.float16 else x.to(dtype)


def packed_width(d: int, bits: int) -> int:
    """Bytes of d packed codes: whole codes per byte if `bits` divides 8, else `bits` bytes per eight codes."""
    per_byte = 8 // bits
    return -(-d // per_byte) if per_byte * bits == 8 else -(-d // 8) * bits


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes (..., d) below 2^bits -> uint8 (..., packed_width(d, bits)), the first code in the lowest bits."""
    width = packed_width(codes.shape[-1], bits)
    if bits == 8:
        return codes
    count, size = (8 // bits, 1) if 8 % bits == 0 else (8, bits)  # codes per word, bytes per word
    codes = torch.nn.functional.pad(codes, (0, width // size * count - codes.shape[-1])).unflatten(-1, (-1, count))
    word = torch.zeros(codes.shape[:-1], dtype=torch.uint8 if size == 1 else torch.int64, device=codes.device)
    for i in range(count):
        word |= codes[..., i].to(word.dtype) << (bits * i)
    if size == 1:
        return word
    return torch.stack([word >> (8 * i) & 255 for i in range(size)], -1).to(torch.uint8).flatten(-2)


def unpack_codes(packed: torch.Tensor, bits: int, d: int) -> torch.Tensor:
    """The inverse of pack_codes: uint8 (..., d)."""
    if bits == 8:
        return packed
    count, size = (8 // bits, 1) if 8 % bits == 0 else (8, bits)
    word = packed
    if size > 1:
        word = torch.zeros((*packed.shape[:-1], packed.shape[-1] // size), dtype=torch.int64, device=packed.device)
        for i in range(size):
            word |= packed[..., i::size].to(torch.int64) << (8 * i)
    codes = torch.stack([word >> (bits * i) & (2**bits - 1) for i in range(count)], -1)
    return codes.to(torch.uint8).flatten(-2)[..., :d]


def popcount(x: torch.Tensor) -> torch.Tensor:
    """Ones in each byte of x (uint8): uint8, same shape. Sums neighbouring bits, pairs and nibbles in parallel."""
    x = x - ((x >> 1) & 0x55)
    x = (x & 0x33) + ((x >> 2) & 0x33)
    return (x + (x >> 4)) & 0x0F
