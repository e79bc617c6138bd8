"""A packed store that chooses each token's bit width by the attention it receives from probes."""

from collections.abc import Iterator, Sequence

import torch

from pqcache.kernels.scaling import capped
from pqcache.selective.budget import floor_share
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.layer import LayerContext
from pqcache.store.chosen import chosen_run
from pqcache.store.layout import Run
from pqcache.store.packed import PackedStore, PackedStream, Tile
from pqcache.store.transfer import table

from .mixed_codec import MixedCodec
from .probes import ProbeRule, add_probe_sums
from .widths import Widths, grow


class SalientStore(PackedStore):
    """A packed store that chooses each token's bit width when it packs it, by the attention it received from probes.

    ratio: share of salient tokens among the tokens packed together.
    norm: divisor of a token's sum: "probes", the number of probes that could see it; "full", of queries; "none", 1.
    scope: "head", every KV head has its own ranking; "layer", one ranking by the sum over heads.
    gap: exact tokens that are packed at a time during decoding.
    newest: share of the salient tokens that are the newest of those packed together.
    last_step: of generated tokens only the last before a packing is a probe, as in the released code.
    """

    per_row = ("k", "v", "sums", "seen_by", "query_max")

    def __init__(
        self, k: PackedStream, v: PackedStream, widths: Widths, *, ratio: float, rule: ProbeRule, norm: str, scope: str,
        gap: int, newest: float = 0.0, balance: bool = False, last_step: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(k, v)
        self.widths, self.ratio, self.rule, self.norm, self.scope, self.gap = widths, ratio, rule, norm, scope, gap
        self.newest, self.balance, self.last_step = newest, balance, last_step
        # (n, h_kv, capacity), of the exact tokens, row r's first being token k.body[r]
        self.sums: torch.Tensor = None  # type: ignore[assignment]  # fp32 or wider: attention of the probes
        self.seen_by: torch.Tensor = None  # type: ignore[assignment]  # int32: probes (or queries) that could see the token
        self.query_max: torch.Tensor | None = None  # (n, h_kv, d) fp32: max |q| of the first prompt, until it is packed

    def _reserve(self, tokens: int, like: torch.Tensor, h_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sums is None or self.seen_by is None:
            self.sums = torch.zeros((like.shape[0], h_kv, 0), dtype=accumulator_dtype(like), device=like.device)
            self.seen_by = self.sums.to(torch.int32)
        self.sums, self.seen_by = grow(self.sums, tokens), grow(self.seen_by, tokens)
        return self.sums, self.seen_by

    # -- observing --------------------------------------------------------------------------------------------------

    def sums_from(self, lengths: list[int]) -> int | None:
        """The first of the probes behind which every query is one; None where probes are drawn from all queries alone."""
        if self.rule.strategy in ("special", "random"):
            return None
        first = lengths[0]
        for probe in reversed(self.rule.positions(first)):
            if probe != first - 1:
                break
            first = probe
        return first if first < lengths[0] else None

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        step, n, h_kv = ctx.step, q.shape[0], keys.shape[1]
        body, held = self.k.body or [0] * n, self.lengths or [0] * n
        final = [s + f - t for s, f, t in zip(stored, step.final, step.total, strict=True)]
        sums, seen_by = self._reserve(max(f - b for f, b in zip(final, body, strict=True)), q, h_kv)
        column = torch.arange(sums.shape[2], device=q.device)
        for row, (stop, start) in enumerate(zip(stored, body, strict=True)):
            first = stop - step.counts[row]  # this block's tokens: first .. stop - 1
            probes = [
                held[row] + p for p in self.rule.positions(final[row] - held[row], held[row], self._ids(row, ctx))
            ]
            probes = [p for p in probes if first <= p < stop]
            if probes:
                where = table(probes, q.device)
                new = torch.zeros((h_kv, stop), dtype=sums.dtype, device=q.device)
                if ctx.probs is not None and probes == list(range(stop)):  # attn=standard has computed them
                    new += ctx.probs[row].sum(1, dtype=new.dtype).unflatten(0, (h_kv, -1)).sum(1)
                else:
                    left = probes
                    known = ctx.column_sums
                    if known is not None and known.first == self.sums_from(stored):  # the attention had their logits
                        new += known.sums[row].unflatten(0, (h_kv, -1)).sum(1)
                        left = probes[: len(probes) - (stop - known.first)]
                    queries = q[row].index_select(1, where[: len(left)] - stop + q.shape[2])
                    add_probe_sums(new, queries, keys[row, :, :stop], [p + 1 for p in left], ctx.scaling)
                sums[row, :, : stop - start] += new[:, start:]
            counted = torch.arange(first, stop, device=q.device) if self.norm == "full" else where if probes else None
            if counted is not None:
                earlier = torch.searchsorted(counted, column + start)  # probes before each token, which cannot see it
                seen_by[row] += (len(counted) - earlier).to(torch.int32)
        if self.balance and not any(held):
            self._observe_queries(q, step.counts, h_kv)

    def _ids(self, row: int, ctx: LayerContext) -> torch.Tensor | None:
        """The row's token ids, for special probes; None in a later turn, whose ids are unknown."""
        if self.rule.strategy != "special" or self.k.tail is not None:
            return None
        cache = ctx.cache
        if cache.token_ids is None:
            raise ValueError("probes=special: needs the prompt's tokens, cache.begin(prompt_lengths, token_ids)")
        return cache.token_ids[row, cache.pads[row] :][: ctx.step.final[row]]

    def _observe_queries(self, q: torch.Tensor, counts: list[int], h_kv: int) -> None:
        """Raise `query_max` to the largest |q| of a block's real queries, q (n, h, t, d), per KV head and channel."""
        t, size = q.shape[2], q.float().abs().unflatten(1, (h_kv, -1)).amax(2)
        real = torch.arange(t, device=q.device)[None] >= t - table(counts, q.device)[:, None]
        largest = size.masked_fill(~real[:, None, :, None], 0).amax(2)
        self.query_max = largest if self.query_max is None else torch.maximum(self.query_max, largest)

    def _is_probe(self, row: int) -> bool:
        """Whether the newest exact token of a row is a probe."""
        place = (self.k.tails[row] - 1) % self.gap
        return place in ((self.gap - 1,) if self.last_step else self.rule.positions(self.gap, self.k.body[row]))

    def observe_step(self, q: torch.Tensor, lse: torch.Tensor, scaling: float) -> None:
        """The newest token as a probe of the tokens that are still exact."""
        n, h_kv, width, _ = self.k.tail.shape
        sums, seen_by = self._reserve(max(self.k.tails), q, h_kv)
        is_probe = [self._is_probe(row) for row in range(n)]
        for row, (probe, tail) in enumerate(zip(is_probe, self.k.tails, strict=True)):
            if probe or (self.norm == "full" and not self.last_step):
                seen_by[row, :, :tail] += 1
        if not any(is_probe):
            return
        queries = q.to(sums.dtype).view(n, h_kv, -1, q.shape[3])
        logits = capped(queries @ self.k.tail.to(sums.dtype).transpose(-1, -2) * scaling, scaling)
        above = logits - lse.to(sums.dtype).view(n, h_kv, -1, 1)
        probs = above.clamp(max=0).exp().sum(2)  # (n, h_kv, width); huge logits are rounded differently in a tile
        for row, (probe, tail) in enumerate(zip(is_probe, self.k.tails, strict=True)):
            if probe:
                sums[row, :, :tail] += probs[row, :, width - tail :]

    # -- packing ----------------------------------------------------------------------------------------------------

    def saliency(self, row: int, tokens: int) -> torch.Tensor:
        """Saliency of one row's first `tokens` exact tokens: (h_kv, tokens), or (1, tokens) for scope "layer"."""
        scores = self.sums[row, :, :tokens]
        if self.norm != "none":
            scores = scores / self.seen_by[row, :, :tokens].clamp_min(1)
        return scores.sum(0, keepdim=True) if self.scope == "layer" else scores

    def pack(self, everything: bool = False) -> None:
        h_kv = self.k.heads
        move = list(self.k.tails) if everything else [self.k.schedule(tail) for tail in self.k.tails]
        if not any(move):
            return
        sums, seen_by = self._reserve(max(move), self.k.tail, h_kv)
        coming, salient = [], []
        for row, count in enumerate(move):
            high = count - floor_share(count, 1 - self.ratio)
            newest = torch.arange(count, device=sums.device) >= count - floor_share(high, self.newest)
            scores = self.saliency(row, count).masked_fill(newest, torch.inf)
            order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :high]
            mask = torch.zeros((order.shape[0], count), dtype=torch.bool, device=order.device).scatter_(1, order, True)
            coming.append(mask.expand(h_kv, -1))
            salient.append(high)
        self.widths.announce(coming, salient)
        if self.query_max is not None and isinstance(self.k.codec, MixedCodec):
            self.k.codec.query_max, self.query_max = self.query_max, None
        super().pack(everything)
        rest = max(self.k.tails)
        self.sums, self.seen_by = (x.new_zeros((*x.shape[:2], rest)) for x in (sums, seen_by))
        for row, (count, left) in enumerate(zip(move, self.k.tails, strict=True)):
            self.sums[row, :, :left] = sums[row, :, count : count + left]
            self.seen_by[row, :, :left] = seen_by[row, :, count : count + left]

    def tiles(self, size: int, read: Sequence[int] = ()) -> Iterator[Tile]:
        """The codes of one width after the other, in slot order, unless `read`; then the exact tail. K and V have one order."""
        k, v, tail = self.k.codec, self.v.codec, self.k.tail
        assert isinstance(k, MixedCodec) and isinstance(v, MixedCodec)
        if list(read) == self.lengths:
            return
        for which, subset in enumerate(k.subsets if list(read) != self.k.body else ()):
            slots = 0 if subset.codes is None else subset.codes.shape[2]
            shortest = min((min(filled) for filled in subset.filled), default=0)
            for lo in range(0, slots, size):
                hi = min(lo + size, slots)
                inside = None
                if shortest < hi:
                    filled = table(subset.filled, tail.device)[..., None]
                    inside = torch.arange(lo, hi, device=tail.device) < filled
                yield k.slots(which, lo, hi), v.slots(which, lo, hi), inside
        width = tail.shape[2]
        for lo in range(0, width, size):
            hi = min(lo + size, width)
            inside = None
            if min(self.k.tails) < width:
                column = torch.arange(lo, hi, device=tail.device)
                inside = column >= width - table(self.k.tails, tail.device)[:, None, None]
            yield tail[:, :, lo:hi], self.v.tail[:, :, lo:hi], inside

    def runs(self, exact: bool = False) -> tuple[list[Run], list[int]]:
        """One run per width, in slot order; if `exact`, the tail of even rows. None at all where ranges differ in a width."""
        k, v = self.k.codec, self.v.codec
        assert isinstance(k, MixedCodec) and isinstance(v, MixedCodec)
        runs = []
        for which, subset in enumerate(k.subsets):
            if subset.codes is None or not subset.codes.shape[2]:
                continue
            keys, values = k.width_layout(which), v.width_layout(which)
            if keys is None or values is None:
                return [], [0] * len(self.k.body)
            runs.append(Run(keys, values, subset.filled))
        if not exact or not runs or not self.even() or self.k.body == self.lengths:
            return runs, self.k.body
        keys, values = (stream.stretch(self.k.body[0], self.length, None) for stream in (self.k, self.v))
        runs.append(Run(keys, values, [[self.k.tails[0]] * self.k.heads] * len(self.lengths)))
        return runs, list(self.lengths)

    def _chosen_packed(self, positions: torch.Tensor) -> list[Run] | None:
        """A run per width."""
        k, v = self.k.codec, self.v.codec
        assert isinstance(k, MixedCodec) and isinstance(v, MixedCodec)
        if not self.k.body[0]:
            return []
        salient, slots = self.widths.rank(positions)
        packed = positions < self.k.body[0]
        runs: list[Run] = []
        for which, own in enumerate((packed & ~salient, packed & salient)):
            if not own.any():
                continue
            keys, values = k.width_layout(which), v.width_layout(which)
            run = None if keys is None or values is None else chosen_run(keys, values, slots, own)
            if run is None:
                return None
            runs.append(run)
        return runs

    # -- rows -------------------------------------------------------------------------------------------------------

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        """Exact tokens keep their sums; a packed token that becomes exact again starts from 0."""
        before = self.k.body
        super().retain(indices, counts)
        body = self.k.body
        if self.sums is None or self.seen_by is None or not self.sums.shape[2]:
            return
        old = (self.sums, self.seen_by)
        self.sums, self.seen_by = (x.new_zeros((*x.shape[:2], max(self.k.tails))) for x in old)
        for row, count in enumerate(counts):
            slot = indices[row, :, body[row] : count] - before[row]  # (h_kv, tail)
            for new, x in zip((self.sums, self.seen_by), old, strict=True):
                held = x[row].gather(1, slot.clamp(0, x.shape[2] - 1))
                new[row, :, : count - body[row]] = held.masked_fill(slot < 0, 0)
