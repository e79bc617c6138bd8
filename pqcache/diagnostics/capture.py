"""One run's queries, keys and values, and the attention of any method rerun on them.

    capture = Capture()
    generate(model, Full(), ids, max_new_tokens=32, watchers=[capture])
    measures = Measures()
    rerun(capture, model.config, ClusterKV(budget=Budget(tokens=512)), watchers=[measures])

Every method sees the same queries, those of the recorded run, and a sweep over budgets or index sizes costs no forward pass
of the model. Memory: q, k, v, input and output of every layer over the whole run.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from pqcache.selective.cache import SelectiveCache
from pqcache.selective.layer import WatchedCall, Watcher
from pqcache.selective.method import Method


class Capture(Watcher):
    """Keeps every call of every layer's attention."""

    def __init__(self) -> None:
        self.calls: list[WatchedCall] = []

    def watch(self, call: WatchedCall) -> None:
        if call.ctx.step.padded:
            raise ValueError("a run with padding cannot be captured: its masks are not kept")
        self.calls.append(call)

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
    first = capture.calls[0].ctx.cache
    assert first.prompt_lengths is not None
    cache.begin(first.prompt_lengths, first.token_ids)
    cache.watchers.extend(watchers)
    cache.kernel = _no_attention
    for index, call in enumerate(capture.calls):
        recorded = call.ctx
        layer, step = cache.layers[recorded.layer_idx], recorded.step
        ctx: Any = replace(recorded, cache=cache, step=replace(step, masks={}))
        ctx.scaling = recorded.scaling
        if recorded.layer_idx == cache.served[0].model_idx:
            cache.past, cache.step, cache.ledger.decoding = step.past, ctx.step, step.decode
        ctx.step = cache.step
        layer.columns += call.q.shape[2]
        cache.enter_layer(ctx)
        layer.attend(call.q, call.k, call.v, None, ctx)
        if index + 1 == len(capture.calls) or capture.calls[index + 1].ctx.layer_idx == cache.served[0].model_idx:
            cache.close_forward()
    return cache


def _no_attention(module: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return q.transpose(1, 2), None
