"""The geometry of a model's attention, and the error of a method that cannot run on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class NotApplicable(ValueError):
    """This method cannot run under this budget, model or prompt; nothing was computed."""


@dataclass(frozen=True)
class ModelShape:
    """n_layers transformer layers of h query heads and h_kv KV heads of dimension d."""

    n_layers: int
    h: int
    h_kv: int
    d: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.h // self.h_kv

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelShape:
        h = config.num_attention_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // h
        return cls(config.num_hidden_layers, h, getattr(config, "num_key_value_heads", None) or h, d)
