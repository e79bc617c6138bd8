"""Which models and attention kernels the interface supports; everything else is refused before it starts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_2_available

ATTN = ("auto", "sdpa", "flash_attention_2")

# Configuration fields whose presence means attention that softmax(q k) v over a subset does not reproduce.
_REFUSED = {
    "attn_logit_softcapping": "soft-capped attention logits",
    "kv_lora_rank": "latent (MLA) attention",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share their KV cache",
}


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise ValueError, one line, if the model's attention cannot be served exactly."""
    for key, what in _REFUSED.items():
        if getattr(config, key, None):
            raise ValueError(f"model {config.model_type}: {what} ({key}={getattr(config, key)}) is not supported")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(f"model {config.model_type}: layers of type {', '.join(sorted(kinds))} are not supported")


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Tokens up to which every layer of the model is a full-attention layer; None if there is no limit."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return window


def attention_kernel(attn: str) -> tuple[str, Callable]:
    """The name and function of the dense attention that prefill runs, for attn = auto | sdpa | flash_attention_2."""
    if attn not in ATTN:
        raise ValueError(f"attn={attn}: allowed is {', '.join(ATTN)}")
    if attn == "flash_attention_2" and not is_flash_attn_2_available():
        raise ValueError("attn=flash_attention_2: flash-attn is not installed or there is no CUDA device")
    if attn == "sdpa" or not is_flash_attn_2_available():
        return "sdpa", sdpa_attention_forward
    flash = AttentionInterface()["flash_attention_2"]

    def kernel(module, q, k, v, mask, **kwargs):
        # flash-attn takes no 4-D mask and no fp32: those blocks (padding, chunks) go to sdpa
        if mask is not None or q.dtype == torch.float32:
            return sdpa_attention_forward(module, q, k, v, mask, **kwargs)
        return flash(module, q, k, v, None, is_causal=True, **kwargs)

    return "flash_attention_2", kernel
