"""Rotary positions outside the model's own forward: rotate, un-rotate, tables for other positions, plain queries.

The rotation is the model's own function, found in the file that defines its attention, so partial and interleaved
variants (GLM, Phi-3) need no case here.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def _rotation(module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The model family's apply_rotary_pos_emb(q, k, cos, sin)."""
    return sys.modules[type(module).__module__].apply_rotary_pos_emb


def rotate(module: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (n, heads, t, d) rotated by cos, sin (n or 1, t, rotary) as `module`'s attention would."""
    no_heads = x[:, :0]  # the model's function rotates queries and keys: here it has one of them
    return _rotation(module)(x, no_heads, cos, sin)[0]


def unrotate(module: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`. Some families scale cos and sin by a factor a (attention scaling): R(-t) then leaves a^2."""
    back = rotate(module, x, cos, -sin)
    scale = (cos[..., :1] ** 2 + sin[..., :1] ** 2).unsqueeze(1)
    # 1 for the dimensions of a head that pass through: cos may have an entry per dimension that is rotated, or per pair (GPT-OSS)
    still = rotate(module, torch.ones_like(x[:1, :1, :1]), torch.zeros_like(cos[:1, :1]), torch.zeros_like(sin[:1, :1]))
    return torch.where(still == 1, back, back / scale)


def tables(
    rotary: Callable[..., Any], like: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin for `position_ids` (n, t) in dtype and on the device of `like`, from the model's own rotary embedding."""
    cos, sin = rotary(like, position_ids=position_ids)
    return cos.to(like.device), sin.to(like.device)  # the embedding may be on another device than the layer


def project_query(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Query heads before RoPE, (n, h, t, d), of hidden states (n, t, D) under `module`'s weights.

    Handles a fused qkv projection (Phi-3), a query norm per head (Qwen3, LFM 2) or of all heads (OLMo 2), and a gate beside
    each head's query (Qwen3-Next).
    """
    d = module.head_dim
    if hasattr(module, "q_proj"):
        linear, width = module.q_proj, None
    else:
        linear, width = module.qkv_proj, module.config.num_attention_heads * d
    if _is_product(linear, hidden):
        q = _head_products(linear, hidden, width, d)
    else:
        q = linear(hidden)[..., :width]
    q = q.view(*hidden.shape[:-1], module.config.num_attention_heads, -1)[..., :d]
    if (norm := getattr(module, "q_norm", getattr(module, "q_layernorm", None))) is not None:
        q = norm(q) if norm.weight.numel() == d else norm(q.flatten(-2)).view_as(q)
    return q.transpose(1, 2)


def _is_product(linear: nn.Module, hidden: torch.Tensor) -> bool:
    """Whether `linear` is a plain matrix in fp32 on the CPU that nobody hooks into, and hidden (n, t, D) one token."""
    if type(linear) is not nn.Linear or hidden.shape[:2] != (1, 1):
        return False
    changed = linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__
    return not changed and linear.weight.device.type == "cpu" and linear.weight.dtype == hidden.dtype == torch.float32


def _head_products(linear: nn.Linear, hidden: torch.Tensor, width: int | None, d: int) -> torch.Tensor:
    """The first `width` outputs of `linear` for one token, hidden (1, 1, D): (heads, 1, d).

    One product per head of d entries: on some processors MKL reads one large matrix at two thirds of that rate.
    """
    weight = linear.weight[:width].unflatten(0, (-1, d))
    q = torch.bmm(hidden.expand(len(weight), -1, -1), weight.mT)
    return q if linear.bias is None else q + linear.bias[:width].view(-1, 1, d)
