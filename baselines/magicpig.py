"""MagicPIG: sample tokens by locality-sensitive hashing, and weigh what was sampled (Chen et al., arXiv 2410.16179, section 4).

A key has a code of K bits in each of L tables: the signs of its products with random directions, after the mean of the prompt's
candidate keys is taken away. A query samples the keys whose code equals its own in at least two tables (section 4.2), which
happens with probability u = 1 - (1-c)^L - L c (1-c)^(L-1), c = (1 - angle / pi)^K. Sampled keys get -log u on their logits, so
that the softmax estimates that over all tokens (equation 9).

The budget is an upper bound: where more tokens are sampled, as many as fit stay, chosen without a look at them, and weighed
accordingly.

protocol=release is the authors' Python reference: 4 sinks and a window of 64; layers 0, 16, 32 .. are dense.

Deviations:
- Generated tokens that leave the local window are hashed and may be sampled. The release attends all of them.
- Directions, codes and probabilities are computed in fp32, not in bf16. Directions come from a seed.
- With store=host sampled keys cross twice, to be weighed and to be attended. The published system attends on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F

from pqcache import kernels
from pqcache.fields import MOST, Positive
from pqcache.selective.budget import Plan, window_plan
from pqcache.selective.column_sums import accumulator_dtype
from pqcache.selective.dense import DenseLayer
from pqcache.selective.group import per_head, top_tokens
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext, SelectiveLayer
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape
from pqcache.store.buffer import Buffer
from pqcache.store.transfer import table

TILE = 4096  # tokens whose codes are compared at a time
FLOOR = 1e-4  # added to probabilities, as in the release: a lucky token's weight stays finite
SHARED = 16  # consecutive layers that share their directions, as in the release
GOLDEN, SILVER = 0.6180339887498949, 0.4142135623730951  # multiples of these, modulo 1, spread evenly


def sampled_probability(cosine: torch.Tensor, bits: int, tables: int) -> torch.Tensor:
    """Probability that two vectors of this cosine have equal codes in at least two of the tables."""
    c = (1 - cosine.clamp(-1, 1).arccos() / math.pi) ** bits
    return 1 - (1 - c) ** tables - tables * c * (1 - c) ** (tables - 1)


class HashIndex(Index):
    """Codes of one layer's keys in all tables, int16, and the mean key they are taken after."""

    per_row = ("codes", "mean")
    codes: Buffer  # (n, h_kv, capacity, L) int16; made by `build`
    mean: torch.Tensor  # (n, h_kv, 1, d) fp32

    def __init__(self, method: MagicPIG, layer_idx: int) -> None:
        self.method, self.layer_idx = method, layer_idx

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        n, h_kv, _, d = k.shape
        self.codes = Buffer(n, h_kv, (self.method.tables,), torch.int16, k.device)
        self.codes.reserve(max(lengths) + 1)
        self.mean = torch.zeros((n, h_kv, 1, d), dtype=accumulator_dtype(k), device=k.device)
        for row, (length, plan) in enumerate(zip(lengths, self.layer.plans, strict=True)):
            candidates = k[row, :, plan.sinks : length - plan.local].to(self.mean.dtype)
            if candidates.shape[1]:
                self.mean[row] = candidates.mean(1, keepdim=True)
            for at in range(0, length, TILE):
                keys = k[row, :, at : min(at + TILE, length)] - self.mean[row]
                self.codes.data[row, :, at : at + keys.shape[1]] = self._codes(keys)
        return [True] * n

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        codes = self._codes(k.detach() - self.mean)
        self.codes.write(codes, [length - 1 for length in lengths], [1] * len(lengths))

    def _codes(self, x: torch.Tensor) -> torch.Tensor:
        """x (.., h_kv, t, d) -> (.., h_kv, t, L) int16: bit i of a table's code is the sign of a product."""
        method = self.method
        signs = (x @ method.directions(self.layer_idx, x).to(x.dtype)) > 0
        place = 2 ** torch.arange(method.bits, device=x.device, dtype=torch.int16)
        return (signs.unflatten(-1, (method.tables, method.bits)) * place).sum(-1, dtype=torch.int16)

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        n, h, _, d = q.shape
        query = self._codes(q.to(self.mean.dtype).view(n, h_kv, -1, d))  # (n, h_kv, g, L)
        lo, codes = cand.sinks, self.codes.data
        # a row whose budget is enough for all attends to all, as it would alone
        least = [0 if k == end - lo else 2 for k, end in zip(cand.k, cand.ends, strict=True)]
        if native := kernels.native(query, codes):
            indices = kernels.codes.often_equal(query, codes, lo, cand.ends, least)
        else:
            tiles = codes[:, :, None, lo : max(cand.ends)].split(TILE, 3)
            equal = torch.cat([(query[:, :, :, None] == tile).sum(-1, dtype=torch.int16) for tile in tiles], -1)
            sampled = equal.flatten(1, 2) >= table(least, q.device)[:, None, None]  # (n, h, m)
            if (valid := cand.valid(q.device)) is not None:
                sampled &= valid
            indices = torch.where(sampled, torch.arange(lo, max(cand.ends), device=q.device), -1)
        count, rows = (indices >= 0).sum(-1, keepdim=True), (cand.lengths, cand.k, [x == 0 for x in least])
        length, room, whole = (table(x, q.device)[:, None, None] for x in rows)
        if not native or bool((count > room).any()):  # elsewhere the counts are known to the device alone
            luck = (indices.double() * GOLDEN + length.double() * SILVER) % 1  # of whom the budget has room for
            order = torch.where(indices >= 0, luck.float() + 1, 0.0)
            slots = top_tokens(order, [min(k, indices.shape[2]) for k in cand.k])
            indices = torch.where(slots < 0, -1, indices.gather(2, slots.clamp_min(0)))
        share = (room / count.clamp_min(1)).clamp_max(1)
        probability = sampled_probability(self._cosine(q, indices), self.method.bits, self.method.tables) + FLOOR
        weight = -(probability * share).log().masked_fill(whole, 0.0)
        return Selection(indices, padded=True, log_weight=weight.masked_fill(indices < 0, 0.0))

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        own = super().tensors()["device"]
        return {"device": own + ([self.method.directions(self.layer_idx, self.mean)] if own else [])}

    def _cosine(self, q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Between q (n, h, 1, d) and the keys at indices (n, h, m), their mean taken away: (n, h, m)."""
        store, mean, g = self.layer.store, self.mean, self.layer.shape.group
        if not store.whole or q.device.type != "cpu":
            keys = store.keys_at(indices, g) - per_head(mean, q.shape[1])
            return torch.cosine_similarity(q.to(keys.dtype), keys, dim=-1)
        out = []  # head by head: small results need no new memory
        queries, chosen = (x.flatten(0, 1).split(g) for x in (q.to(mean.dtype), indices.clamp_min(0)))
        for query, at, k, mid in zip(queries, chosen, store.keys(0, store.length).flatten(0, 1), mean.flatten(0, 1)):
            keys = F.embedding(at, k).to(mean.dtype) - mid  # (g, m, d)
            sizes = keys.norm(dim=-1) * query.norm(dim=-1)
            out.append((keys @ query.mT)[..., 0] / sizes.clamp_min(1e-8))
        return torch.cat(out).view(indices.shape)


@dataclass(kw_only=True)
class MagicPIG(RetrievalMethod):
    """Tokens sampled by hash collisions, per query head, with importance weights."""

    name: ClassVar[str] = "magicpig"
    released: ClassVar[str] = "Infini-AI-Lab/MagicPIG: evaluations/RULER/pred/cache_ref.py"
    own_rule: ClassVar[str] = "prompt"  # the budget is an upper bound
    composable: ClassVar[bool] = False  # its weights belong to its samples
    reduce: ClassVar[str] = "none"  # type: ignore[misc, assignment]

    # bits of a code (K), 1 to 15
    bits: Annotated[int, 1, 15] = 10
    # tables (L)
    tables: Annotated[int, 2, MOST] = 150
    # of the random directions
    seed: int = 0
    # tokens of the local window; null: by recent_ratio, in the protocols paper and release 64
    recent: Positive | None = None
    # first tokens, always attended; null: 32 on top of a budget ratio, in the protocols paper and release 4
    n_sink: int | None = None  # type: ignore[assignment]

    def fill(self) -> None:
        self.by_protocol(n_sink=(32, 4), recent=(None, 64))
        self.planes: dict[tuple[int, str], torch.Tensor] = {}

    @property
    def traceable(self) -> bool:
        return False  # weights enter the output

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        if self.recent is None:
            return super().plan(s, layer_idx, n_layers)
        return window_plan(self.budget, s, self.n_sink or 0, self.recent)

    def index_bytes(self, tokens: int, shape: ModelShape) -> int:
        """Codes of 2 bytes, and the mean key; the directions as if no layers shared them."""
        return shape.h_kv * (tokens * self.tables * 2 + shape.d * 4 * (self.tables * self.bits + 1))

    def directions(self, layer_idx: int, like: torch.Tensor) -> torch.Tensor:
        """(h_kv, d, L K) fp32 on the device of `like` (.., h_kv, t, d), the same for SHARED layers."""
        key = layer_idx // SHARED, str(like.device)
        if key not in self.planes:
            draw = torch.Generator().manual_seed(self.seed * 1000 + key[0])
            shape = (like.shape[-3], like.shape[-1], self.tables * self.bits)
            self.planes[key] = torch.randn(shape, generator=draw).to(like.device)
        return self.planes[key]

    def make_layer(self, layer_idx: int, shape: ModelShape) -> SelectiveLayer:
        if self.protocol != "aligned" and layer_idx % SHARED == 0:
            return DenseLayer(layer_idx, shape)
        return super().make_layer(layer_idx, shape)

    def make_index(self, layer_idx: int, shape: ModelShape) -> HashIndex:
        return HashIndex(self, layer_idx)
