"""The geometry of a model's attention, and the error of a method that cannot run on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
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

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise ValueError unless q is (n, h, t, d), k and v (n, h_kv, t, d): kernels would read beyond them."""
        heads = [(x.shape[1], x.shape[3]) for x in (q, k, v)]
        if heads != [(self.h, self.d), (self.h_kv, self.d), (self.h_kv, self.d)]:
            shown = ", ".join(f"{name} {count} x {width}" for name, (count, width) in zip("qkv", heads, strict=True))
            raise ValueError(
                f"heads of {shown}: the model's configuration says {self.h} query heads and {self.h_kv} KV heads of {self.d}"
            )

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelShape:
        h = config.num_attention_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // h
        return cls(config.num_hidden_layers, h, getattr(config, "num_key_value_heads", None) or h, d)
