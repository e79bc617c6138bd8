"""One run's queries, keys and values, and the attention of any method rerun on them.

    capture = Capture()
    generate(model, Full(), ids, max_new_tokens=32, watchers=[capture])
    measures = Measures()
    rerun(capture, model.config, ClusterKV(budget=Budget(tokens=512)), watchers=[measures])

Every method thus sees the same queries, those of the recorded run, whatever its own errors would have led to; and a sweep
over budgets or index sizes costs no forward pass of the model. Memory: K, V, Q and the layers' inputs of the whole run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from pqcache.selective.cache import SelectiveCache
from pqcache.selective.layer import LayerContext, SelectiveLayer, Watcher
from pqcache.selective.method import Method


class Capture(Watcher):
    """Keeps what every call of every layer's attention was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, LayerContext]] = []  # q, k, v, context

    def watch(
        self,
        layer: SelectiveLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        ctx: LayerContext,
    ) -> None:
        if ctx.step.padded:
            raise ValueError("a run with padding cannot be captured: its masks are not kept")
        self.calls.append((q.detach(), k.detach(), v.detach(), ctx))

    def map_rows(self, index: torch.Tensor) -> None:
        raise ValueError("a run whose rows move cannot be captured")


@torch.no_grad()
def rerun(
    capture: Capture, config: PreTrainedConfig, method: Method, watchers: Collection[Watcher] = ()
) -> SelectiveCache:
    """The attention of `method` on a captured run, layer by layer and step by step; returns its cache, for the ledger.

    The outputs go nowhere but to the watchers. Prompt attention is not computed by methods that leave it dense.
    """
    cache = SelectiveCache(config, method)
    first = capture.calls[0][3].cache
    assert first.prompt_lengths is not None
    cache.begin(first.prompt_lengths, first.token_ids)
    cache.watchers.extend(watchers)
    cache.kernel = _no_attention
    for index, (q, k, v, recorded) in enumerate(capture.calls):
        layer, step = cache.layers[recorded.layer_idx], recorded.step
        ctx: Any = replace(recorded, cache=cache, step=replace(step, masks={}))
        ctx.scaling = recorded.scaling
        if recorded.layer_idx == 0:
            cache.past, cache.step, cache.ledger.decoding = step.past, ctx.step, step.decode
        ctx.step = cache.step
        layer.columns += q.shape[2]
        layer.on_layer_input(ctx)
        if recorded.layer_idx + 1 < len(cache.layers):
            cache.layers[recorded.layer_idx + 1].on_previous_input(ctx)
        layer.attend(q, k, v, None, ctx)
        if index + 1 == len(capture.calls) or capture.calls[index + 1][3].layer_idx == 0:
            cache.close_forward()
    return cache


def _no_attention(module: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return q.transpose(1, 2), None
