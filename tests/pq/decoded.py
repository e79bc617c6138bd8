"""The keys that product-quantized codes stand for: the reference of scores."""

import torch


def decode(codes: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Keys that the codes (n, h_kv, m, t) stand for: (n, h_kv, t, d) fp32."""
    n, h_kv, m, _, sub = centroids.shape
    index = codes.long()[..., None].expand(-1, -1, -1, -1, sub)
    return centroids.float().gather(3, index).transpose(2, 3).reshape(n, h_kv, codes.shape[-1], m * sub)
