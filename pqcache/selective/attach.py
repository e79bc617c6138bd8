"""Bind a SelectiveCache to a stock transformers model, for as long as a `with` block lasts.

transformers gives the attention function q, k, v and the mask, but neither the cache nor the hidden states. A forward
pre-hook on each attention module stores these (`LayerContext`); the attention function then calls the cache's layer.

One forward pass:

1. The model's pre-hook opens the pass. A pass before it that failed half-way is detected here.
2. The first attention module's pre-hook decides what the pass is (`Step`). Every layer checks the step before any layer changes.
3. Each attention module's pre-hook lets its layer and the next one start early work (`SelectiveCache.enter_layer`). The module
   then computes its projections, and calls `update` and `attend`.
4. The model's post-hook closes the pass and advances the step counter.

A pass that returns the last token's logits only (`logits_to_keep=1`, as in `generate`) needs one row of its last layer: there
attention, output projection and MLP are computed for that token alone. K and V of all tokens are still stored.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pqcache.kernels.scaling import Scaling
from pqcache.selective.cache import Joint, SelectiveCache
from pqcache.selective.layer import LayerContext
from pqcache.selective.shape import attending, served
from pqcache.selective.support import CLOSED, check_architecture, dense_attention, unrotated

NAME = "pqcache_selective"  # a name with "flash" or "/" would be taken for a hub kernel
_CONTEXT = "_pqcache_context"
_ours: ContextVar[bool] = ContextVar("_ours", default=False)  # whether the pass under way has a SelectiveCache
# arguments whose use needs every row of the last layer
EVERY_ROW = ("labels", "output_hidden_states", "output_attentions", "output_router_logits")


def selective_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask of transformers' sdpa attention; none without a 2-D mask, where it is not needed.

    - For one query, which attends to everything. transformers builds a mask of ones whenever it may not look at tensors, as
      while a step is recorded.
    - For a SelectiveCache, whose layers know what each query of a block sees. The causal mask then says what is padding, also for
      layers with a sliding window.
    """
    ours = _ours.get()
    plain = ours or kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    if kwargs.get("attention_mask") is None and plain and (ours or kwargs.get("q_length") == 1):
        return None
    if ours:
        kwargs |= {"mask_function": causal_mask_function, "local_size": None}
    return sdpa_mask(*args, **kwargs)


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
    contexts: list[LayerContext] | None = module.__dict__.pop(_CONTEXT, None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    cap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    if cap is not None or sinks is not None:
        scaling = Scaling(scaling, cap, sinks)
    if contexts is None:  # another cache, or none: an ordinary forward pass
        return dense_attention(module, query, key, value, attention_mask, scaling, dropout=dropout, **kwargs)
    outputs = []
    rows = [len(ctx.hidden) for ctx in contexts]
    for ctx, q, k, v in zip(contexts, query.split(rows), key.split(rows), value.split(rows), strict=True):
        ctx.scaling = scaling
        outputs.append(ctx.cache.layers[ctx.layer_idx].attend(q, k, v, attention_mask, ctx))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), None


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The self-attention modules of the decoder, in layer order. Raises ValueError, one line, if they cannot be served."""
    named, decoder = f"model {model.config.model_type}", model.get_decoder()
    config, layers = model.config.get_text_config(decoder=True), getattr(decoder, "layers", None)
    having = [layers[place] for place in attending(config)] if layers else []
    modules = [getattr(layer, "self_attn", getattr(layer, "mixer", None)) for layer in having]
    if not modules or any(m is None or not hasattr(m, "layer_idx") for m in modules):
        raise ValueError(f"{named}: not supported: no decoder layers with `self_attn` found")
    given = inspect.signature(type(cast(nn.Module, modules[0])).forward).parameters
    if not unrotated(config) and (shared_rotary(decoder) is None or "position_embeddings" not in given):
        raise ValueError(f"{named}: not supported: its layers share no rotary position embedding")
    if not decoder._can_set_attn_implementation():
        raise ValueError(f"{named}: not supported: {CLOSED}")
    return modules  # type: ignore[return-value]


def served_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Those of the layers that a method serves."""
    places = served(model.config.get_text_config(decoder=True))
    return [module for module in attention_modules(model) if module.layer_idx in places]


