"""Which tokens deserve more bits: the attention they get from a few probe queries, and a coded store that asks for it."""

from __future__ import annotations

import functools
import string
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedTokenizerBase

from baselines.zipcache.accounting import mean_bits, published_ratio
from baselines.zipcache.mixed_store import MixedCodec, Widths, grow
from pqcache.selective.budget import floor_share
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.layer import LayerContext
from pqcache.selective.quantization import QuantizationMethod
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.store.packed import ExactCodec, PackedStore, PackedStream, pack_all_but

GRANULARITIES = {  # name -> how K and V are cut, see MixedCodec
    "channel-cst": ("channel", "cst"),
    "channel-token": ("channel", "token"),
    "token": ("token", "token"),
    "group": ("group", "group"),
}
RECOMPRESS = ("whole", "segment")
PROBES = ("random_recent", "random", "recent", "special", "all")
BLOCK = 128  # probes whose logits exist at a time


@dataclass(frozen=True)
class ProbeRule:
    """Which queries are probes. recent, random: shares of the tokens; the other strategies take the sum of the two."""

    strategy: str = "random_recent"
    recent: float = 0.05
    random: float = 0.05
    seed: int = 0
    special_ids: tuple[int, ...] = ()

    def positions(self, s: int, start: int = 0, token_ids: torch.Tensor | None = None) -> tuple[int, ...]:
        """Probes among s consecutive tokens, the first of them the row's token `start`: ascending, in 0 .. s-1.

        They depend on s and start alone (and, for special tokens, on token_ids (s,), without which they are random and
        recent), so layers, neighbours and chunks do not change them.
        """
        if self.strategy == "special" and token_ids is not None:
            wanted = torch.tensor(self.special_ids, device=token_ids.device)
            found = torch.isin(token_ids, wanted).nonzero().flatten().tolist()
            if found:
                most = max(1, floor_share(s, self.recent + self.random))
                order = torch.randperm(len(found), generator=self._generator(start)).tolist()[:most]
                return tuple(sorted(found[i] for i in order))
        return _positions(self.strategy, self.recent, self.random, self.seed, s, start)

    def _generator(self, start: int) -> torch.Generator:
        return _generator(self.seed, start)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the special tokens, and of those whose text is punctuation alone (Unicode's, and ASCII's with its symbols)."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    marks = [
        i
        for i, text in enumerate(texts)
        if text.strip() and all(c in string.punctuation or unicodedata.category(c)[0] == "P" for c in text.strip())
    ]
    return tuple(sorted({*marks, *tokenizer.all_special_ids}))


def _generator(seed: int, start: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 2_000_003 + start)


@functools.lru_cache(maxsize=256)
def _positions(strategy: str, recent: float, random: float, seed: int, s: int, start: int) -> tuple[int, ...]:
    if strategy == "all":
        return tuple(range(s))
    if strategy == "recent":
        recent, random = recent + random, 0.0
    elif strategy == "random":
        recent, random = 0.0, recent + random
    first = floor_share(s, 1 - recent)  # the recent ones are first .. s-1
    count = min(first, floor_share(s, random))
    if first == s:
        count = max(1, count)
    drawn = torch.randperm(first, generator=_generator(seed, start)).tolist()[:count] if count else []
    return (*sorted(drawn), *range(first, s))


@torch.no_grad()
def add_probe_sums(sums: torch.Tensor, q: torch.Tensor, k: torch.Tensor, seen: Sequence[int], scaling: float) -> None:
    """sums (h_kv, m) += the attention of probes q (h, p, d) to keys k (h_kv, m, d), summed over each group's query heads.

    Probe i sees the first seen[i] keys; seen ascends. One block of probes of one KV head exists at a time.
    """
    h_kv, g = k.shape[0], q.shape[0] // k.shape[0]
    for start in range(0, len(seen), BLOCK):
        block = seen[start : start + BLOCK]
        hidden = torch.arange(block[-1], device=k.device)[None] >= torch.tensor(block, device=k.device)[:, None]
        for head in range(h_kv):
            queries = q[head * g : (head + 1) * g, start : start + BLOCK].to(sums.dtype) * scaling
            logits = queries @ k[head, : block[-1]].to(sums.dtype).T  # (g, b, m)
            sums[head, : block[-1]] += logits.masked_fill_(hidden, -torch.inf).softmax(-1).sum((0, 1))


