"""Probes: the few queries whose attention says which tokens are salient (ZipCache, section 4.3)."""

import functools
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from pqcache.kernels.scaling import cap_, sinks_of
from pqcache.selective.budget import floor_share
from pqcache.selective.column_sums import softmax_
from pqcache.store.transfer import table

Probes = Literal["random_recent", "random", "recent", "special", "all"]
BLOCK = 32  # probes whose logits exist at a time: neighbours see nearly as many keys
HEADS = 4  # KV heads whose logits exist at a time
LINE = 16  # numbers of a cache line: products with rows of whole lines are up to a third faster


@dataclass(frozen=True)
class ProbeRule:
    """Which queries are probes. recent, random: shares of the tokens. random, recent and special alone use the sum of both."""

    strategy: str = "random_recent"
    recent: float = 0.05
    random: float = 0.05
    seed: int = 0
    special_ids: tuple[int, ...] = ()
    # as the released code: random probes are drawn with replacement, so a query may count twice, and anew for every `layer`
    repeats: bool = False
    layer: int = 0

    def positions(self, s: int, start: int = 0, token_ids: torch.Tensor | None = None) -> tuple[int, ...]:
        """Probes among s consecutive tokens, the first of them the row's token `start`: ascending, in 0 .. s-1.

        They depend on s and start alone (and on `layer` if drawn with replacement), so neighbours and chunks do not change them.
        Special tokens also need token_ids (s,); without these the probes are random and recent.
        """
        if self.strategy == "special" and token_ids is not None:
            special = torch.tensor(self.special_ids, device=token_ids.device)
            positions = torch.isin(token_ids, special).nonzero().flatten().tolist()
            if positions:
                count = max(1, floor_share(s, self.recent + self.random))
                order = torch.randperm(len(positions), generator=seeded(self.seed, start)).tolist()[:count]
                return tuple(sorted(positions[i] for i in order))
        layer = self.layer if self.repeats else None
        return _positions(self.strategy, self.recent, self.random, self.seed, s, start, layer)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the special tokens, and of those whose text is punctuation alone (Unicode's, and ASCII's with its symbols)."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    marks = [
        i
        for i, text in enumerate(texts)
        if text.strip() and all(c in string.punctuation or unicodedata.category(c)[0] == "P" for c in text.strip())
    ]
    return tuple(sorted({*marks, *tokenizer.all_special_ids}))


def seeded(seed: int, start: int, layer: int = 0) -> torch.Generator:
    """The generator that draws the probes of the tokens from the row's token `start` on."""
    return torch.Generator().manual_seed((layer * 4_000_037 + seed) * 2_000_003 + start)


@functools.lru_cache(maxsize=256)
def _positions(
    strategy: str, recent: float, random: float, seed: int, s: int, start: int, layer: int | None
) -> tuple[int, ...]:
    """layer: where random probes are drawn with replacement, of this layer; None: without, the same in all layers."""
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
    if layer is not None and count:
        drawn = torch.randint(first, (count,), generator=seeded(seed, start, layer)).tolist()
    else:
        drawn = torch.randperm(first, generator=seeded(seed, start)).tolist()[:count] if count else []
    return (*sorted(drawn), *range(first, s))


@torch.no_grad()
def add_probe_sums(sums: torch.Tensor, q: torch.Tensor, k: torch.Tensor, seen: Sequence[int], scaling: float) -> None:
    """sums (h_kv, m) += the attention of probes q (h, p, d) to keys k (h_kv, m, d), summed over each group's query heads.

    Probe i sees the first seen[i] keys; seen ascends. In plain torch one block of probes of HEADS KV heads exists at a time.
    """
    h_kv, g = k.shape[0], q.shape[0] // k.shape[0]
    scaled = (q.to(sums.dtype) * scaling).unflatten(0, (h_kv, g))
    sinks = None if (own := sinks_of(scaling)) is None else own.view(h_kv, g)
    scratch = sums.new_empty(HEADS * g * BLOCK * k.shape[1])  # one for all blocks, which differ in length
    for start in range(0, len(seen), BLOCK):
        block = seen[start : start + BLOCK]
        b, all_see = len(block), block[0]
        m = min(-(-block[-1] // LINE) * LINE, k.shape[1])
        hidden = torch.arange(all_see, m, device=k.device)[None] >= table(block, k.device)[:, None]
        for head in range(0, h_kv, HEADS):
            heads = slice(head, head + HEADS)
            queries = scaled[heads, :, start : start + BLOCK].flatten(1, 2)
            logits = scratch[: len(queries) * g * b * m].view(-1, g * b, m)
            torch.bmm(queries, k[heads, :m].to(sums.dtype).mT, out=logits)
            cap_(logits, scaling)
            logits.unflatten(1, (g, b))[..., all_see:].masked_fill_(hidden, -torch.inf)
            factor = softmax_(logits, None if sinks is None else sinks[heads].repeat_interleave(b, 1))
            sums[heads, :m].add_(logits.sum(1), alpha=factor)