def check_config(config: PreTrainedConfig) -> None:
    """Raise ValueError, one line, if models of this configuration are refused, before any weights are loaded.

    The modules are looked at in a model without memory for weights.
    """
    check_architecture(config)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"model {config.model_type}: not supported: no causal language model of transformers")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    except Exception:  # damaged numbers, a missing package: loading the model says what it is
        return
    attention_modules(model)


def shared_rotary(decoder: nn.Module) -> nn.Module | None:
    """The rotary embedding that all layers of a decoder share."""
    return getattr(decoder, "rotary_emb", getattr(decoder, "pos_emb", None))  # the second is LFM 2 MoE's name


def no_rotation(x: torch.Tensor, position_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The cos and sin (1, t, 0) of layers that rotate nothing, for x (n, t, D)."""
    return x.new_empty((1, x.shape[1], 0)), x.new_empty((1, x.shape[1], 0))


def rotaries_of(decoder: nn.Module, modules: Sequence[nn.Module]) -> list[Callable[..., Any]]:
    """The rotary embedding of each attention module, one object for all layers of a kind.

    Gemma 3 and OLMo 3 have one per kind in a shared module.
    """
    shared = shared_rotary(decoder)
    if shared is None or "layer_type" not in inspect.signature(shared.forward).parameters:
        return [shared or no_rotation] * len(modules)
    named: list[str] = decoder.config.layer_types  # type: ignore[assignment, union-attr]
    kinds = {kind: functools.partial(shared, layer_type=kind) for kind in named}
    return [kinds[named[module.layer_idx]] for module in modules]  # type: ignore[index]


class Hooks:
    """The hooks of one `attach`. In a pass they run as before_logits, before_model, before_layer of every layer, after_model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        text = model.config.get_text_config(decoder=True)
        self.modules, places = attention_modules(model), served(text)
        self.served = [module for module in self.modules if module.layer_idx in places]
        rotary = rotaries_of(model.get_decoder(), self.modules)
        places = attending(text)
        self.rotary = dict(zip(places, rotary, strict=True))
        self.ahead = dict(zip(places, [*rotary[1:], rotary[-1]], strict=True))  # of the next layer with attention
        self.ends = (
            places[-1] if places[-1] == text.num_hidden_layers - 1 else None
        )  # the last layer, if it has attention
        self.last_only = False  # whether the pass under way returns the last token's logits and nothing else

    def register(self, model: PreTrainedModel) -> list[RemovableHandle]:
        decoder = model.get_decoder()
        handles = [module.register_forward_pre_hook(self.before_layer, with_kwargs=True) for module in self.modules]
        if model is not decoder and "logits_to_keep" in inspect.signature(model.forward).parameters:
            handles.append(model.register_forward_pre_hook(self.before_logits, with_kwargs=True))
            # what works token by token after the last layer's attention: output projection and MLP. Given the last token alone
            # they return one row, which the layer adds to every row of its residual: only the last row is then correct
            ends = [(self.modules[-1], "o_proj"), (decoder.layers[-1], "mlp")] if self.ends is not None else []
            tail = [getattr(module, name, None) for module, name in ends]
            handles += [module.register_forward_pre_hook(self.before_tail) for module in tail if module is not None]
        handles.append(decoder.register_forward_pre_hook(self.before_model, with_kwargs=True))
        handles.append(decoder.register_forward_hook(self.after_model, with_kwargs=True))
        return handles

    def before_model(self, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """A pass begins. Unless positions are given, they count a row's own tokens, as in `generate`.

        Counting padding too would rotate the keys further, and their product-quantized codes would change.
        """
        caches, mask = caches_of(kwargs), kwargs.get("attention_mask")
        _ours.set(bool(caches))
        self.last_only = any(cache.last_only for cache in caches)
        if not caches:
            return None
        inputs: Any = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        inputs = args[0] if inputs is None and args else inputs
        alone = isinstance(inputs, torch.Tensor) and inputs.ndim == 2 and len(caches) == 1
        for cache in caches:
            cache.open_forward(inputs if alone else None)
        recurrent = mask is None and inputs is not None and caches[0].states is not None
        if recurrent and (padding := caches[0].padding_mask(inputs)) is not None:
            return args, {**kwargs, "attention_mask": padding}
        if kwargs.get("position_ids") is not None or not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            return None
        return args, {**kwargs, "position_ids": (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -inputs.shape[1] :]}

    def after_model(self, _: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        for cache in caches_of(kwargs):
            _ours.set(False)
            cache.last_only = self.last_only = False
            cache.close_forward()

    def before_layer(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """An attention module is about to run: store its context, and let its layer and the next one start early work."""
        module.__dict__.pop(_CONTEXT, None)  # left by a pass that failed between here and the attention function
        if not (caches := caches_of(kwargs)):
            return
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        positions, turn = kwargs.get("position_ids"), kwargs.get("position_embeddings")
        turn = no_rotation(hidden) if turn is None else turn
        cos, sin = (turn.real, turn.imag) if isinstance(turn, torch.Tensor) else turn  # DeepSeek V2 has cos + i sin
        rows = [len(hidden)] if len(caches) == 1 else [len(cache.past) for cache in caches]
        index: int = module.layer_idx  # type: ignore[assignment]
        contexts, start = [], 0
        for cache, n in zip(caches, rows, strict=True):
            own, start = slice(start, start + n), start + n
            contexts.append(
                LayerContext(
                    layer_idx=index,
                    module=module,
                    cache=cache,
                    hidden=hidden[own],
                    cos=cos if len(cos) == 1 else cos[own],
                    sin=sin if len(sin) == 1 else sin[own],
                    position_ids=positions if positions is None or len(positions) == 1 else positions[own],
                    modules=self.served,
                    rotary=self.rotary[index],
                    rotary_ahead=self.ahead[index],
                    step=cache.step or cache.plan_step(n, hidden.shape[1], kwargs.get("attention_mask")),
                    last_only=cache.last_only and index == self.ends,
                )
            )
        module.__dict__[_CONTEXT] = contexts
        for ctx in contexts:
            ctx.cache.bound = index
            if ctx.cache.begins_ahead:
                ctx.cache.enter_layer(ctx)

    def before_logits(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        """Find out whether the pass returns the last token's logits only."""
        for cache in caches_of(kwargs):
            kept = kwargs.get("logits_to_keep")
            every_row = [kwargs.get(key, getattr(self.config, key, None)) for key in EVERY_ROW]
            last_only = isinstance(kept, int) and kept == 1 and all(x is None or x is False for x in every_row)
            cache.last_only = last_only and not cache.watchers

    def before_tail(self, _: nn.Module, args: tuple) -> tuple | None:
        return (args[0][:, -1:], *args[1:]) if self.last_only and args else None


def caches_of(kwargs: dict) -> Sequence[SelectiveCache]:
    """The caches that a module was called with, if they are ours: one, or those of a Joint."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, SelectiveCache):
        return (cache,)
    return cache.members if isinstance(cache, Joint) else ()


@contextmanager
def attach(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let `model` work with SelectiveCache inside the block; other caches still work. Nesting is allowed.

    Works through model(...), model.generate(...) and anything built on them. Leaves no hook and no setting behind.
    Raises ValueError for models whose attention is not supported.
    """
    if model.config._attn_implementation == NAME:
        yield model
        return
    check_architecture(model.config)
    hooks = Hooks(model)
    # every configuration in the model with its attention, outer ones first: setting one sets those inside it
    before: dict[int, tuple[PreTrainedConfig, str | None]] = {}
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in configs:
        if id(config) not in before:
            before[id(config)] = config, config._attn_implementation
            configs += [inner for key in config.sub_configs if (inner := getattr(config, key, None)) is not None]
    AttentionInterface.register(NAME, selective_attention)
    AttentionMaskInterface.register(NAME, selective_mask)  # without one, padded and continued inputs are silently wrong
    previous = model.config._attn_implementation
    handles = hooks.register(model)
    try:
        model.set_attn_implementation(NAME)
        yield model
    finally:
        model.set_attn_implementation(previous)
        for config, name in before.values():  # a vision tower may have had another one than the decoder
            if config._attn_implementation != name:
                config._attn_implementation = name
        for handle in handles:
            handle.remove()
        for module in hooks.modules:
            module.__dict__.pop(_CONTEXT, None)
