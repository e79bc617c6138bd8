"""One attention layer with random weights, on which any method's decode and prefill are timed.

layer = AttentionLayer.build(GEOMETRIES["mistral-7b"], torch.float32, torch.device("cpu"))
layer.decode(PQCache(), s=8192, steps=20)
layer.prefill(SnapKV(), s=8192)
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from baselines.kvzip import ZipLayer
from pqcache.measure.machine import seconds
from pqcache.measure.roofline import DROPPED_STEPS
from pqcache.selective import Method, SelectiveCache, attach
from pqcache.selective.attach import attention_modules
from pqcache.selective.dense import DenseLayer
from pqcache.selective.layer import LayerContext, Step
from pqcache.selective.ledger import synchronize

# Queries at the end of the prompt that methods are shown before decode.
WINDOW = 64


class LayerSize(NamedTuple):
    """Query heads, KV heads, head dimension and width of one attention layer."""

    h: int
    h_kv: int
    d: int
    hidden: int


GEOMETRIES = {
    "mistral-7b": LayerSize(32, 8, 128, 4096),
    "llama-2-7b": LayerSize(32, 32, 128, 4096),
    "qwen2.5-7b": LayerSize(28, 4, 128, 3584),
    "phi-3-mini": LayerSize(32, 32, 96, 3072),
    "glm4-9b": LayerSize(32, 2, 128, 4096),
    "tiny": LayerSize(4, 2, 32, 64),
}


@dataclass
class AttentionLayer:
    """The attention block of a one-layer model, and the caches that methods fill over it."""

    model: PreTrainedModel
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def build(cls, size: LayerSize, dtype: torch.dtype, device: torch.device) -> AttentionLayer:
        """A layer of this size, with the same weights in every run."""
        config = LlamaConfig(
            num_hidden_layers=1, num_attention_heads=size.h, num_key_value_heads=size.h_kv, head_dim=size.d,
            hidden_size=size.hidden, intermediate_size=64, vocab_size=256, max_position_embeddings=1 << 20,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return cls(model, dtype, device)

    # --- inputs -----------------------------------------------------------------------------------------------------

    def random(self, *shape: int, seed: int) -> torch.Tensor:
        """Normal numbers of a shape, the same in every run on a device."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device).to(self.dtype)

    def hidden(self, t: int, seed: int) -> torch.Tensor:
        """Input (1, t, hidden) of the block."""
        return self.random(1, t, self.model.config.hidden_size, seed=seed)

    def queries(self, t: int, seed: int = 2) -> torch.Tensor:
        """Queries (1, h, t, d)."""
        config = self.model.config
        return self.random(1, config.num_attention_heads, t, config.head_dim, seed=seed)

    def keys(self, t: int, seed: int) -> torch.Tensor:
        """Keys or values (1, h_kv, t, d)."""
        config = self.model.config
        return self.random(1, config.num_key_value_heads, t, config.head_dim, seed=seed)

    def project(self, hidden: torch.Tensor) -> None:
        """Run the block's projections, q, k, v and output, over hidden (1, t, hidden) and drop what they give."""
        (module,) = attention_modules(self.model)
        for part in (module.q_proj, module.k_proj, module.v_proj):
            part(hidden)
        module.o_proj(hidden.new_zeros(*hidden.shape[:2], module.o_proj.in_features))

    # --- caches -----------------------------------------------------------------------------------------------------

    def cache(self, method: Method, s: int) -> SelectiveCache:
        """An empty cache for s prompt tokens. The method works on its only layer, even where first layers stay dense."""
        cache = SelectiveCache(self.model, method)
        layer = cache.layers[0] = cache.served[0] = method.make_layer(0, cache.shape)
        layer.owner = weakref.ref(cache)
        cache.begin([s])
        return cache

    def prompt_context(self, cache: SelectiveCache, s: int, t: int) -> LayerContext:
        """The context of a prompt's last block, t of its s tokens, for calls that bypass the model: without hidden states."""
        (module,) = modules = attention_modules(self.model)
        nothing = torch.zeros(1, t, 1, device=self.device, dtype=self.dtype)
        rotary: Any = self.model.get_decoder().rotary_emb
        at = torch.arange(s - t, s, device=self.device)[None]
        step = Step(False, t, [s - t], [t], [s], ends_prompt=True, first=True)
        ctx = LayerContext(0, module, cache, nothing, *rotary(nothing, position_ids=at), at, modules, rotary, step)
        ctx.scaling = self.model.config.head_dim**-0.5
        return ctx

    def filled(self, method: Method, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> tuple[SelectiveCache, float]:
        """A cache that holds a prompt, and the seconds its index, eviction or packing took.

        k, v (1, h_kv, s, d): the prompt's keys and values. q (1, h, w, d): its last queries.
        """
        s = k.shape[2]
        cache = self.cache(method, s)
        (layer,) = cache.layers
        if isinstance(layer, DenseLayer):
            layer.store.append(k, v)
            build = 0.0
        elif hasattr(layer, "settle"):
            ctx = self.prompt_context(cache, s, q.shape[2])
            layer.observe(q, k, [s], ctx)
            ctx.values = v
            if isinstance(layer, ZipLayer):  # no model repeats the prompt: random scores say what stays
                method.repeat = lambda *_: [self.random(*k.shape[1:3], seed=4)]  # type: ignore[attr-defined]
                layer.method.score([layer], ctx)
            build = seconds(lambda: layer.settle(k, v, [s], ctx), self.device)
        else:
            # InfLLM makes its blocks during the prefill; here no prefill has scored these tokens.
            ctx = self.prompt_context(cache, s, s)
            at = torch.arange(s, device=self.device)[None]
            ctx.cos, ctx.sin = self.model.get_decoder().rotary_emb(k, position_ids=at)
            build = seconds(lambda: layer.load(k, v, ctx), self.device)
        cache.past, cache.columns, layer.columns = [s], s, s
        return cache, build

    # --- measurements -----------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self, cache: SelectiveCache, own: list[float]) -> Iterator[None]:
        """Add the method's own seconds of each pass (speculation, selection, attention, no projections) to own[-1].

        Methods that speculate from the previous layer's input get this layer's input instead, at the same cost.
        """
        (module,) = attention_modules(self.model)
        (layer,) = cache.layers
        attend = layer.attend

        def timed(work: Callable, *args: Any) -> Any:
            synchronize(self.device)
            start = time.perf_counter()
            out = work(*args)
            synchronize(self.device)
            own[-1] += time.perf_counter() - start
            return out

        def speculate(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            assert cache.step is not None
            ctx = LayerContext(0, module, cache, hidden, cos, sin, None, [module], module, cache.step)
            if layer.index is not None:
                timed(layer.index.on_previous_input, ctx)

        layer.attend = lambda *args: timed(attend, *args)  # type: ignore[method-assign]
        hook = module.register_forward_pre_hook(speculate, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            del layer.attend

    def forward(self, cache: SelectiveCache, hidden: torch.Tensor) -> float:
        """Seconds of one pass of the attention block over hidden (1, t, hidden)."""
        (module,) = attention_modules(self.model)
        at = torch.arange(cache.columns, cache.columns + hidden.shape[1], device=self.device)[None]
        tables = self.model.get_decoder().rotary_emb(hidden, position_ids=at)

        def run() -> None:
            cache.open_forward()
            module(hidden_states=hidden, position_embeddings=tables, attention_mask=None, past_key_values=cache)
            cache.close_forward()

        return seconds(run, self.device)

    def decode(self, method: Method, s: int, steps: int) -> dict[str, Any]:
        """One round: fill the cache, then decode. Seconds are medians over the steps after the dropped ones."""
        cache, build = self.filled(method, self.keys(s, 0), self.keys(s, 1), self.queries(min(s, WINDOW)))
        whole: list[float] = []
        own: list[float] = []
        with attach(self.model), self.watched(cache, own):
            for step in range(steps + DROPPED_STEPS):
                own.append(0.0)
                whole.append(self.forward(cache, self.hidden(1, 10 + step)))
        return {
            "step_s": statistics.median(whole[DROPPED_STEPS:]),
            "own_s": statistics.median(own[DROPPED_STEPS:]),
            "index_build_s": build,
            "attended_tokens": cache.ledger.attended(all_layers=True),
            "bytes_per_step": cache.ledger.bytes_per_step(),
            "resident_bytes": cache.resident_bytes(),
        }

    def prefill(self, method: Method, s: int) -> dict[str, float]:
        """A real prefill of s tokens in one block: seconds of the whole, and of the method's work at its end."""
        cache = self.cache(method, s)
        with attach(self.model):
            whole = self.forward(cache, self.hidden(s, 3))
        return {"prefill_s": whole, "finish_s": cache.ledger.index_build_s}
