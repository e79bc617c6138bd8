"""Which models and attention kernels the interface supports; everything else is refused before it starts."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_flash_attn_2_available

from pqcache.kernels.scaling import capped, is_plain, sinks_of, token_share
from pqcache.selective.attention import attend_exactly
from pqcache.selective.shape import BOTH, NOTHING, STATE, NotApplicable, attending, windows

ATTN = ("auto", "sdpa", "flash_attention_2", "standard")
KERNELS = ("torch", "auto")  # what computes decode steps on a CUDA device

# Configuration fields whose presence means attention that softmax(q k) v over a subset does not reproduce.
_REFUSED = {
    "index_topk": "an indexer that selects what each query attends to",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share their KV cache",
}
_ABSOLUTE = "absolute position embeddings; only rotary ones are supported"
_ALIBI = "ALiBi biases of the attention scores; only rotary position embeddings are supported"
CLOSED = "attention of its own, which transformers' AttentionInterface cannot replace"
_STATE = "a recurrent state in place of a KV cache"
# Families whose code differs and whose configuration does not say so.
_FAMILIES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "ctrl", "opt", "xglm", "biogpt"), _ABSOLUTE),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(("falcon", "gptj", "codegen"), CLOSED),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _STATE),
    "minimax": "a class of caches of its own",
    "zamba2": "attention modules that several layers share",
    "diffllama": "differential attention",
    "mimo_v2_flash": "layers that differ in their number of KV heads",
    "doge": "masks that its layers compute",
}
_SERVED = {"full_attention", "sliding_attention", *BOTH, *STATE, *NOTHING}  # types of layers

WITH_SINKS = ("gpt_oss", "granite_swa")  # a learned logit per head in every softmax


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise ValueError, one line, if the model's attention cannot be served exactly.

    What the configuration says. `attach.check_config` and `attach` also look at the model's modules.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model {config.model_type}: an encoder with a decoder; only models of one decoder are supported"
        )
    config = config.get_text_config(decoder=True)
    if what := _FAMILIES.get(config.model_type):
        raise ValueError(f"model {config.model_type}: not supported: {what}")
    for key, what in _REFUSED.items():
        if getattr(config, key, None):
            raise ValueError(f"model {config.model_type}: {what} ({key}={getattr(config, key)}) is not supported")
    kinds = set(getattr(config, "layer_types", None) or ()) - _SERVED
    if kinds:
        raise ValueError(f"model {config.model_type}: layers of type {', '.join(sorted(kinds))} are not supported")
    if not attending(config):
        raise ValueError(f"model {config.model_type}: not supported: {_STATE}")


def unrotated(config: PreTrainedConfig) -> bool:
    """Whether no layer rotates its keys or has another position embedding: other layers know the order of tokens."""
    if config.model_type == "olmo_hybrid":
        return not (config.rope_parameters or {}).get("rope_theta")
    own = config.model_type == "granitemoehybrid" and config.position_embedding_type != "rope"
    return own or config.model_type in ("jamba", "kimi_linear", "nemotron_h")


def check_rotated(config: PreTrainedConfig, what: str) -> None:
    """Raise NotApplicable if some layers do not rotate their keys: for methods that rotate keys or queries themselves.

    what: names the method or the option in the message.
    """
    rotates = getattr(config, "no_rope_layers", None)  # SmolLM 3: 1 where a layer does
    if getattr(config, "kv_lora_rank", None):
        raise NotApplicable(f"{what}: rotates keys or queries itself, and latent attention rotates a part of a head")
    some = unrotated(config) or (rotates is not None and not all(rotates))
    if some or config.model_type == "cohere2" or (config.model_type == "exaone4" and config.sliding_window is not None):
        raise NotApplicable(f"{what}: rotates keys or queries itself, and some layers of {config.model_type} do not")


def accelerator(kernels: str, device: torch.device, dtype: torch.dtype | None) -> Any:
    """What does decode steps in the place of layers, for kernels = torch | auto: `substitute_for` and `attend_packed`.

    None: torch does everything, and nothing of pqcache.device is imported.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels}: allowed is {' or '.join(KERNELS)}")
    if kernels == "torch":
        return None
    from pqcache.device import serves

    if dtype is None or not serves(device, dtype):
        text = f"kernels=auto: no kernel serves a model on {device} in {str(dtype)[6:]} here, torch does everything"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None
    from pqcache.device import step

    return step


def sliding_window(config: PreTrainedConfig) -> int | None:
    """The window of a model whose layers all slide: up to so many tokens they are layers of full attention. None: no limit."""
    every = windows(config)
    own = [every[place] for place in attending(config)]
    return None if None in own else own[0]


def standard_probabilities(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """The whole softmax: q (n, h, t, d), k (n, h_kv, m, d), mask (n, 1, t, m) bool or None = causal -> (n, h, t, m)."""
    n, h, t, d = q.shape
    logits = (q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.transpose(-1, -2)).view(n, h, t, -1) * scaling
    logits = capped(logits, scaling)
    if mask is None and t > 1:
        mask = torch.ones((t, k.shape[2]), dtype=torch.bool, device=q.device).tril(k.shape[2] - t)
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    logits = logits.to(torch.promote_types(q.dtype, torch.float32))
    probs = logits.softmax(-1)
    return (probs if sinks_of(scaling) is None else probs * token_share(logits.logsumexp(-1), scaling)).to(q.dtype)


def weighted_values(probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Probabilities (n, h, t, m) of values v (n, h_kv, m, d): (n, t, h, d)."""
    n, h, t, _ = probs.shape
    out = probs.unflatten(1, (v.shape[1], -1)).flatten(2, 3) @ v
    return out.view(n, h, t, -1).transpose(1, 2)


def standard_attention(module, q, k, v, mask, scaling, **kwargs):
    return weighted_values(standard_probabilities(q, k, mask, scaling), v), None


def dense_attention(module, q, k, v, mask, scaling, **kwargs):
    """transformers' sdpa; exact torch where the model caps its scores or has attention sinks, which sdpa does not know."""
    if is_plain(scaling):
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **kwargs)
    seen = mask if mask is None or mask.dtype == torch.bool else mask == 0  # of an additive one
    return attend_exactly(q, k, v, seen, scaling), None


def attention_kernel(attn: str) -> tuple[str, Callable]:
    """The name and function of the dense attention that prefill runs, for attn = auto | sdpa | flash_attention_2 | standard.

    standard: holds the whole matrix of probabilities, as the released code of methods that need its column sums does. For
    comparisons.
    """
    if attn not in ATTN:
        raise ValueError(f"attn={attn}: allowed is {', '.join(ATTN)}")
    if attn == "flash_attention_2" and not is_flash_attn_2_available():
        raise ValueError("attn=flash_attention_2: flash-attn is not installed or there is no CUDA device")
    if attn == "standard":
        return "standard", standard_attention
    if attn == "sdpa" or not is_flash_attn_2_available():
        return "sdpa", dense_attention
    flash = AttentionInterface()["flash_attention_2"]

    def kernel(module, q, k, v, mask, **kwargs):
        # flash-attn takes no 4-D mask, no fp32 and one head size: those blocks (padding, chunks) go to sdpa
        if mask is not None or q.dtype == torch.float32 or q.shape[3] != v.shape[3] or not is_plain(kwargs["scaling"]):
            return dense_attention(module, q, k, v, mask, **kwargs)
        return flash(module, q, k, v, None, is_causal=True, **kwargs)

    return "flash_attention_2", kernel
