"""What layers of linear attention, of a convolution and of a state-space model keep, in hybrid models.

It does not grow with the prompt, and no method serves it. transformers' own layer objects hold it: `Cache.states` has one per
decoder layer, an `Absent` where a layer has nothing but attention. The models reach them by the cache that they are given.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from pqcache.selective.shape import BOTH, STATE, NotApplicable

READS_STATES = hasattr(Cache, "get_conv_state")  # models ask the cache for their states; in 5.17 they ask its layers


class Absent:
    """Holds a decoder layer's place where it keeps nothing, as transformers' DummyLayer, which 5.17 does not have."""

    keys = values = None
    is_initialized = is_compileable = is_croppable = True
    supports_early_init = False

    def _nothing(self, *args: Any, **kwargs: Any) -> Any: ...

    offload = prefetch = reset = crop = reorder_cache = _nothing


def empty(config: PreTrainedConfig) -> Cache | None:
    """Empty states for a text model of this configuration; None if none of its layers has one."""
    if not {*BOTH, *STATE} & {*(getattr(config, "layer_types", None) or ())}:
        return None
    if not READS_STATES:
        raise NotApplicable(f"model {config.model_type}: layers with a state need a newer transformers")
    layers = DynamicCache(config=config).layers
    return Cache([layer if isinstance(layer, LinearAttentionCacheLayerMixin) else Absent() for layer in layers])


def tensors(states: Cache | None) -> list[torch.Tensor]:
    """All that these states hold, each (n, ...)."""
    layers = [x for x in states.layers if isinstance(x, LinearAttentionCacheLayerMixin)] if states else []
    kept = [x for layer in layers for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    return [tensor for tensor in kept if tensor is not None]


def copied(states: Cache | None, host: bool = False) -> Cache | None:
    """A copy, on the host or on the layers' own devices."""
    made = copy.deepcopy(states)
    for layer in [] if made is None else made.layers:
        layer.offload() if host else layer.prefetch()
    return made


def joined(parts: Sequence[Cache | None]) -> Cache | None:
    """The states of several requests as one, their rows below each other."""
    made = copy.deepcopy(parts[0])
    for whole, *own in zip(tensors(made), *map(tensors, parts), strict=True):
        whole.data = torch.cat(own)
    return made


def give_back(joint: Cache | None, parts: Sequence[Cache | None]) -> None:
    """Write the rows of `joined` into the states that they came from."""
    for whole, *own in zip(tensors(joint), *map(tensors, parts), strict=True):
        for mine, rows in zip(own, whole.split([len(x) for x in own]), strict=True):
            mine.copy_(rows)


class HybridCache(Cache):
    """A cache whose models find their states in `states`, and K and V in `layers`."""

    states: Any  # see `empty`; None where no layer has one

    def get_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self.states.get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.states.update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self.states.get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.states.update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return self.states.has_previous_state(*args, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.states is not None and self.states.is_recording_past(layer_idx)
