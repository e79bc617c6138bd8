"""The geometry of a model's attention, and the error of a method that cannot run on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig


class NotApplicable(ValueError):
    """This method cannot run under this budget, model or prompt; nothing was computed."""


# What layers of these types keep is a state that does not grow with the prompt; those of the first have attention too.
BOTH = ("hybrid",)
STATE = ("linear_attention", "conv")
NOTHING = ("moe", "mlp")  # layers of these types see one token at a time


def attending(config: PreTrainedConfig) -> list[int]:
    """The layers that have attention, and so K and V. Of a text model's configuration."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [place for place, kind in enumerate(kinds) if kind not in STATE + NOTHING]


def windows(config: PreTrainedConfig) -> list[int | None]:
    """Of each layer, how many of the newest tokens a query sees, its own included; None: all. Of a text model's configuration."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return [None] * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def served(config: PreTrainedConfig) -> list[int]:
    """The layers that a method serves: those of full attention; where all attention slides, these."""
    every, places = windows(config), attending(config)
    return [place for place in places if every[place] is None] or places


@dataclass(frozen=True)
class ModelShape:
    """n_layers layers that a method serves, of h query heads and h_kv KV heads of dimension d, values of dimension d_v.

    Of latent (MLA) attention: the heads that K and V are expanded to, which is what the attention function gets.
    """

    n_layers: int
    h: int
    h_kv: int
    d: int
    d_v: int = 0  # 0: as d

    def __post_init__(self) -> None:
        object.__setattr__(self, "d_v", self.d_v or self.d)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.h // self.h_kv

    @property
    def token(self) -> int:
        """Numbers in one token's K and V in one layer."""
        return self.h_kv * (self.d + self.d_v)

    @property
    def unit(self) -> int:
        """What groups of channels must divide: the dimension of a head, of keys and of values."""
        return math.gcd(self.d, self.d_v)

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise ValueError unless q is (n, h, t, d), k (n, h_kv, t, d), v (n, h_kv, t, d_v): kernels would read beyond them."""
        heads = [(x.shape[1], x.shape[3]) for x in (q, k, v)]
        if heads != [(self.h, self.d), (self.h_kv, self.d), (self.h_kv, self.d_v)]:
            shown = ", ".join(f"{name} {count} x {width}" for name, (count, width) in zip("qkv", heads, strict=True))
            raise ValueError(
                f"heads of {shown}: the model's configuration says {self.h} query heads and {self.h_kv} KV heads of {self.d}"
            )

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelShape:
        h = config.num_attention_heads
        if getattr(config, "kv_lora_rank", None):
            width = config.qk_nope_head_dim + config.qk_rope_head_dim
            return cls(len(served(config)), h, h, width, config.v_head_dim)
        d = getattr(config, "head_dim", None) or config.hidden_size // h
        return cls(len(served(config)), h, getattr(config, "num_key_value_heads", None) or h, d)
