"""ShadowKV: low-rank keys on the device, values on the host, chunks by landmarks (Sun et al., arXiv 2410.21465, section 4).

Keys before their rotation are kept as a product of rank r, of all KV heads together. Each chunk of 8 keys has its mean as a
landmark. The chunks whose keys differ most from their mean are outliers: exact on the device and always attended. At each step
the chunks with the largest softmax weight of their landmark, maximum over a group, are attended: their values are fetched, their
keys computed and rotated. The last 4 whole chunks of the prompt, what follows them, and the answer stay exact on the device.

protocol=release is the authors' accuracy code: 48 outliers. They and the local chunks come on top of the budget.

Deviations:
- aligned: local and outlier chunks are inside the budget, 3 outliers for 16 chosen chunks, the paper's ratio.
- Landmark products are scaled as the model scales. The release divides by sqrt(128) for any head dimension.
- Values that the step before fetched are fetched again, as in the release's accuracy code.
- A new turn attends to computed keys; the release has one turn. A budget of 1.0 keeps every token exact.
"""

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from pqcache import kernels
from pqcache.fields import Positive, Whole
from pqcache.selective import rope
from pqcache.selective.attention import Part, merge
from pqcache.selective.budget import Plan, floor_share
from pqcache.selective.group import per_head, top_tokens
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.retrieval import RetrievalLayer, RetrievalMethod
from pqcache.selective.shape import ModelShape
from pqcache.selective.support import check_rotated
from pqcache.store.base import RetrievalStore
from pqcache.store.buffer import Buffer, take_tokens
from pqcache.store.codec import right_align
from pqcache.store.host import HOST
from pqcache.store.resident import ResidentStore
from pqcache.store.transfer import table

TILE = 256  # tokens of a head that are computed and attended at a time
OUTLIERS = 3 / 16  # outlier chunks per chosen chunk: 24 per 1024 tokens in the paper's experiments


@dataclass(frozen=True)
class ShadowPlan(Plan):
    """Of a prompt whose first `prefix` tokens are chunks; `outliers` chunks are always attended."""

    prefix: int
    outliers: int


