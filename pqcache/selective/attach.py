"""Bind a SelectiveCache to a stock transformers model, for as long as a `with` block lasts.

transformers hands the attention function q, k, v and the mask, but neither the cache nor the hidden states. A forward
pre-hook on each attention module notes them just before; the one attention function then routes to the cache's layer.

A pass that is asked for the last token's logits only (`logits_to_keep=1`, as `generate` does it) needs nothing else of its last
layer: there attention, output projection and MLP are computed for that token alone. Keys and values are those of all tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pqcache.selective.cache import SelectiveCache
from pqcache.selective.layer import LayerContext
from pqcache.selective.support import check_architecture

NAME = "pqcache_selective"  # a name with "flash" or "/" would be taken for a hub kernel
_CONTEXT = "_pqcache_context"
MORE = ("labels", "output_hidden_states", "output_attentions", "output_router_logits")  # asked for, every row is needed


def selective_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls: query (n, h, t, d), key and value (n, h_kv, t, d) of the new block."""
    ctx: LayerContext | None = module.__dict__.pop(_CONTEXT, None)
    if ctx is None:  # another cache, or none: an ordinary forward pass
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("soft-capped logits and attention sinks of the model are not supported")
    ctx.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ctx.cache.layers[ctx.layer_idx].attend(query, key, value, attention_mask, ctx), None


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The self-attention modules of the decoder, in layer order."""
    layers = getattr(model.get_decoder(), "layers", None)
    modules = [getattr(layer, "self_attn", None) for layer in layers or ()]
    if not modules or any(m is None or not hasattr(m, "layer_idx") for m in modules):
        raise ValueError(f"model {model.config.model_type}: no decoder layers with `self_attn` found")
    if any(getattr(m, "sinks", None) is not None for m in modules):
        raise ValueError(f"model {model.config.model_type}: attention sinks of the model are not supported")
    return modules  # type: ignore[return-value]


def after_attention(decoder: nn.Module, attention: nn.Module) -> list[nn.Module]:
    """What the last decoder layer computes token by token after its attention; of fewer tokens it gives fewer rows.

    The layer adds such a row to all rows of its residual: the last one is right, the others are of no meaning.
    """
    found = (getattr(attention, "o_proj", None), getattr(decoder.layers[-1], "mlp", None))  # type: ignore[index]
    return [module for module in found if module is not None]


@contextmanager
def attach(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let `model` work with SelectiveCache inside the block; other caches keep working. Nesting is allowed.

    Works through model(...), model.generate(...) and anything built on them. Leaves no hook and no setting behind.
    Raises ValueError for models whose attention is not supported.
    """
    if model.config._attn_implementation == NAME:
        yield model
        return
    check_architecture(model.config.get_text_config(decoder=True))
    modules = attention_modules(model)
    decoder = model.get_decoder()
    AttentionInterface.register(NAME, selective_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without a mask, padded and continued inputs are silently wrong

    def before_layer(module: nn.Module, args: tuple, kwargs: dict) -> None:
        module.__dict__.pop(_CONTEXT, None)  # of a pass that failed between here and the attention function
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, SelectiveCache):
            return
        cos, sin = kwargs["position_embeddings"]
        index: int = module.layer_idx  # type: ignore[assignment]
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        ctx = LayerContext(
            layer_idx=index,
            module=module,
            cache=cache,
            hidden=hidden,
            cos=cos,
            sin=sin,
            position_ids=kwargs.get("position_ids"),
            modules=modules,
            rotary=decoder.rotary_emb,
            step=cache.plan_step(hidden.shape[0], hidden.shape[1], kwargs.get("attention_mask")),
            last_only=cache.last_only and index == len(modules) - 1,
        )
        module.__dict__[_CONTEXT] = ctx
        cache.bound = index
        cache.layers[index].on_layer_input(ctx)
        if index + 1 < len(modules):
            cache.layers[index + 1].on_previous_input(ctx)

    def before_logits(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if isinstance(cache := kwargs.get("past_key_values"), SelectiveCache):
            keep = kwargs.get("logits_to_keep")
            more = [kwargs.get(key, getattr(model.config, key, None)) for key in MORE]
            alone = isinstance(keep, int) and keep == 1 and all(x is None or x is False for x in more)
            cache.last_only = last_only[0] = alone and not cache.watchers

    def after_logits(_: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        last_only[0] = False
        if isinstance(cache := kwargs.get("past_key_values"), SelectiveCache):
            cache.last_only = False

    def before_tail(_: nn.Module, args: tuple) -> tuple | None:
        return (args[0][:, -1:], *args[1:]) if last_only[0] and args else None

    def before_model(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if not isinstance(cache, SelectiveCache):
            return None
        cache.open_forward()
        if kwargs.get("position_ids") is None and isinstance(mask, torch.Tensor) and mask.ndim == 2:
            # Positions count a row's own tokens, as `generate` does it: sub-spaces of keys are not invariant to a shift.
            inputs = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
            t = (args[0] if inputs is None else inputs).shape[1]
            return args, {**kwargs, "position_ids": (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -t:]}
        return None

    def after_model(_: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if isinstance(cache := kwargs.get("past_key_values"), SelectiveCache):
            cache.close_forward()

    last_only = [False]  # whether the pass under way returns the last token's logits and nothing else
    previous = model.config._attn_implementation
    hooks = [m.register_forward_pre_hook(before_layer, with_kwargs=True) for m in modules]
    if model is not decoder and "logits_to_keep" in inspect.signature(model.forward).parameters:
        hooks.append(model.register_forward_pre_hook(before_logits, with_kwargs=True))
        hooks.append(model.register_forward_hook(after_logits, with_kwargs=True, always_call=True))
        hooks += [m.register_forward_pre_hook(before_tail) for m in after_attention(decoder, modules[-1])]
    hooks.append(decoder.register_forward_pre_hook(before_model, with_kwargs=True))
    hooks.append(decoder.register_forward_hook(after_model, with_kwargs=True))
    model.set_attn_implementation(NAME)
    try:
        yield model
    finally:
        model.set_attn_implementation(previous)
        for hook in hooks:
            hook.remove()
        for module in modules:
            module.__dict__.pop(_CONTEXT, None)
