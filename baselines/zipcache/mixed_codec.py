"""A codec with two bit widths: salient tokens in more bits, regular ones in fewer, both packed."""

from collections.abc import Sequence

import torch

from pqcache.store.buffer import dense, take_tokens
from pqcache.store.codec import Codec
from pqcache.store.layout import Codes
from pqcache.store.quantizer import (
    LIMIT,
    Quantized,
    dequantize,
    encode,
    finite,
    from_range,
    pack_codes,
    packed_width,
    parameters,
    quantize,
    unpack_codes,
)
from pqcache.store.row_state import RowState
from pqcache.store.transfer import send, table

from .widths import Widths, grow

TILE = 1024  # tokens coded again at a time


def pick(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Entries of x (n, heads, capacity, *rest) at indices (n, H, k), heads a divisor of H: (n, H, k, *rest)."""
    return take_tokens(x, indices.clamp(0, x.shape[2] - 1), indices.shape[1] // x.shape[1])


class Subset(RowState):
    """The tokens of one bit width: codes by slot, and their parameters."""

    per_row = ("codes", "step", "low", "first", "filled")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.codes: torch.Tensor = None  # type: ignore[assignment]  # (n, h_kv, slots, bytes) uint8
        # (n, h_kv, segments, d) by channel; (n, 1 or h_kv, slots, 1) by token; (n, h_kv, slots, d / G) by group; fp16
        self.step: torch.Tensor = None  # type: ignore[assignment]
        self.low: torch.Tensor = None  # type: ignore[assignment]
        # (n, h_kv, segments) int32: each segment's first slot; None if there is one segment
        self.first: torch.Tensor | None = None
        self.filled: list[list[int]] = []  # slots in use, per row and head

    def put(self, name: str, row: int, heads: int, starts: list[int], x: torch.Tensor) -> None:
        """x (1 or heads, count, rest) into `name` of one row, each head from its own slot on."""
        data = getattr(self, name)
        stop = max(starts) + x.shape[1]
        data = grow(data, stop)
        if len(set(starts)) == 1:
            data[row, :, starts[0] : stop] = x
        else:
            for head, start in enumerate(starts):
                data[row, head, start : start + x.shape[1]] = x[min(head, x.shape[0] - 1)]
        setattr(self, name, data)


class MixedCodec(Codec):
    """Salient tokens in `bits[0]` bits, regular ones in `bits[1]`, each width with parameters of its own.

    by: which entries share one (step, low).

    - "channel": each channel of a KV head, over the tokens of a width
    - "token": each token, over all channels and KV heads. Saliency differs per KV head, so this is the j-th token of the width in
      each head
    - "cst": as "token", after every channel was divided by sqrt(max |x|) over all tokens of both widths
    - "group": each `group` consecutive channels of a token

    segment: matters with "channel" and "cst". False: when new tokens widen the ranges, the old ones are coded again. A token
        keeps its bit width, and its codes where nothing widened. True: the tokens of each append have ranges of their own.
    balanced: channels are divided by sqrt(max |x| / max |q|) of the first prompt instead (for keys).
    widths: shared by K and V. owner: whether this codec keeps it up to date; K's does.
    """

    per_row = ("subsets", "scale", "owned")

    def __init__(
        self, bits: tuple[int, int], by: str, widths: Widths, *, owner: bool, segment: bool = False, group: int = 32
    ) -> None:
        self.by, self.widths, self.segment, self.group = by, widths, segment, group
        self.owned = widths if owner else None
        self.bits = bits
        self.balanced = False
        self.query_max: torch.Tensor | None = None  # (n, h_kv, d): max |q| of a prompt that is to be packed
        self.reset()

    def reset(self) -> None:
        self.subsets = [Subset(self.bits[1]), Subset(self.bits[0])]  # regular, salient
        self.scale: torch.Tensor | None = None  # (n, h_kv, segments, d) fp16: channels are divided by it
        self.dtype, self.d = torch.float32, 0

    def clear(self) -> None:
        self.reset()
        if self.owned is not None:
            self.widths.clear()

    # -- packing ----------------------------------------------------------------------------------------------------

    def append(self, x: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        n, h_kv, t, self.d = x.shape
        self.dtype = x.dtype
        if self.owned is not None:
            self.widths.append(starts, counts)
        rows = [x[row, :, t - count :].detach() for row, count in enumerate(counts)]
        scale = self._scale(rows)  # (n, h_kv, d) of the new tokens, or None
        for which, subset in enumerate(self.subsets):
            new = [self._members(rows[r], r, bool(which)) for r in range(n)]
            if subset.codes is None and not any(part.shape[1] for part in new):
                continue
            if subset.codes is None:
                subset.codes = x.new_zeros((n, h_kv, 0, packed_width(self.d, subset.bits)), dtype=torch.uint8)
                subset.filled = [[0] * h_kv for _ in range(n)]
            if scale is not None:
                new = [part.float() / scale[r][:, None].float() for r, part in enumerate(new)]
            if self.by == "channel":
                self._append_by_channel(subset, new)
            else:
                self._append_by_token(subset, new)
            for r, part in enumerate(new):
                subset.filled[r] = [start + part.shape[1] for start in subset.filled[r]]
        if self.owned is None:
            self.widths.announce([], [])  # V is packed after K: nobody needs the announcement any more

    def _members(self, x: torch.Tensor, row: int, salient: bool) -> torch.Tensor:
        """The new tokens of one width, in order of position: x (h_kv, count, d) -> (h_kv, members, d)."""
        mask = self.widths.coming[row] == salient
        members = self.widths.salient[row] if salient else x.shape[1] - self.widths.salient[row]
        order = mask.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[:, :members]
        return take_tokens(dense(x[None]), order[None])[0]

    def _scale(self, rows: list[torch.Tensor]) -> torch.Tensor | None:
        """Divisors of the new tokens' channels, (n, h_kv, d); where they grew, old tokens are packed again."""
        if self.by != "cst" and not self.balanced:
            return None
        held = self.scale
        if self.balanced and held is not None:  # measured at the first prompt only
            return held[:, :, 0]
        h_kv = rows[0].shape[0]
        size = [x.float().abs().amax(1) if x.shape[1] else x.new_zeros((h_kv, self.d)).float() for x in rows]
        new = torch.stack(size)
        if self.balanced and self.query_max is not None:
            new = (new / self.query_max).nan_to_num(0, 0, 0)
            self.query_max = None
        new = new.clamp(max=LIMIT).sqrt().half()
        if held is None or self.segment:
            new = torch.where(new == 0, torch.ones_like(new), new)
            self.scale = new[:, :, None] if held is None else torch.cat([held, new[:, :, None]], 2)
            if held is not None:
                for subset in self.subsets:
                    self._open_segment(subset, len(rows), h_kv)
            return new
        old = held[:, :, 0]
        new = torch.maximum(old, new)
        self.scale = new[:, :, None]
        changed = (new != old).flatten(1).any(1)[:, None, None, None]
        for subset in self.subsets:
            self._rescale(subset, old[:, :, None].float() / new[:, :, None].float(), changed)
        return new

    def _open_segment(self, subset: Subset, n: int, h_kv: int) -> None:
        """Slots from here on belong to a new segment."""
        device = self.widths.coming[0].device
        start = send(subset.filled or [[0] * h_kv] * n, torch.int32, device)[..., None]
        old = torch.zeros_like(start) if subset.first is None else subset.first
        subset.first = torch.cat([old, start], 2)

    def _append_by_token(self, subset: Subset, new: list[torch.Tensor]) -> None:
        h_kv = new[0].shape[0]
        for row, part in enumerate(new):
            if self.by == "group":
                packed = quantize(part.unflatten(-1, (-1, self.group)), subset.bits)
                codes, step, low = packed.codes.flatten(-2), packed.step[..., 0], packed.low[..., 0]
            else:
                codes, step, low = quantize(part, subset.bits, (0, 2))
            if subset.step is None or subset.low is None:
                subset.step = step.new_zeros((len(new), step.shape[0], 0, step.shape[2]), dtype=torch.float16)
                subset.low = torch.zeros_like(subset.step)
            starts = subset.filled[row]
            subset.put("codes", row, h_kv, starts, pack_codes(codes, subset.bits))
            subset.put("step", row, h_kv, starts, step)
            subset.put("low", row, h_kv, starts, low)

    def _append_by_channel(self, subset: Subset, new: list[torch.Tensor]) -> None:
        n, h_kv = len(new), new[0].shape[0]
        ranges = []
        for part in new:
            if part.shape[1]:
                ranges.append(parameters(part[None], subset.bits, 2))
            else:
                ranges.append((torch.zeros((1, h_kv, 1, self.d), dtype=torch.float16, device=part.device),) * 2)
        step, low = (torch.cat(list(x)) for x in zip(*ranges, strict=True))
        if subset.step is None or subset.low is None:
            subset.step, subset.low = step, low
        elif self.segment:
            self._open_segment(subset, n, h_kv)
            subset.step, subset.low = torch.cat([subset.step, step], 2), torch.cat([subset.low, low], 2)
        else:
            step, low = self._widen(subset, new)
        for row, part in enumerate(new):
            codes = encode(part, step[row], low[row], subset.bits)
            subset.put("codes", row, h_kv, subset.filled[row], pack_codes(codes, subset.bits))

    def _widen(self, subset: Subset, new: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranges that hold old and new tokens; the old ones are packed again under them, tile by tile."""
        top = 2**subset.bits - 1
        minimum, maximum = subset.low.float(), subset.low.float() + top * subset.step.float()
        held = table([any(filled) for filled in subset.filled], minimum.device)[:, None, None, None]
        inside = held.expand_as(minimum).clone()
        minimum, maximum = minimum.masked_fill(~held, torch.inf), maximum.masked_fill(~held, -torch.inf)
        for row, part in enumerate(new):
            if part.shape[1]:
                small, large = part.float().amin(1, keepdim=True), part.float().amax(1, keepdim=True)
                inside[row] &= (small >= minimum[row]) & (large <= maximum[row])
                minimum[row], maximum[row] = torch.minimum(minimum[row], small), torch.maximum(maximum[row], large)
        step, low = from_range(minimum, maximum, subset.bits)
        step, low = torch.where(inside, subset.step, step), torch.where(inside, subset.low, low)
        safe = torch.where(step == 0, torch.ones_like(step), step).float()
        shift = subset.low.float() - low.float()
        for start in range(0, subset.codes.shape[2], TILE):
            old = unpack_codes(subset.codes[:, :, start : start + TILE], subset.bits, self.d).float()
            codes = ((old * subset.step.float() + shift) / safe).round().clamp(0, top)
            codes = torch.where(step == 0, torch.zeros_like(codes), codes).to(torch.uint8)
            subset.codes[:, :, start : start + TILE] = pack_codes(codes, subset.bits)
        subset.step, subset.low = step, low
        return step, low

    def _rescale(self, subset: Subset, ratio: torch.Tensor, changed: torch.Tensor) -> None:
        """Code old tokens again after their channels' divisors grew: ratio (n, h_kv, 1, d) = old / new, rows that `changed`."""
        if subset.codes is None or subset.step is None or subset.low is None:
            return
        for start in range(0, subset.codes.shape[2], TILE):
            span = slice(start, start + TILE)
            packed, step, low = subset.codes[:, :, span], subset.step[:, :, span], subset.low[:, :, span]
            codes = unpack_codes(packed, subset.bits, self.d)
            x = dequantize(Quantized(codes, step, low), torch.float32) * ratio
            again = quantize(x, subset.bits, (1, 3) if step.shape[1] == 1 else 3)
            subset.codes[:, :, span] = torch.where(changed, pack_codes(again.codes, subset.bits), packed)
            subset.step[:, :, span] = torch.where(changed, again.step, step)
            subset.low[:, :, span] = torch.where(changed, again.low, low)

    # -- reading ----------------------------------------------------------------------------------------------------

    def tile(self, lo: int, hi: int) -> torch.Tensor:
        marks = self.widths.marks
        return self.take(torch.arange(lo, hi, device=marks.device).expand(len(marks), 1, -1))

    def take(self, indices: torch.Tensor, group: int = 1) -> torch.Tensor:
        salient, slot = self.widths.rank(indices, group)
        regular, high = (self._decode(subset, slot) for subset in self.subsets)
        if regular is not None and high is not None:
            return torch.where(salient[..., None], high, regular)
        only = high if regular is None else regular
        assert only is not None
        return only

    def slots(self, which: int, lo: int, hi: int) -> torch.Tensor:
        """Slots lo .. hi-1 of one width (0 regular, 1 salient), decoded in slot order: (n, h_kv, hi - lo, d)."""
        subset = self.subsets[which]
        n, h_kv = subset.codes.shape[:2]
        span = slice(lo, hi) if self.by != "channel" else slice(None)
        step, low = subset.step[:, :, span], subset.low[:, :, span]
        slot = torch.arange(lo, hi, device=step.device).expand(n, h_kv, -1)
        if self.by == "channel":
            step, low = self._of_segment(step, subset, slot), self._of_segment(low, subset, slot)
        return self._values(subset, subset.codes[:, :, lo:hi], step, low, slot)

    def width_layout(self, which: int) -> Codes | None:
        """How the codes of one width (0 regular, 1 salient) are stored, in slot order.

        None where segments have own ranges, or channels a step and a factor.
        """
        subset = self.subsets[which]
        n, h_kv, slots = subset.codes.shape[:3]
        by_channel = self.by == "channel"
        if by_channel and self.scale is not None:
            return None
        if any(x is not None and x.shape[2] > 1 for x in (self.scale, subset.step if by_channel else None)):
            return None
        if by_channel:
            return Codes(subset.bits, self.d, subset.codes, None, None, subset.step, subset.low, max(1, slots))
        step, low = (x.expand(n, h_kv, -1, -1) for x in (subset.step, subset.low))
        return Codes(subset.bits, self.d, subset.codes, step, low, self.scale, None, max(1, slots))

    def _decode(self, subset: Subset, slot: torch.Tensor) -> torch.Tensor | None:
        """The tokens in slots (n, H, k) of one width: (n, H, k, d); None if there are none of this width."""
        if subset.codes is None or subset.step is None or subset.low is None or not subset.codes.shape[2]:
            return None
        slot = slot.clamp(0, subset.codes.shape[2] - 1)
        by_slot = self.by != "channel"
        step, low = (pick(x, slot) if by_slot else self._of_segment(x, subset, slot) for x in (subset.step, subset.low))
        return self._values(subset, pick(subset.codes, slot), step, low, slot)

    def _values(
        self, subset: Subset, packed: torch.Tensor, step: torch.Tensor, low: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        """Packed codes (n, H, k, bytes) of slots (n, H, k) under their parameters: (n, H, k, d)."""
        codes = unpack_codes(packed, subset.bits, self.d)
        if self.by == "group":
            codes = codes.unflatten(-1, (-1, self.group))
            x = dequantize(Quantized(codes, step[..., None], low[..., None]), torch.float32).flatten(-2)
        else:
            x = dequantize(Quantized(codes, step, low), torch.float32)
        if self.scale is not None:
            x = x * self._of_segment(self.scale, subset, slot).float()
        return finite(x, self.dtype)

    def _of_segment(self, x: torch.Tensor, subset: Subset, slot: torch.Tensor) -> torch.Tensor:
        """x (n, h_kv, segments, d) of each slot (n, H, k): (n, H, 1 or k, d)."""
        if x.shape[2] == 1 or subset.first is None:
            return x if slot.shape[1] == x.shape[1] else x.repeat_interleave(slot.shape[1] // x.shape[1], 1)
        first = subset.first.long().repeat_interleave(slot.shape[1] // x.shape[1], 1)
        return pick(x, torch.searchsorted(first, slot.contiguous(), right=True) - 1)

    # -- rows and bytes ---------------------------------------------------------------------------------------------

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        salient, slot = self.widths.rank(indices)
        column = torch.arange(indices.shape[2], device=indices.device)
        valid = column < table(counts, indices.device)[:, None, None]
        for which, subset in enumerate(self.subsets):
            if subset.codes is None or subset.step is None or subset.low is None:
                continue
            mine = valid & (salient == bool(which))
            subset.filled = mine.sum(-1).tolist()
            longest = max(max(filled) for filled in subset.filled)
            order = mine.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :longest]
            slots = slot.gather(2, order)
            if subset.first is not None:  # a segment begins after the kept tokens of the ones before
                earlier = (slot[..., None, :] < subset.first[..., None]) & mine[..., None, :]
                subset.first = earlier.sum(-1, dtype=torch.int32)
            if self.by != "channel":
                subset.step, subset.low = (
                    pick(x, slots) if longest else x[:, :, :0].expand(-1, slots.shape[1], -1, -1).clone()
                    for x in (subset.step, subset.low)
                )
            subset.codes = pick(subset.codes, slots) if longest else subset.codes[:, :, :0].clone()
        if self.owned is not None:
            self.widths.retain(indices, counts)