class ShadowStore(RetrievalStore):
    """The chunked prefix as low-rank keys and host values, its outliers and everything later exact on the device."""

    per_row = ("lengths", "prefix", "low", "basis", "exact", "values", "tail")
    counted = ("turns",)
    on_host = ("values",)
    low: Buffer  # (n, 1, capacity, r): keys before their rotation, by `basis`; made by `load`
    basis: torch.Tensor  # (n, h_kv, r, d)
    values: Buffer  # (n, h_kv, capacity, d), on the host

    def __init__(self, method: Any, ctx: LayerContext) -> None:
        self.method, self.module, self.rotary, self.moved = method, ctx.module, ctx.rotary, ctx.cache.ledger.move
        self.lengths: list[int] = []
        self.prefix: list[int] = []
        self.tail = ResidentStore()
        self.exact: list[torch.Tensor] = []  # K, V of the outliers (n, h_kv, o, d)
        self.led: torch.Tensor | None = None  # indices whose first o are the outliers

    def load(self, k: torch.Tensor, v: torch.Tensor, lengths: Any, known: Any = None) -> None:
        n, h_kv, _, d = k.shape
        self.lengths, self.prefix = list(lengths), [self.method.prefix(length) for length in lengths]
        rank, tails = min(self.method.rank, h_kv * d), [a - b for a, b in zip(lengths, self.prefix, strict=True)]
        self.tail.append(right_align(k, self.prefix, lengths), right_align(v, self.prefix, lengths), tails)
        self.low = Buffer(n, 1, (rank,), k.dtype, k.device)
        self.values = Buffer.like(v, device=HOST, pinned=True)
        self.basis = k.new_zeros((n, h_kv, rank, d))
        for buffer in (self.low, self.values):
            buffer.reserve(max(1, *self.prefix))
        turns = torch.stack(rope.tables(self.rotary, k, torch.arange(k.shape[2], device=k.device)[None]))
        self.turns = self.method.turns.setdefault((self.rotary, turns.shape, turns.dtype, turns.device), turns)
        plain = rope.unrotate(self.module, k, *self.turns)
        for row, (prefix, length) in enumerate(zip(self.prefix, lengths, strict=True)):
            keys = plain[row, :, :length].transpose(0, 1).flatten(1).double()  # (length, h_kv d)
            vectors = torch.linalg.eigh(keys.mT @ keys).eigenvectors[:, -rank:]  # in fp32 the products lose small ones
            self.low.data[row, 0, :prefix] = keys[:prefix] @ vectors
            self.basis[row] = vectors.to(k.dtype).mT.unflatten(1, (h_kv, d)).transpose(0, 1)
            self.values.data[row, :, :prefix] = v[row, :, :prefix]
        self.moved("write_back", sum(self.prefix) * h_kv * d * v.element_size())

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.tail.append(k, v)
        self.lengths = [length + 1 for length in self.lengths]

    def take(self, indices: torch.Tensor, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Computed keys and fetched values of prefix tokens, indices (n, 1 or h_kv, k): (n, h_kv, k, d)."""
        (n, heads, k), (h_kv, _, d) = indices.shape, self.basis.shape[1:]
        plain = take_tokens(self.low.data, indices.flatten(1)[:, None]).unflatten(2, (heads, k))[:, 0] @ self.basis
        at = indices.clamp_min(0).expand(n, h_kv, k).flatten(0, 1)
        turns = self.turns[:, 0].index_select(1, at.flatten()).unflatten(1, at.shape)
        keys = rope.rotate(self.module, plain.view(n * h_kv, 1, k, d), *turns)
        fetched = take_tokens(self.values.data, indices.to(HOST))
        self.moved("fetch", int((indices >= 0).sum()) * (h_kv // heads) * d * fetched.element_size())
        return keys.view(n, h_kv, k, d), fetched.to(plain.device)

    def read(self, sinks: int, indices: Any, local: int, group: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Outliers are read as stored where they lead `indices`; no token of the tail may be among these."""
        ends = table(self.tail.lengths, self.basis.device)[:, None, None]
        parts = [list(self.tail.take(ends + torch.arange(-local, 0, device=ends.device)))]
        if indices is not None:
            lead, self.led = self.exact[0].shape[2] if indices is self.led else 0, None
            parts.insert(0, list(self.take(indices[:, :, lead:])))
            parts[:0] = [self.exact] if lead else []
        k, v = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        return k, v

    def attend_in_place(
        self, q: torch.Tensor, sinks: int, indices: torch.Tensor, local: int, scaling: float, log_weight: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See RetrievalStore; fp32 on the CPU, some tokens at a time: small results stay near and need no new memory."""
        end, lead = self.tail.length, self.exact[0].shape[2]
        rows = [*self.exact, *self.tail.tile(end - local, end)]
        served = indices is self.led and kernels.native(q, scaling=scaling) and kernels.attend.side_by_side(*rows)
        if not served:
            return None
        parts = [kernels.attend.attend_parts(q, (rows[::2], rows[1::2]), [lead, local], scaling)]
        for start in range(lead, indices.shape[2], TILE):
            chosen = self.take(indices[:, :, start : start + TILE])
            parts.append(kernels.attend.attend_parts(q, [[x] for x in chosen], [chosen[0].shape[2]], scaling))
        return merge([Part(*part) for part in parts])[:2]

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        at, longest = torch.arange(self.length, device=self.basis.device), max(self.prefix)
        first = self.take(at[:longest].expand(len(self.prefix), 1, -1))
        prefix = table(self.prefix, at.device)[:, None]
        at = torch.where(at < prefix, at, at + longest - prefix).clamp_max(longest + self.tail.length - 1)
        k, v = (take_tokens(torch.cat(x, 2), at[:, None]) for x in zip(first, self.tail.view(), strict=True))
        return k, v


class LandmarkIndex(Index):
    """The mean key of every chunk of one layer's prefix, and which chunks are outliers."""

    per_row = ("landmarks", "ordinary", "outliers")
    layer: Any  # its store is a ShadowStore, its plans are ShadowPlans
    landmarks: torch.Tensor  # (n, h_kv, chunks, d); made by `build`
    ordinary: torch.Tensor  # (n, h_kv, chunks) bool: chunks that are no outliers
    outliers: torch.Tensor  # (n, h_kv, o) positions, -1 = padding

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        (n, h_kv, _, d), plans, size = k.shape, self.layer.plans, self.layer.method.chunk
        self.landmarks = k.new_zeros((n, h_kv, max(plan.prefix for plan in plans) // size, d))
        self.ordinary = torch.zeros_like(self.landmarks[..., 0], dtype=torch.bool)
        self.outliers = torch.full((n, h_kv, max(plan.outliers for plan in plans) * size), -1, device=k.device)
        for row, plan in enumerate(plans):
            keys = k[row, :, : plan.prefix].detach().unflatten(1, (plan.prefix // size, size))
            self.landmarks[row, :, : keys.shape[1]] = mean = keys.mean(2)
            self.ordinary[row, :, : keys.shape[1]] = True
            if plan.outliers:
                alike = torch.cosine_similarity(mean[:, :, None], keys, dim=-1).amin(-1)
                odd = top_tokens(-alike[None].float(), [plan.outliers])[0]
                self.ordinary[row].scatter_(1, odd, False)
                self.outliers[row, :, : odd.shape[1] * size] = self._tokens(odd)
        at = self.outliers.clamp_min(0)[..., None].expand(-1, -1, -1, d)
        self.layer.store.exact = [x.detach().gather(2, at) for x in (k, v)]
        return [plan.prefix > 0 for plan in plans]

    def _tokens(self, chunks: torch.Tensor) -> torch.Tensor:
        """Chunks (.., m) -> their tokens (.., m * chunk), -1 for -1."""
        size = self.layer.method.chunk
        tokens = chunks[..., None] * size + torch.arange(size, device=chunks.device)
        return torch.where(chunks[..., None] < 0, -1, tokens).flatten(-2)

    def local(self, plan: Any, past: int) -> int:
        return past - plan.prefix

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        (n, h, _, d), size = q.shape, self.layer.method.chunk
        logits = (q.view(n, h_kv, -1, d) @ self.landmarks.mT).float().view(n, h, -1) * ctx.scaling
        logits = logits.masked_fill(~per_head(self.ordinary, h), -torch.inf)
        weights = logits.softmax(-1).unflatten(1, (h_kv, -1)).amax(2).masked_fill(~self.ordinary, -torch.inf)
        counts = [max(0, k // size - plan.outliers) for k, plan in zip(cand.k, self.layer.plans, strict=True)]
        self.layer.store.led = indices = torch.cat([self.outliers, self._tokens(top_tokens(weights, counts))], 2)
        return Selection(indices, padded=n > 1)


class ShadowLayer(RetrievalLayer):
    def new_store(self, n_local: int, ctx: LayerContext) -> RetrievalStore:
        return ResidentStore() if self.method.budget.is_everything else ShadowStore(self.method, ctx)


@dataclass(kw_only=True)
class ShadowKV(RetrievalMethod):
    """Chunks by their landmarks, outliers and local chunks. Every generated token stays, on top of the budget."""

    name: ClassVar[str] = "shadowkv"
    released: ClassVar[str] = "ByteDance-Seed/ShadowKV: models/kv_cache.py"
    own_rule: ClassVar[str] = "prompt"
    composable: ClassVar[bool] = False  # it owns its store
    n_sink: ClassVar[int] = 0  # type: ignore[misc]
    recent_ratio: ClassVar[float] = 0.0  # type: ignore[misc]
    store: ClassVar[Literal["host"]] = "host"  # type: ignore[misc]
    traceable: ClassVar[bool] = False  # a replay attends exact keys, not those of low rank
    reduce: ClassVar[str] = "max_softmax"  # type: ignore[misc, assignment]

    # tokens per chunk
    chunk: Positive = 8
    # rank of the keys, at most h_kv * d
    rank: Positive = 160
    # whole chunks before the prompt's end that stay exact
    local_chunks: Positive = 4
    # chunks that are always attended; null: 3 per 16 chosen ones, in the protocol release 48
    outliers: Whole | None = None

    def fill(self) -> None:
        self.by_protocol(outliers=(None, None, 48))
        self.turns: Any = weakref.WeakValueDictionary()  # cos and sin (2, 1, s, rotary) of a prompt, for all layers

    def check_model(self, config: Any) -> None:
        check_rotated(config.get_text_config(decoder=True), f"method={self.name}")

    def prefix(self, s: int) -> int:
        """Tokens of a prompt of `s` tokens that are chunks."""
        return max(0, s // self.chunk - self.local_chunks) * self.chunk

    def plan(self, s: int, layer_idx: int, n_layers: int) -> ShadowPlan:
        prefix, total = self.prefix(s), self.budget.total(s)
        chunks = (total - (s - prefix) * (self.protocol == "aligned")) // self.chunk
        share = OUTLIERS / (1 + OUTLIERS) if self.protocol == "aligned" else OUTLIERS
        outliers = floor_share(max(0, chunks), share) if self.outliers is None else self.outliers
        chunks = max(outliers, chunks + outliers * (self.protocol != "aligned"))
        k = prefix if self.budget.is_everything else min(prefix, chunks * self.chunk)
        # where all are attended, none is an outlier: rows of a batch then do as they would alone
        return ShadowPlan(0, s - prefix, k, prefix, 0 if k == prefix else outliers)

    def index_bytes(self, tokens: int, shape: ModelShape) -> int:
        return 4 * tokens * (min(self.rank, shape.h_kv * shape.d) + shape.h_kv * shape.d * 2)

    def make_layer(self, layer_idx: int, shape: ModelShape) -> ShadowLayer:
        return ShadowLayer(layer_idx, shape, self)

    def make_index(self, layer_idx: int, shape: ModelShape) -> LandmarkIndex:
        return LandmarkIndex()