class SalientStore(PackedStore):
    """A coded store that chooses each token's bit width when it packs it: by the attention of probes since it came.

    ratio: share of salient tokens of every batch that is packed. norm: what a token's sum is divided by: "probes", how many
    probes could see it; "full", how many queries could; "none". scope: "head", every KV head ranks its own; "layer", one
    ranking by the sum over heads. gap: exact tokens that are packed at a time during decoding.
    """

    def __init__(
        self, k: PackedStream, v: PackedStream, widths: Widths, *, ratio: float, rule: ProbeRule, norm: str, scope: str,
        gap: int, balance: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(k, v)
        self.widths, self.ratio, self.rule, self.norm, self.scope, self.gap = widths, ratio, rule, norm, scope, gap
        self.balance = balance
        # of the tokens that are not packed yet, row r's first one being token k.body[r]; (n, h_kv, capacity)
        self.sums: torch.Tensor | None = None  # fp32 or wider: attention of the probes
        self.asked: torch.Tensor | None = None  # int32: what the sums are divided by
        self.query_max: torch.Tensor | None = None  # (n, h_kv, d) fp32, while the first prompt comes in

    def _reserve(self, tokens: int, like: torch.Tensor, h_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sums is None or self.asked is None:
            self.sums = torch.zeros((like.shape[0], h_kv, 0), dtype=accumulator_dtype(like), device=like.device)
            self.asked = self.sums.to(torch.int32)
        self.sums, self.asked = grow(self.sums, tokens), grow(self.asked, tokens)
        return self.sums, self.asked

    # -- observing --------------------------------------------------------------------------------------------------

    def observe(self, q: torch.Tensor, keys: torch.Tensor, stored: list[int], ctx: LayerContext) -> None:
        step, n, h_kv = ctx.step, q.shape[0], keys.shape[1]
        body, held = self.k.body or [0] * n, self.lengths or [0] * n
        final = [s + f - t for s, f, t in zip(stored, step.final, step.total, strict=True)]
        sums, asked = self._reserve(max(f - b for f, b in zip(final, body, strict=True)), q, h_kv)
        column = torch.arange(sums.shape[2], device=q.device)
        for row, (stop, start) in enumerate(zip(stored, body, strict=True)):
            first = stop - step.counts[row]  # this block's tokens: first .. stop - 1
            probes = [
                held[row] + p for p in self.rule.positions(final[row] - held[row], held[row], self._ids(row, ctx))
            ]
            probes = [p for p in probes if first <= p < stop]
            if probes:
                where = torch.tensor(probes, device=q.device)
                new = torch.zeros((h_kv, stop), dtype=sums.dtype, device=q.device)
                queries = q[row].index_select(1, where - stop + q.shape[2])
                if ctx.probs is not None and len(probes) == stop:  # standard attention has them at hand
                    new += ctx.probs[row].sum(1, dtype=new.dtype).unflatten(0, (h_kv, -1)).sum(1)
                else:
                    add_probe_sums(new, queries, keys[row, :, :stop], [p + 1 for p in probes], ctx.scaling)
                sums[row, :, : stop - start] += new[:, start:]
            counted = torch.arange(first, stop, device=q.device) if self.norm == "full" else where if probes else None
            if counted is not None:
                asked[row] += (column[None] <= (counted - start)[:, None]).sum(0, dtype=torch.int32)
        if self.balance and not any(held):
            self._observe_queries(q, step.counts, h_kv)

    def _ids(self, row: int, ctx: LayerContext) -> torch.Tensor | None:
        """The row's tokens, where special ones are wanted; of a later turn nobody tells them."""
        if self.rule.strategy != "special" or self.k.tail is not None:
            return None
        cache = ctx.cache
        if cache.token_ids is None:
            raise ValueError("probes=special: needs the prompt's tokens, cache.begin(prompt_lengths, token_ids)")
        return cache.token_ids[row, cache.pads[row] :][: ctx.step.final[row]]

    def _observe_queries(self, q: torch.Tensor, counts: list[int], h_kv: int) -> None:
        t, size = q.shape[2], q.float().abs().unflatten(1, (h_kv, -1)).amax(2)
        real = torch.arange(t, device=q.device)[None] >= t - torch.tensor(counts, device=q.device)[:, None]
        largest = size.masked_fill(~real[:, None, :, None], 0).amax(2)
        self.query_max = largest if self.query_max is None else torch.maximum(self.query_max, largest)

    def observe_step(self, q: torch.Tensor, lse: torch.Tensor, ctx: LayerContext) -> None:
        """The newest token as a probe of the tokens that are still exact."""
        assert self.k.tail is not None
        n, h_kv, width, _ = self.k.tail.shape
        sums, asked = self._reserve(max(self.k.tails), q, h_kv)
        asks = [
            (tail - 1) % self.gap in self.rule.positions(self.gap, body)
            for body, tail in zip(self.k.body, self.k.tails, strict=True)
        ]
        for row, (ask, tail) in enumerate(zip(asks, self.k.tails, strict=True)):
            if ask or self.norm == "full":
                asked[row, :, :tail] += 1
        if not any(asks):
            return
        queries = q.to(sums.dtype).view(n, h_kv, -1, q.shape[3])
        logits = queries @ self.k.tail.to(sums.dtype).transpose(-1, -2) * ctx.scaling
        above = logits - lse.to(sums.dtype).view(n, h_kv, -1, 1)
        probs = above.clamp(max=0).exp().sum(2)  # (n, h_kv, width); huge logits are rounded differently in a tile
        for row, (ask, tail) in enumerate(zip(asks, self.k.tails, strict=True)):
            if ask:
                sums[row, :, :tail] += probs[row, :, width - tail :]

    # -- packing ----------------------------------------------------------------------------------------------------

    def saliency(self, row: int, tokens: int) -> torch.Tensor:
        """Of one row's first `tokens` tokens that are not packed yet: (h_kv, tokens), or (1, tokens) for scope "layer"."""
        assert self.sums is not None and self.asked is not None
        scores = self.sums[row, :, :tokens]
        if self.norm != "none":
            scores = scores / self.asked[row, :, :tokens].clamp_min(1)
        return scores.sum(0, keepdim=True) if self.scope == "layer" else scores

    def pack(self, everything: bool = False) -> None:
        assert self.k.tail is not None
        h_kv = self.k.heads
        move = list(self.k.tails) if everything else [self.k.schedule(tail) for tail in self.k.tails]
        if not any(move):
            return
        sums, asked = self._reserve(max(move), self.k.tail, h_kv)
        coming, salient = [], []
        for row, count in enumerate(move):
            most = count - floor_share(count, 1 - self.ratio)
            order = self.saliency(row, count).sort(dim=-1, descending=True, stable=True).indices[:, :most]
            mask = torch.zeros((order.shape[0], count), dtype=torch.bool, device=order.device).scatter_(1, order, True)
            coming.append(mask.expand(h_kv, -1))
            salient.append(most)
        self.widths.announce(coming, salient)
        if self.query_max is not None and isinstance(self.k.codec, MixedCodec):
            self.k.codec.query_max, self.query_max = self.query_max, None
        super().pack(everything)
        rest = max(self.k.tails)
        self.sums, self.asked = (x.new_zeros((*x.shape[:2], rest)) for x in (sums, asked))
        for row, (count, left) in enumerate(zip(move, self.k.tails, strict=True)):
            self.sums[row, :, :left] = sums[row, :, count : count + left]
            self.asked[row, :, :left] = asked[row, :, count : count + left]

    def tiles(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Width after width as the codes lie, then the exact tail: K and V are in the same order, and nothing is looked up."""
        k, v, tail = self.k.codec, self.v.codec, self.k.tail
        assert isinstance(k, MixedCodec) and isinstance(v, MixedCodec) and tail is not None and self.v.tail is not None
        for which, subset in enumerate(k.subsets):
            slots = 0 if subset.codes is None else subset.codes.shape[2]
            shortest = min((min(filled) for filled in subset.filled), default=0)
            for lo in range(0, slots, size):
                hi = min(lo + size, slots)
                inside = None
                if shortest < hi:
                    filled = torch.tensor(subset.filled, device=tail.device)[..., None]
                    inside = torch.arange(lo, hi, device=tail.device) < filled
                yield k.slots(which, lo, hi), v.slots(which, lo, hi), inside
        width = tail.shape[2]
        for lo in range(0, width, size):
            hi = min(lo + size, width)
            column = torch.arange(lo, hi, device=tail.device)
            inside = None
            if min(self.k.tails) < width:
                inside = column >= width - torch.tensor(self.k.tails, device=tail.device)[:, None, None]
            yield tail[:, :, lo:hi], self.v.tail[:, :, lo:hi], inside

    # -- rows -------------------------------------------------------------------------------------------------------

    def retain(self, indices: torch.Tensor, counts: Sequence[int]) -> None:
        """What is not packed yet keeps what probes said of it; a packed token that becomes exact again starts from nothing."""
        before = self.k.body
        super().retain(indices, counts)
        body = self.k.body
        if self.sums is None or self.asked is None or not self.sums.shape[2]:
            return
        old = (self.sums, self.asked)
        self.sums, self.asked = (x.new_zeros((*x.shape[:2], max(self.k.tails))) for x in old)
        for row, count in enumerate(counts):
            slot = indices[row, :, body[row] : count] - before[row]  # (h_kv, tail)
            for new, x in zip((self.sums, self.asked), old, strict=True):
                known = x[row].gather(1, slot.clamp(0, x.shape[2] - 1))
                new[row, :, : count - body[row]] = known.masked_fill(slot < 0, 0)

    def map_rows(self, index: torch.Tensor) -> None:
        super().map_rows(index)
        for name in ("sums", "asked", "query_max"):
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, x.index_select(0, index.to(x.device)))

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        own = [x for x in (self.sums, self.asked, self.query_max) if x is not None]
        return {"device": super().tensors()["device"] + own}


@dataclass(kw_only=True)
class SalientMethod(QuantizationMethod):
    """Base of methods that keep salient tokens in `bits_high` bits and regular ones in `bits_low`, both packed.

    The budget is the share of 16 bits that the codes of a token take on average, so it gives the share of salient tokens:
    0.2 is 3.2 bits, at 4 and 2 bits 60 % salient ones. 1.0 keeps everything exact. saliency_ratio: that share, spelled out;
    it must agree with the budget.
    granularity: which numbers share a pair of fp16 parameters, keys before values: "channel-cst" (a channel over the tokens of
    a width; a token, after its channels were divided by sqrt(max |v|)), "channel-token", "token", "group" (`group` channels
    of a token).
    gap: tokens generated before they are packed together; exact until then. recompress: "whole" codes old tokens again where
    new ones widen a range, and keeps their bit widths; "segment" gives the tokens packed together ranges of their own.
    scope: one ranking per KV head ("head") or per layer ("layer"). seed: of random probes.
    """

    ignores_budget: ClassVar[bool] = False
    packs_prompt: ClassVar[bool] = True

    bits_high: int = 4
    bits_low: int = 2
    saliency_ratio: float | None = None
    granularity: str = "channel-cst"
    group: int = 32
    gap: int = 100
    recompress: str = "whole"
    scope: str = "head"
    seed: int = 0

    def validate(self) -> None:
        self.require("bits_high", 2 <= self.bits_high <= 8, "an int in 2..8")
        self.require("bits_low", 1 <= self.bits_low < self.bits_high, f"an int >= 1 below bits_high={self.bits_high}")
        self.require_one_of("granularity", tuple(GRANULARITIES))
        self.require("group", self.group >= 1, "an int >= 1")
        self.require("gap", self.gap >= 1, "an int >= 1")
        self.require_one_of("recompress", RECOMPRESS)
        self.require_one_of("scope", ("head", "layer"))
        self.require("seed", self.seed >= 0, "an int >= 0")

    def check_budget(self) -> None:
        least, most = self.bits_low / 16, self.bits_high / 16
        ratio = self.budget.ratio
        if ratio == 1.0:
            return
        if ratio is None or not least <= ratio <= most:
            raise NotApplicable(
                f"budget={self.budget}: {self.name} at {self.bits_high} and {self.bits_low} bits takes a share of 16-bit"
                f" codes in {least:g}..{most:g}, or 1.0"
            )
        if self.saliency_ratio is not None:
            bits = self.saliency_ratio * self.bits_high + (1 - self.saliency_ratio) * self.bits_low
            self.require("saliency_ratio", 0 <= self.saliency_ratio <= 1, "a number in [0, 1], or null")
            self.require(
                "saliency_ratio",
                abs(bits / 16 - ratio) < 1e-6,
                f"{self.salient_share:g} at budget={self.budget}, or null; this ratio is budget={bits / 16:g}",
            )

    def check_model(self, config: Any) -> None:
        d = ModelShape.of(config).d
        self.require(
            "group", self.granularity != "group" or d % self.group == 0, f"a divisor of the head dimension {d}"
        )

    @property
    def salient_share(self) -> float:
        """Share of tokens in bits_high bits."""
        assert self.budget.ratio is not None
        return round((16 * self.budget.ratio - self.bits_low) / (self.bits_high - self.bits_low), 9)

    def rule(self) -> ProbeRule:
        """Which queries are probes."""
        raise NotImplementedError

    def saliency_norm(self) -> str:
        """What sums of attention are divided by, see SalientStore."""
        return "probes"

    def is_balanced(self) -> bool:
        """Whether key channels are brought to the scale of the queries' before they are quantized."""
        return False

    def published_ratio(self, tokens: int, shape: ModelShape) -> float | None:
        """With the paper's 8 rows and 4096 channels, whatever the model has; see baselines/zipcache/accounting.py."""
        if self.budget.is_everything:
            return None
        share = self.salient_share
        counting = "mixed" if 0 < share < 1 and self.granularity.startswith("channel") else self.granularity
        bits = mean_bits(share, self.bits_high, self.bits_low)
        return published_ratio(counting, bits, tokens, group=self.group)

    def make_store(self, layer_idx: int, shape: ModelShape) -> PackedStore:
        if self.budget.is_everything:
            return PackedStore(*(PackedStream(ExactCodec(), pack_all_but(0)) for _ in "kv"))
        widths, (by_k, by_v) = Widths(), GRANULARITIES[self.granularity]

        def stream(by: str, of_keys: bool) -> PackedStream:
            bits, segment = (self.bits_high, self.bits_low), self.recompress == "segment"
            codec = MixedCodec(bits, by, widths, owner=of_keys, segment=segment, group=self.group)
            codec.balanced = of_keys and self.is_balanced()
            return PackedStream(codec, lambda tail: tail if tail >= self.gap else 0)

        return SalientStore(
            stream(by_k, True),
            stream(by_v, False),
            widths,
            ratio=self.salient_share,
            rule=self.rule(),
            norm=self.saliency_norm(),
            scope=self.scope,
            gap=self.gap,
            balance=self.is_balanced(),
        )

    @classmethod
    def noop(cls, **hyper: Any) -> Self:
        return super().noop(**{**hyper, "saliency_ratio": None})
