"""KVCrush with representatives in few bits: the tokens that represent evicted ones are packed, important ones stay exact.

    python run.py method=kvcrush_mixed method.bits=2 budget=0.2

A composition of KVCrush (arXiv 2503.00022) and KIVI's codes (arXiv 2402.02750). Keys are coded by channel: in some models a few
channels are large in every token. Coded by token, they would leave almost none of the few code values to the other channels.

Deviations from the parts alone:
- A new turn decodes the representatives, attends to them, and chooses and packs again from everything held. A token that was
  packed stays as coarse as it was, even if it is important now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from transformers import PreTrainedConfig

from pqcache.fields import Positive, added
from pqcache.selective.attention import row_mask
from pqcache.selective.eviction import EvictionLayer, kept_of
from pqcache.selective.evictor import join_rows
from pqcache.selective.layer import LayerContext
from pqcache.selective.quantization import attend_everything
from pqcache.selective.scorer import Prompt
from pqcache.selective.shape import ModelShape
from pqcache.selective.staged import exact_copy
from pqcache.store.base import Store
from pqcache.store.codec import Codec, TokenCodec
from pqcache.store.layout import Run
from pqcache.store.packed import KeepNewest, PackedStore, PackedStream, Tile
from pqcache.store.resident import ResidentStore

from ..kivi import ChannelCodec
from ..kvcrush import KVCrush


class SplitStore(Store):
    """K and V of entries in a packed part, which comes first in every row, and an exact one, which grows."""

    per_row = ("packed", "exact")

    def __init__(self, packed: PackedStore, exact: ResidentStore) -> None:
        self.packed, self.exact = packed, exact

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [a + b for a, b in zip(self.packed.lengths, self.exact.lengths, strict=True)]

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.exact.append(k, v)

    def runs(self, exact: bool = False) -> tuple[list[Run], list[int]]:
        """See PackedStore.runs: of the packed part."""
        return self.packed.runs(exact)

    def tiles(self, size: int, read: Sequence[int] = ()) -> Iterator[Tile]:
        """See PackedStore.tiles; the exact part is a tile of its own, not a copy."""
        yield from self.packed.tiles(size, read)
        keys, values = self.exact.view()
        yield keys, values, row_mask(self.exact.lengths, keys.shape[2], keys.device)

    def observe_step(self, q: torch.Tensor, lse: torch.Tensor, scaling: float) -> None:
        """See PackedStore."""

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything, decoded: (n, h_kv, length, d)."""
        out = []
        for codes, exact in zip(self.packed.view(), self.exact.view(), strict=True):
            both = exact.new_zeros((*exact.shape[:2], self.length, exact.shape[3]))
            for row, (a, b) in enumerate(zip(self.packed.lengths, self.exact.lengths, strict=True)):
                both[row, :, :a] = codes[row, :, :a]
                both[row, :, a : a + b] = exact[row, :, :b]
            out.append(both)
        return out[0], out[1]


class MixedLayer(EvictionLayer):
    """Holds what KVCrush keeps; entries are stored representatives first."""

    method: KVCrushMixed

    def clear(self) -> None:
        super().clear()
        self.packed: list[int] = []  # representatives per row of the prompt that is being settled

    def pick(self, prompt: Prompt) -> tuple[torch.Tensor, list[int]]:
        rows, self.packed = [], []
        for parts in self.method.divide(prompt):
            important, representatives = (part.nonzero()[:, 1].view(part.shape[0], -1) for part in parts)
            rows.append(torch.cat([representatives, important], 1))
            self.packed.append(representatives.shape[1])
        return join_rows(rows)

    def take_over(
        self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], slots: torch.Tensor, counts: list[int]
    ) -> None:
        n, h_kv, width = slots.shape
        exact = [count - packed for count, packed in zip(counts, self.packed, strict=True)]
        late = slots.new_zeros((n, h_kv, max(exact)))
        for row, (packed, count) in enumerate(zip(self.packed, counts, strict=True)):
            late[row, :, : count - packed] = slots[row, :, packed:count]
        codes = self.method.make_store()
        codes.load(*kept_of(k, v, slots[:, :, : max(self.packed)], self.packed).view(), self.packed)
        codes.pack(everything=True)
        self.store: Any = SplitStore(codes, kept_of(k, v, late, exact))

    def unpack(self) -> ResidentStore:
        self.kept = list(self.store.lengths)
        copy = exact_copy(self.store)
        self.sort(copy)
        return copy

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        self.add(k, v, ctx)
        out = attend_everything(self, self.store, q, ctx)
        self.refresh(q, ctx)
        return out


@dataclass(kw_only=True)
class KVCrushMixed(KVCrush):
    """Keeps the tokens that KVCrush keeps. Sinks, windows, important and generated tokens are exact.

    The budget counts tokens, whatever their bits: the same tokens as under KVCrush, in fewer bytes.
    """

    name: ClassVar[str] = "kvcrush_mixed"
    kind: ClassVar[str] = "evict + quantize"
    released: ClassVar[str] = ""
    composable: ClassVar[bool] = False  # its layer stores representatives apart

    # bits of the representatives' codes, for K and V
    bits: Annotated[int, 1, 8] = 4
    # numbers that share a step and a minimum (fp16): channels of a token; with keys=channel also representatives of a key's
    # channel. null: all channels of a KV head, and 32 representatives
    group: Positive | None = 32
    # which numbers of keys share them: those of a channel, as in KIVI, or those of a token. With channel, representatives that
    # do not fill a group keep their exact keys
    keys: Literal["channel", "token"] = added("channel", absent="token")

    @property
    def keeps_rule(self) -> bool:
        return not self.ranks_by_steps  # packed tokens are attended without their probabilities

    def check_model(self, config: PreTrainedConfig) -> None:
        super().check_model(config)
        d = ModelShape.of(config).unit
        self.require(
            "group", self.group is None or d % self.group == 0, f"a divisor of the head dimension {d}, or null"
        )

    def make_store(self) -> PackedStore:
        """For representatives: packed once, so without room for more."""
        keys: Codec
        keys, values = (TokenCodec(self.bits, self.group, step=1) for _ in "kv")
        if self.keys == "channel":
            keys = ChannelCodec(self.bits, self.group or 32, step=1)
        return PackedStore(PackedStream(keys, KeepNewest(0)), PackedStream(values, KeepNewest(0)))

    def make_layer(self, layer_idx: int, shape: ModelShape) -> MixedLayer:
        return MixedLayer(layer_idx, shape, self)
