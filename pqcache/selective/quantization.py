"""Family: keep every token in fewer bits.

A method writes a codec (and, if its bit widths depend on attention, the layer's `observe`). Prompt attention is exact; decode
attends to the decoded body and an exact tail of recent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pqcache.selective.attention import attend_one
from pqcache.selective.layer import LayerContext, StagedLayer, exact_copy, row_mask
from pqcache.selective.method import Method, ModelShape
from pqcache.store.coded import Codec, CodedStore, CodedStream, pack_all_but
from pqcache.store.resident import ResidentStore


class QuantizationLayer(StagedLayer):
    """Packed body + exact tail; see CodedStore for when a tail token is packed."""

    attends_all = True

    def __init__(self, layer_idx: int, shape: ModelShape, method: QuantizationMethod) -> None:
        self.method = method
        super().__init__(layer_idx, shape)

    def clear(self) -> None:
        super().clear()
        self.store: CodedStore | None = None

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        if self.store is None:
            self.store = self.method.make_store(self.layer_idx, self.shape)
        self.store.load(k, v, lengths)
        self.store.pack()

    def unpack(self) -> ResidentStore:
        assert self.store is not None
        return exact_copy(self.store)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        assert self.store is not None
        self.store.append(k, v)  # attended exactly once, packed afterwards
        keys, values = self.store.view()
        lengths = self.store.lengths
        ctx.cache.ledger.attend(self.layer_idx, sum(lengths) / len(lengths), selecting=False)
        out = attend_one(q, keys, values, ctx.scaling, row_mask(lengths, keys.shape[2], q.device))
        self.observe_step(q, keys, ctx)
        self.store.pack()
        return out

    def observe_step(self, q: torch.Tensor, keys: torch.Tensor, ctx: LayerContext) -> None:
        """Called per decode step before packing: q (n, h, 1, d), keys (n, h_kv, length, d); for saliency probes."""

    def map_rows(self, index: torch.Tensor) -> None:
        super().map_rows(index)
        if self.store is not None:
            self.store.map_rows(index)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        tiers = {"device": list(super().tensors()["device"])}
        if self.store is not None:
            tiers["device"] += self.store.tensors()["device"]
        return tiers


@dataclass(kw_only=True)
class QuantizationMethod(Method):
    """Base of quantization methods. A subclass writes make_codec.

    residual: how many of the newest tokens stay exact.
    """

    ignores_budget: ClassVar[bool] = True

    residual: int = 0

    def make_codec(self, layer_idx: int, shape: ModelShape) -> Codec:
        """A fresh codec; one each for K and V."""
        raise NotImplementedError

    def make_store(self, layer_idx: int, shape: ModelShape) -> CodedStore:
        """K and V streams; override where they differ in schedule or codec."""
        k, v = (CodedStream(self.make_codec(layer_idx, shape), pack_all_but(self.residual)) for _ in "kv")
        return CodedStore(k, v)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> QuantizationLayer:
        return QuantizationLayer(layer_idx, shape, self)
