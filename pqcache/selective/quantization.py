"""Family: keep every token in fewer bits.

A method writes a codec (and, if its bit widths depend on attention, a store that observes it). Prompt attention is exact;
decode attends to the body, by a kernel as codes or decoded tile by tile, and to an exact tail of recent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch

from pqcache import kernels
from pqcache.kernels.scaling import cap_of
from pqcache.selective.attention import Part, merge, partial, with_sinks
from pqcache.selective.group import per_head
from pqcache.selective.layer import LayerContext, SelectiveLayer
from pqcache.selective.method import Method
from pqcache.selective.shape import ModelShape
from pqcache.selective.staged import StagedLayer, exact_copy
from pqcache.store.codec import Codec
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream, Schedule
from pqcache.store.resident import ResidentStore

TILE = 1024  # tokens decoded at a time: a decode step's scratch does not grow with the cache
DEVICE_TILE = 16384  # on a GPU, where launches count: for codes that no kernel reads


def attend_coded(
    q: torch.Tensor, store: PackedStore, scaling: float, tile: int | None = None, accelerator: Any = None
) -> Part:
    """Attention of one token per row, q (n, h, 1, d), over everything in a coded store; out (n, h, 1, d), lse (n, h, 1).

    By kernels where they read the codes: the cache's `accelerator` all tokens, the CPU's the packed ones. Of the others, `tile`
    tokens (default TILE, DEVICE_TILE on a GPU) are decoded, attended and joined to what came before, then forgotten.
    """
    uncapped = cap_of(scaling) is None
    if accelerator is not None and uncapped and (fused := accelerator.attend_packed(q, store, scaling)) is not None:
        return Part(fused[0].transpose(1, 2), fused[1])
    size = tile or (DEVICE_TILE if q.is_cuda else TILE)
    joined, read = _attend_runs(q, store, scaling) if tile is None and uncapped else (None, [])
    for keys, values, inside in store.tiles(size, read):
        mask = None if inside is None else per_head(inside, q.shape[1])[:, :, None]
        part = partial(q, keys, values, scaling, mask)
        joined = part if joined is None else merge([joined, part])
    assert joined is not None
    return joined


def _attend_runs(q: torch.Tensor, store: PackedStore, scaling: float) -> tuple[Part | None, list[int]]:
    """Attention over packed tokens, and exact ones where it can, by a kernel, and how many of each row's tokens these are.

    None: no kernel serves.
    """
    if not kernels.native(q):
        return None, []
    runs, read = store.runs(exact=True)
    if not runs or not all(kernels.packed.serves(q, run) for run in runs):
        return None, []
    return Part(*kernels.packed.attend_codes(q, runs, scaling)), read


def attend_everything(layer: SelectiveLayer, store: Any, q: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
    """A decode step's attention of q (n, h, 1, d) to all of a layer's coded store, its token included: (n, 1, h, d)."""
    part = with_sinks(attend_coded(q, store, ctx.scaling, accelerator=ctx.cache.accelerator), ctx.scaling)
    ctx.cache.ledger.attend(layer.layer_idx, fmean(store.lengths), selecting=not layer.attends_all)
    store.observe_step(q, part.lse, ctx.scaling)
    return part.out.transpose(1, 2).to(q.dtype)


class QuantizationLayer(StagedLayer):
    """Packed body + exact tail; see PackedStore for when a tail token is packed."""

    per_row = ("staged", "store")
    attends_all = True

    def __init__(self, layer_idx: int, shape: ModelShape, method: QuantizationMethod) -> None:
        self.method = method
        super().__init__(layer_idx, shape)

    def clear(self) -> None:
        super().clear()
        self.store = self.method.make_store(self.layer_idx, self.shape)

    def sums_from(self, lengths: list[int]) -> int | None:
        return self.store.sums_from(lengths)

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        self.store.observe(q, keys, stored, ctx)

    def settle(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.store.load(k, v, lengths)
        self.store.pack(everything=self.method.packs_prompt)

    def unpack(self) -> ResidentStore:
        return exact_copy(self.store)

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.store.append(k, v)  # attended exactly once, packed afterwards
        out = attend_everything(self, self.store, q, ctx)
        self.store.pack()
        return out


@dataclass(kw_only=True)
class QuantizationMethod(Method):
    """Base of quantization methods. A subclass writes make_codec (store/codec.py), and schedule if new tokens stay exact."""

    kind: ClassVar[str] = "quantize"
    ignores_budget: ClassVar[bool] = True
    own_rule: ClassVar[str] = "ignored"
    drops_rows: ClassVar[bool] = (
        True  # whether tokens of some rows can be dropped and the others' codes stay as they are
    )
    packs_prompt: ClassVar[bool] = False  # whether the end of a prompt packs everything, whatever the schedule says

    def make_codec(self, layer_idx: int, shape: ModelShape) -> Codec:
        """A fresh codec; one each for K and V."""
        raise NotImplementedError

    def schedule(self) -> Schedule:
        """When exact tokens are packed: at once, by default."""
        return KeepNewest(0)

    def make_store(self, layer_idx: int, shape: ModelShape) -> PackedStore:
        """K and V streams; override where they differ in schedule or codec."""
        k, v = (PackedStream(self.make_codec(layer_idx, shape), self.schedule()) for _ in "kv")
        return PackedStore(k, v)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> QuantizationLayer:
        return QuantizationLayer(layer_idx, shape, self)
