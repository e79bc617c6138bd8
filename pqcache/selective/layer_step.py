"""A decoder layer's forward pass for one new token per row on a GPU, with all that stays the same looked up once.

A step of a small batch is bound by launches: transformers' layer makes 26 small kernels beside its seven matrix products, and
89 Python calls. `LayerStep` does the same with the kernels of `device/triton_model.py`. It serves every cache alike, this
project's and transformers' own, so that no method's time is that of another model.

Only stock layers of known classes are replaced, and only in passes of one token per row, without gradients, while nobody hooks
into a layer's modules. Every other pass is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pqcache.device.switch import HERE, device_of, on_device, triton_installed
from pqcache.selective.cache import SelectiveCache
from pqcache.selective.layer import LayerContext

FAMILIES = ("Llama", "Mistral", "Qwen2")  # decoder layers of one and the same forward pass
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# arguments under which somebody looks into the layers
OUTPUTS = ("output_hidden_states", "output_attentions")


def is_stock(layer: nn.Module) -> bool:
    """Whether a decoder layer and its parts are of the classes whose forward pass `LayerStep` knows, and unchanged."""
    module = type(layer).__module__
    family = next((name for name in FAMILIES if module.split(".")[-1] == f"modeling_{name.lower()}"), None)
    if family is None or not module.startswith("transformers.models."):
        return False
    expected = {
        "": "DecoderLayer", "self_attn": "Attention", "mlp": "MLP", "input_layernorm": "RMSNorm",
        "post_attention_layernorm": "RMSNorm",
    }  # fmt: skip
    for name, kind in expected.items():
        part = getattr(layer, name, None) if name else layer
        if type(part).__name__ != family + kind or type(part).__module__ != module:
            return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    products = [getattr(attention, name) for name in PROJECTIONS] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if any(type(product) is not nn.Linear for product in products) or type(mlp.act_fn).__name__ != "SiLUActivation":
        return False
    # accelerate, kernelize and others put a forward of their own on the instance
    return not any("forward" in part.__dict__ or hasattr(part, "_hf_hook") for part in layer.modules())


class FusedPasses:
    """Replaces the decoder layers' forward passes while attached, and decides for each pass whether they serve it.

    attention: the attention function by which transformers' own caches are served.
    """

    def __init__(self, model: PreTrainedModel, modules: list[nn.Module], rotary: list, name: str) -> None:
        self.model, self.modules, self.rotary, self.name = model, modules, rotary, name
        self.decoder: Any = model.get_decoder()
        self.layers: list[nn.Module] = list(self.decoder.layers)
        self.parts: Any = None  # of the pass under way; None: the model's own layers do it
        self._made: dict[Any, Any] = {}
        self._hooks: list[dict] = []  # of all parts of the layers
        self._known: list[int] = []  # how many hooks each had when attached

    def install(self) -> None:
        """After all hooks of `attach` are registered."""
        if not triton_installed() or not all(is_stock(layer) for layer in self.layers):
            self.layers = []
            return
        inner = [part for layer in self.layers for part in layer.modules() if part is not layer]
        self._hooks = [x for part in inner for x in (part._forward_hooks, part._forward_pre_hooks)]
        self._known = list(map(len, self._hooks))
        for index, layer in enumerate(self.layers):
            layer.__dict__["forward"] = LayerStep(self, layer, index).forward

    def remove(self) -> None:
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
        self.layers = []

    def begin(self, args: tuple, kwargs: dict) -> None:
        """A pass of the decoder begins."""
        self.parts = None
        if not self.layers or torch.is_grad_enabled() or self.model.training:
            return
        ids, hidden = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        first = args[0] if args else (hidden if ids is None else ids)
        if not isinstance(first, torch.Tensor) or first.ndim < 2 or first.shape[1] != 1 or not on_device(first):
            return
        config = self.decoder.config
        if (
            any(kwargs.get(key, getattr(config, key, None)) for key in OUTPUTS)
            or config._attn_implementation != self.name
        ):
            return
        if device_of(first) is not HERE or list(map(len, self._hooks)) != self._known:
            return
        self.parts = self._parts(first)

    def _parts(self, first: torch.Tensor) -> Any:
        """The kernels for as many rows; None where the weights differ in dtype or device."""
        attention: Any = self.modules[0]
        weight: torch.Tensor = attention.q_proj.weight
        key = first.shape[0], weight.dtype, first.device
        if key not in self._made:
            from pqcache.device.triton_model import ModelParts, Sizes

            weights = [x for layer in self.layers for x in layer.parameters()]
            alike = all(x.dtype == weight.dtype and x.device == first.device for x in weights)
            heads, kv_heads = (w.shape[0] // attention.head_dim for w in (weight, attention.k_proj.weight))
            sizes = Sizes(
                first.shape[0], weight.shape[1], heads, kv_heads, attention.head_dim, weight.dtype, first.device
            )
            self._made[key] = ModelParts(sizes) if alike else None
        return self._made[key]


class LayerStep:
    """One decoder layer. Weights are read from their modules at each step, by dictionaries instead of calls."""

    def __init__(self, passes: FusedPasses, layer: nn.Module, index: int) -> None:
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
        self.passes, self.index, self.attention = passes, index, attention
        self.original: Callable[..., torch.Tensor] = layer.forward
        self.products = [getattr(attention, name)._parameters for name in PROJECTIONS]
        self.mlp = [product._parameters for product in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        self.norms = [norm._parameters for norm in norms]
        self.eps = [norm.variance_epsilon for norm in norms]
        self.scaling = attention.scaling
        self.sliding = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The layer's forward pass, hidden_states (n, t, D) to (n, t, D); see transformers' decoder layers for the arguments."""
        parts, cache = self.passes.parts, past_key_values
        if parts is None or position_embeddings is None or cache is None or not hidden_states.is_contiguous():
            return self._original(
                hidden_states, attention_mask, position_ids, cache, use_cache, position_embeddings, kwargs
            )
        attend = self._selective if isinstance(cache, SelectiveCache) else self._own
        normed = parts.norm(hidden_states, self.norms[0]["weight"], self.eps[0])
        out = attend(parts, normed, attention_mask, position_ids, cache, position_embeddings)
        if out is None:
            return self._original(
                hidden_states, attention_mask, position_ids, cache, use_cache, position_embeddings, kwargs
            )
        o_proj, (gate, up, down) = self.products[3], self.mlp
        out = linear(out.reshape(*hidden_states.shape[:2], -1), o_proj["weight"], o_proj["bias"])
        hidden_states, normed = parts.add_norm(hidden_states, out, self.norms[1]["weight"], self.eps[1])
        wide = silu(linear(normed, gate["weight"], gate["bias"])) * linear(normed, up["weight"], up["bias"])
        return hidden_states + linear(wide, down["weight"], down["bias"])

    def _original(self, hidden, mask, positions, cache, use_cache, embeddings, kwargs) -> torch.Tensor:
        return self.original(
            hidden, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=use_cache,
            position_embeddings=embeddings, **kwargs,
        )  # fmt: skip

    def _project(self, parts, normed, embeddings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (n, h, 1, d), k and v (n, h_kv, 1, d), rotated."""
        q, k, v, _ = self.products
        value = linear(normed, v["weight"], v["bias"]).view(parts.k_shape)
        keys, query = linear(normed, k["weight"], k["bias"]), linear(normed, q["weight"], q["bias"])
        return *parts.rotate(query, keys, *embeddings), value

    def _own(self, parts, normed, mask, positions, cache, embeddings) -> torch.Tensor:
        """Attention with one of transformers' caches."""
        q, k, v = self._project(parts, normed, embeddings)
        k, v = cache.update(k, v, self.index)
        out = sdpa_attention_forward(
            self.attention, q, k, v, mask, dropout=0.0, scaling=self.scaling, sliding_window=self.sliding
        )
        return out[0]

    def _selective(self, parts, normed, mask, positions, cache, embeddings) -> torch.Tensor | None:
        """Attention with a SelectiveCache. None: not a decode step."""
        index, layers = self.index, cache.layers
        step = cache.step or cache.plan_step(normed.shape[0], 1, mask)
        if not step.decode:
            return None
        layer, last = layers[index], index + 1 == len(layers)
        # whether work of this layer or the next may begin before q, k and v
        early = layer.substitute is None or not (last or layers[index + 1].substitute)
        if not (early or cache.observers or cache.watchers) and layer.substitute.serves(normed):
            cache.bound = index
            q, k, v = self._project(parts, normed, embeddings)
            return layer.substituted(q, k, v, self.scaling, cache)
        ctx = LayerContext(
            layer_idx=index,
            module=self.attention,
            cache=cache,
            hidden=normed,
            cos=embeddings[0],
            sin=embeddings[1],
            position_ids=positions,
            modules=self.passes.modules,
            rotary=self.passes.rotary[index],
            step=step,
            last_only=cache.last_only and last,
        )
        ctx.scaling = self.scaling
        cache.enter_layer(ctx)
        q, k, v = self._project(parts, normed, embeddings)
        k, v = layer.update(k, v)
        return layer.attend(q, k, v, mask, ctx)
