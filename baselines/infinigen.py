"""InfiniGen: retrieve tokens one layer ahead, by speculated queries (Lee et al., arXiv 2406.19707, section 4).

While a layer runs, its input times the next layer's query weights approximates that layer's query. An orthogonal matrix A per
layer, computed once per model, rotates queries and keys so that few columns carry most of q . k. Speculation uses only these
columns. There are no sinks and no local window. In the paper's protocol 0.3 of the columns are kept, chosen by |q A| + |k A|.

The first two layers stay dense under every protocol, as published: the first has no layer before it, and the second's input is
unlike the first's. On SmolLM2-135M (heads of 64) their cosine is -0.01, of later layers 0.7 to 0.98. The fifth of the tokens that
the second layer would choose holds 0.29 of its attention, the best fifth 0.93; in later layers 0.96 and 0.97.

Release protocol: the accuracy code for Llama (github.com/snu-comparch/InfiniGen). Every query head chooses its own tokens, and
the columns of largest |q A| and those of largest |k A| are united.

Deviations:
- The published system has no grouped queries. Here a group shares A and columns, and with a `reduce` its choice.
- Queries are rotated by position before the skew, as in the released Llama code, so the next layer's whole query projection
  is computed and its skewed columns taken, instead of partial query weights.
- The number of tokens is the mean over a row's heads, not over the batch.
- The cap is a share of the prompt, not of the growing sequence.
- Host memory has no limit, so no token is evicted from it.
- The current token is attended on top. A token exactly alpha below the best does not count, as in the speed code.
- Columns are fixed by the calibration text, as in the accuracy code. The speed code chooses them anew for every prompt.
- Release: the accuracy code takes every head's threshold from the first head, and sparsifies the prompt, too. Neither is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pqcache.fields import MOST, Part, Positive
from pqcache.kernels.scaling import capped
from pqcache.selective.attach import served_modules
from pqcache.selective.budget import Plan, floor_share
from pqcache.selective.calibration import Calibration, Tensors, watch_text
from pqcache.selective.group import Reduce, group_reduce, products, top_tokens
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext, WatchedCall
from pqcache.selective.placement import home
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.rope import project_query, rotate, tables
from pqcache.selective.shape import ModelShape, NotApplicable
from pqcache.selective.support import check_rotated
from pqcache.store.buffer import Buffer
from pqcache.store.transfer import table

_FORMAT = 1  # version of the calibration files


def skew(q: torch.Tensor, k: torch.Tensor, how: str = "svd") -> dict[str, torch.Tensor]:
    """One layer's rotation, from calibration queries q (1, h, t, d) and keys k (1, h_kv, t, d), both after RoPE.

    basis (h_kv, d, d): orthogonal A of right singular vectors of the group's queries, so that (q A)(k A)^T = q k^T while
    few columns of q A are large. q_sum, k_sum (h_kv, d): sums of |q A| and |k A| over tokens, per query head of the group.
    """
    _, h, _, d = q.shape
    h_kv = k.shape[1]
    queries, keys = q[0].double().cpu().reshape(h_kv, -1, d), k[0].double().cpu()
    basis = torch.eye(d, dtype=torch.float64).expand(h_kv, d, d)
    if how == "svd":  # the eigenvectors of Q^T Q, largest first; their signs are fixed, so that a file can be compared
        basis = torch.linalg.eigh(queries.mT @ queries).eigenvectors.flip(-1)
        largest = basis.gather(1, basis.abs().argmax(1, keepdim=True))
        basis = basis * torch.where(largest < 0, -1.0, 1.0)
    sums = (queries @ basis).abs().sum(1), h // h_kv * (keys @ basis).abs().sum(1)
    exact = torch.promote_types(q.dtype, torch.float32)
    names = ("basis", "q_sum", "k_sum")
    return {name: x.to(exact).contiguous() for name, x in zip(names, (basis, *sums), strict=True)}


def partial_basis(layer: dict[str, torch.Tensor], rule: str, ratio: float) -> torch.Tensor:
    """The columns of A that are kept, in ascending order: (h_kv, d, r). With `union` a head may have fewer: zeros follow."""
    basis, q_sum, k_sum = layer["basis"], layer["q_sum"], layer["k_sum"]
    h_kv, d, _ = basis.shape
    r = max(1, floor_share(d, ratio))
    if rule == "abs_sum":
        q_sum = q_sum + k_sum
    marks = torch.zeros((h_kv, d), dtype=torch.bool)
    for sums in (q_sum, k_sum) if rule == "union" else (q_sum,):
        marks.scatter_(1, top_tokens(sums[None], [r])[0], True)
    kept = [head[:, mark] for head, mark in zip(basis, marks, strict=True)]
    widest = max(x.shape[1] for x in kept)
    return torch.stack([F.pad(x, (0, widest - x.shape[1])) for x in kept])


# of what is stored, by name
DIMS = {"basis": 4, "q_sum": 3, "k_sum": 3, "similarity": 1}


def calibrate(model: PreTrainedModel, ids: torch.Tensor, how: str) -> Tensors:
    """`skew` of all L layers on token ids (1, t), stacked: basis (L, h_kv, d, d), q_sum and k_sum (L, h_kv, d).

    similarity (L,): mean cosine of each layer's attention input to that of the layer before.
    """
    rotations: list[Tensors] = []
    similarity: list[float] = []
    before: torch.Tensor | None = None  # attention input of the layer before

    def rotate_layer(call: WatchedCall) -> None:
        nonlocal before
        rotations.append(skew(call.q, call.k, how))
        hidden = call.ctx.hidden
        same = 1.0 if before is None else float(F.cosine_similarity(before.float(), hidden.float(), dim=-1).mean())
        similarity.append(same)
        before = hidden

    watch_text(model, ids, rotate_layer)
    stacked = {name: torch.stack([layer[name] for layer in rotations]) for name in ("basis", "q_sum", "k_sum")}
    return {**stacked, "similarity": torch.tensor(similarity)}


class SpeculativeIndex(Index):
    """Partial keys k A[:, columns] of one layer's tokens. The choice is made while the layer before runs; `select` returns it."""

    per_row = ("partial",)
    counted = ("basis",)
    basis: torch.Tensor  # (h_kv, d, r), a constant of the model: it has no rows; set by `build`

    def __init__(self, method: InfiniGen) -> None:
        self.method, self.reduce = method, str(method.reduce)
        self.partial: Buffer = None  # type: ignore[assignment]  # (n, h_kv, capacity, r), as the keys
        self.choice: Selection | None = None  # of the step that is running

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        basis = self.method.bases.get(ctx.module)
        if basis is None:
            raise RuntimeError("InfiniGen was not prepared for this model: call prepare(model, None, None) first")
        self.basis = basis.to(k.device)
        self.partial = Buffer(k.shape[0], k.shape[1], (basis.shape[2],), k.dtype, k.device)
        for row, length in enumerate(lengths):
            self.partial.reserve(max(lengths) + 1)
            self.partial.data[row, :, :length] = self._project(k[row : row + 1, :, :length])[0]
        ctx.cache.ledger.facts["input_similarity"] = self.method.similarity
        return [True] * len(lengths)

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        self.partial.write(self._project(k), [length - 1 for length in lengths], [1] * len(lengths))

    def _project(self, k: torch.Tensor) -> torch.Tensor:
        """(n, h_kv, t, d) -> (n, h_kv, t, r), rounded as the keys are."""
        return (k.detach().to(self.basis.dtype) @ self.basis).to(k.dtype)

    def on_previous_input(self, ctx: LayerContext) -> None:
        """Speculate with the input of the layer before under this layer's query weights."""
        if ctx.step.decode and self.partial is not None:
            module: Any = ctx.modules[self.layer.layer_idx]
            query = project_query(module, ctx.hidden)  # on this layer's device
            angles = ctx.cos, ctx.sin
            if ctx.rotary_ahead not in (None, ctx.rotary):  # the layer before is of another kind
                angles = tables(ctx.rotary_ahead, query, table(ctx.step.past, query.device)[:, None])
            q = rotate(module, query, *(x.to(query.device) for x in angles))
            self.speculate(q, getattr(module, "scaling", q.shape[-1] ** -0.5))

    def speculate(self, q: torch.Tensor, scaling: float) -> None:
        """Choose by q (n, h, 1, d), before the current token is stored, and start to fetch."""
        cand, _ = self.layer.candidates(ahead=True)
        self.choice = None
        if any(k < hi - cand.sinks for k, hi in zip(cand.k, cand.ends, strict=True)):
            lo, hi = cand.sinks, max(cand.ends)
            if self.method.alpha is None:
                keys, h_kv = self.partial.data[:, :, lo:hi], self.layer.shape.h_kv
                self.choice = self.choose_by_products(self.speculated(q), keys, cand, h_kv, scaling)
            else:
                self.choice = self.pick(self.speculated_logits(q, lo, hi, scaling), cand)
            self.layer.store.prefetch(self.choice.indices, self.layer.shape.group)

    def speculated(self, q: torch.Tensor) -> torch.Tensor:
        """q A over the kept columns, for q (n, h, 1, d): (n, h, 1, r)."""
        n, h, _, d = q.shape
        return (q.to(self.basis.dtype).view(n, -1, h // self.basis.shape[0], d) @ self.basis).view(n, h, 1, -1)

    def speculated_logits(self, q: torch.Tensor, lo: int, hi: int, scaling: float) -> torch.Tensor:
        """q A . k A over the kept columns, for q (n, h, 1, d) and positions lo .. hi-1: (n, h, hi - lo)."""
        return products(self.speculated(q), self.partial.data[:, :, lo:hi]) * scaling

    def pick(self, logits: torch.Tensor, cand: Candidates) -> Selection:
        """With alpha: as many tokens as a head has within alpha of its best, mean over heads, and at most cand.k[r]."""
        h_kv, valid, logits = self.layer.shape.h_kv, cand.valid(logits.device), capped(logits, self.layer.scaling)
        assert self.method.alpha is not None
        near = logits if valid is None else logits.masked_fill(~valid, -torch.inf)
        near = near > near.amax(-1, keepdim=True) - self.method.alpha
        count = near.sum(-1, dtype=torch.float32).mean(-1).long().clamp_min(1)  # (n,)
        limit = torch.tensor(cand.k, device=logits.device)
        whole = torch.tensor(
            [k == hi - cand.sinks for k, hi in zip(cand.k, cand.ends, strict=True)], device=logits.device
        )
        count = torch.where(whole, limit, count.minimum(limit))  # a row whose cap is everything attends everything
        indices = top_tokens(group_reduce(logits, h_kv, self.reduce, valid), count, max(cand.k))
        return Selection(torch.where(indices < 0, indices, indices + cand.sinks), padded=True)

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        choice, self.choice = self.choice, None
        if choice is None:
            raise RuntimeError("InfiniGen chooses while the layer before runs, and nothing was chosen")
        return choice


@dataclass(kw_only=True)
class InfiniGen(RetrievalMethod):
    """Tokens with the largest speculated weight, chosen and fetched while the layer before runs.

    Aligned protocol: as many tokens as the budget says. Paper's and release's: as many as `alpha` says, up to the cap or the
    budget, whichever is less. budget=1.0 attends everything under either. `prepare` runs the model once over a calibration text.
    """

    name: ClassVar[str] = "infinigen"
    released: ClassVar[str] = "snu-comparch/InfiniGen: accuracy, Llama"
    aligned_dense_layers: ClassVar[int] = 2
    paper_dense_layers: ClassVar[int] = 2
    shortens: ClassVar[bool] = False  # it chooses one layer ahead, not within the step
    n_sink: ClassVar[int] = 0  # type: ignore[misc]
    recent_ratio: ClassVar[float] = 0.0  # type: ignore[misc]

    # as RetrievalMethod.reduce; null: sum_softmax, in the release's protocol none
    reduce: Reduce | None = None  # type: ignore[assignment]
    # share of the columns that speculation uses; null: 0.2, in the paper's protocol 0.3
    partial_ratio: Part | None = None
    # columns of largest sum over a group: q (of |q A|), union (of |q A| or |k A|), abs_sum (of both sums added); null: q, in the
    # paper's protocol abs_sum, in the release's union
    column_rule: Literal["q", "union", "abs_sum"] | None = None
    # svd: A by singular vectors; none: A = 1
    skew: Literal["svd", "none"] = "svd"
    # tokens of the calibration text, at most
    calibration_tokens: Positive = 2048
    # a token is selected if its speculated logit is within alpha of its head's largest; null: no limit, in the paper's and the
    # release's protocol 5
    alpha: Annotated[float, 1e-9, MOST] | None = None
    # share of the prompt that may be selected at most; null: 1, in the paper's and the release's protocol 0.2
    cap: Part | None = None

    def fill(self) -> None:
        self.by_protocol(reduce=("sum_softmax", "sum_softmax", "none"), partial_ratio=(0.2, 0.3, 0.2))
        self.by_protocol(column_rule=("q", "abs_sum", "union"), alpha=(None, 5.0), cap=(None, 0.2))

    def validate(self) -> None:
        super().validate()
        if self.dense_layers == 0:
            raise NotApplicable("dense_layers=0: InfiniGen needs at least 1, its first layer has no layer before it")

    def setup(self) -> None:
        self.bases: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()  # attention module -> (h_kv, d, r)
        self.similarity = 0.0  # of layers' inputs to those they speculate with, mean cosine on the calibration text

    def check_model(self, config: PreTrainedConfig) -> None:
        if not self.budget.is_everything:
            check_rotated(config.get_text_config(decoder=True), "infinigen")

    def prepare(self, model: PreTrainedModel, text: torch.Tensor | None, cache_dir: Path | None) -> None:
        modules = served_modules(model)
        if self.budget.is_everything or (text is None and all(module in self.bases for module in modules)):
            return
        calibration = Calibration("infinigen", self.calibration_tokens, (_FORMAT, self.skew))
        tensors = calibration.get(model, text, cache_dir, lambda model, ids: calibrate(model, ids, self.skew), DIMS)
        speculated = tensors["similarity"][self.dense_layers :]
        self.similarity = float(speculated.mean()) if len(speculated) else 1.0
        for i, module in enumerate(modules):
            layer = {name: tensors[name][i] for name in ("basis", "q_sum", "k_sum")}
            self.bases[module] = partial_basis(layer, str(self.column_rule), self.partial_ratio or 0).to(home(module))

    @property
    def keeps_rule(self) -> bool:
        return self.alpha is None and self.cap is None  # else it may select fewer tokens

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        if self.budget.is_everything:
            return Plan(sinks=0, local=0, k=s)
        cap = s if self.cap is None else floor_share(s, self.cap)
        return Plan(sinks=0, local=0, k=max(1, min(cap, self.budget.total(s))))

    def make_index(self, layer_idx: int, shape: ModelShape) -> SpeculativeIndex:
        return SpeculativeIndex(self)
