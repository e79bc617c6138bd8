"""PQIndex: centroids and codes of one layer's keys, by which PQCache ranks tokens (arXiv 2407.12820, section 3)."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from pqcache import kernels
from pqcache.pq import codebook
from pqcache.pq.fit import Clustering, Fitted, fit
from pqcache.selective.budget import Plan
from pqcache.selective.index import Candidates, Index, Selection
from pqcache.selective.layer import LayerContext
from pqcache.selective.ledger import Ledger
from pqcache.store.buffer import Buffer
from pqcache.store.lanes import NOTHING, Work
from pqcache.store.step import PQCodes

REFIT = 0.25  # re-cluster when a new turn adds more than this share of the keys that the centroids were fitted to


@dataclass
class _Building:
    """An index that is being built beside the model."""

    work: Work[Fitted]
    ledger: Ledger
    device: torch.device
    beside: bool  # built beside the model; False: built at once, within its caller's time
    rows: dict[int, int] | None = None  # row -> keys of which it takes the codes; None: all rows, all keys


class PQIndex(Index):
    """Centroids and codes of one layer. Entry i of a head's codes is the key at position n_sink + i.

    `build` starts the clustering, beside the model where the cache's lanes do that; every use of the index waits for it first.
    far: both are stored on the host, and a copy is sent to the device for each step. refit_every: as PQCache's option.
    replans: whether every step has a plan of its own.
    """

    per_row = ("centroids", "codes", "fitted")
    centroids: torch.Tensor  # (n, h_kv, m, 2^b, d / m), fp16 for 16-bit keys, else fp32; made by `build`
    codes: Buffer  # (n, h_kv * m, capacity), uint8 up to 8 bits, else int16

    def __init__(
        self,
        how: Clustering,
        n_sink: int,
        reduce: str,
        *,
        far: bool = False,
        refit_every: int = 0,
        replans: bool = False,
    ) -> None:
        self.how, self.n_sink, self.reduce, self.on_host = how, n_sink, reduce, ("centroids", "codes") if far else ()
        self.refit_every, self.replans, self.lags, self.ahead = refit_every, replans, replans, far
        self.fitted: list[int] = []  # keys the row's centroids were fitted to; 0 = no index
        self.refits = 0  # how often rows were clustered again during the answer
        self.building: _Building | None = None
        self.far: Any = None  # pq.far.FarCodes, with codes_store=host

    def build(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> list[bool]:
        self.wait()
        cache, m, far = ctx.cache, self.how.m, bool(self.on_host)
        home = torch.device("cpu") if far else k.device
        counts = self._coded(lengths)
        n, h_kv, _, d = k.shape
        c = 2**self.how.b
        if not self.fitted:
            dtype = torch.float16 if k.dtype in (torch.float16, torch.bfloat16) else torch.float32
            self.centroids = torch.zeros((n, h_kv, m, c, d // m), dtype=dtype, device=home)
            self.codes = Buffer(n, h_kv * m, (), self.how.code_dtype, home, pinned=far, token_major=far)
            self.codes.expected = max(0, cache.expected - self.n_sink)
            if far:
                from pqcache.pq.far import FarCodes

                self.far = FarCodes(k.device, cache.lanes.on(k.device), cache.ledger.move)
            self.fitted = [0] * n
        # nothing to cluster: nothing is left out yet, too few keys for an index, or few new ones since the last fit
        rows = zip(counts, self.fitted, self.layer.dense, strict=True)
        due = [r for r, (count, old, waits) in enumerate(rows) if not waits and count > c and count > old * (1 + REFIT)]
        if due or any(self.fitted):
            self._start(k, counts, due, ctx)
            if not cache.lanes.asynchronous:
                self.wait()
        return [fitted > 0 for fitted in self.fitted]

    def _coded(self, lengths: list[int]) -> list[int]:
        """Of lengths[r] tokens in row r those that have codes: all after the sinks."""
        return [max(0, length - self.n_sink) for length in lengths]

    def build_late(self, lengths: list[int], rows: list[int], ctx: LayerContext) -> list[bool]:
        """Cluster what these rows hold by now. The step waits for it."""
        counts = self._coded(lengths)
        due = [r for r in rows if counts[r] > 2**self.how.b]
        if due:
            self._fit_now(self.layer.store.view()[0], counts, due, ctx)
        return [self.fitted[r] > 0 for r in rows]

    def _fit_now(self, k: torch.Tensor | None, counts: list[int], due: list[int], ctx: LayerContext) -> None:
        """Cluster rows `due` during the answer, as `_start` does. The step waits for it."""
        self.wait()
        self._start(k, counts, due, ctx)
        assert self.building is not None
        # a store in few bits has lost the keys that the other rows' codes are of
        self.building.rows = {r: counts[r] for r in due}
        self.wait()

    def _refit(self, lengths: list[int], ctx: LayerContext) -> None:
        """Cluster again, over all keys so far, the rows that got `refit_every` tokens since their last fit."""
        every, counts = self.refit_every, self._coded(lengths)
        rows = zip(counts, self.fitted, self.layer.dense, strict=True)
        due = [r for r, (count, fitted, dense) in enumerate(rows) if fitted and not dense and count - fitted >= every]
        if not due:
            return
        self._fit_now(None, counts, due, ctx)
        self.refits += 1
        facts = ctx.cache.ledger.facts
        facts["refits"] = max(self.refits, facts.get("refits", 0))

    def local(self, plan: Plan, past: int) -> int:
        """The plan's window. Where every step has its own plan and there are too few keys to cluster: all but the sinks."""
        too_few = self.replans and past + 1 - self.n_sink <= 2**self.how.b
        return plan.local + plan.k if too_few else plan.local

    def max_local(self, plan: Plan) -> int:
        return max(plan.local, min(plan.local + plan.k, 2**self.how.b)) if self.replans else plan.local

    def _start(self, k: torch.Tensor | None, counts: list[int], due: list[int], ctx: LayerContext) -> None:
        """Start to cluster rows `due`, with counts[r] keys, on the device where K-Means runs. A store on the host has them there.

        k (n, h_kv, >= tokens, d): all keys from the first token on; None: those after the sinks are read from the store.
        """
        how, ledger, device = self.how, ctx.cache.ledger, ctx.hidden.device if k is None else k.device
        for r in due:
            self.fitted[r] = counts[r]
            most = ledger.facts.get("kmeans_max_iter", 0)
            ledger.facts["kmeans_max_iter"] = max(how.rounds(counts[r]), most)
        lanes, home = ctx.cache.lanes.on(device), self.codes.data.device
        where = device if how.device == "auto" else torch.device(how.device)
        old, longest, sink, store = self.centroids, max(counts), self.n_sink, self.layer.store
        crosses = where.type != device.type
        on_host = store.host_keys(longest) if where.type == "cpu" and (crosses or k is None) else None
        if on_host is not None:
            (keys, written), sources = on_host, [old]
        else:
            keys = store.keys(sink, sink + longest) if k is None else k[:, :, sink : sink + longest]
            written, sources = NOTHING, [keys, old]
            if crosses:
                ledger.move("index_input", keys.numel() * keys.element_size())
        if where.type != home.type:
            code_bytes = len(counts) * self.codes.data.shape[1] * longest * how.code_dtype.itemsize
            ledger.move("index_upload", len(due) * old[0].numel() * old.element_size() + code_bytes)

        def work() -> Fitted:
            written.finish()
            fitted = fit(keys.to(where), old, counts, due, how)
            return fitted._replace(centroids=fitted.centroids.to(home), codes=fitted.codes.to(home))

        self.building = _Building(lanes.build(work, *sources), ledger, device, lanes.asynchronous)

    def wait(self) -> None:
        self._take_over()
        if self.far is not None:
            self.far.settle()

    def _take_over(self) -> None:
        """Take over the index that was started, if one was. Waiting for it counts as index time."""
        building, self.building = self.building, None
        if building is None:
            return
        ledger = building.ledger
        with ledger.index_timer(building.device) if building.beside else contextlib.nullcontext():
            fitted = building.work.wait()
        n = len(fitted.codes)
        self.centroids = fitted.centroids.pin_memory() if self.codes.pinned else fitted.centroids
        if building.rows is None:
            self.codes.write(fitted.codes, [0] * n, [fitted.codes.shape[-1]] * n)
        else:
            self.codes.reserve(fitted.codes.shape[-1])
            for row, count in building.rows.items():
                self.codes.data[row, :, :count] = fitted.codes[row, :, :count]
        if self.far is not None:
            self.far.tokens = fitted.codes.shape[-1]
        facts = ledger.facts
        facts["kmeans_iterations"] = max(fitted.rounds, facts.get("kmeans_iterations", 0))
        ledger.index_work_s += fitted.seconds

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int], ctx: LayerContext) -> None:
        """The new token gets its codes at once; it is ranked once it has left the local window. See also refit_every."""
        if self.building is not None:
            self._take_over()
        if not any(self.fitted):
            return
        starts = [length - 1 - self.n_sink for length in lengths]
        if self.far is not None:
            self.far.end_step()
        centroids = self.centroids if self.far is None else self.near()[0]
        fp32 = k.dtype == centroids.dtype == torch.float32
        encode = kernels.codes.encode_one if fp32 and kernels.native(k, centroids) else codebook.encode
        codes = encode(k, centroids).flatten(1, 2).to(self.codes.data.dtype)
        if self.far is not None:
            self.far.append(self.codes, codes[..., 0], starts)
        else:  # a short row beside indexed ones is dense, and its sinks are not coded
            self.codes.write(codes, [max(0, start) for start in starts], [int(start >= 0) for start in starts])
        if self.refit_every:
            self._refit(lengths, ctx)

    def near(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Centroids and codes (n, h_kv * m, >= tokens) on the device."""
        if self.far is not None:
            return self.far.take(self.centroids, self.codes)
        return self.centroids, self.codes.data

    def score(self, q: torch.Tensor, lo: int, hi: int, ctx: LayerContext) -> torch.Tensor:
        centroids, codes = self.near()
        sink = self.n_sink
        n, h_kv, m = centroids.shape[:3]
        return codebook.score(q, codes[:, :, lo - sink : hi - sink].view(n, h_kv, m, -1), centroids) * ctx.scaling

    def select(self, q: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext) -> Selection:
        """Scores, group softmax and top-k in one kernel where it serves, else as in the base class: the same selection."""
        sink = self.n_sink
        indices = self._by_kernel(q, cand.sinks - sink, [end - sink for end in cand.ends], cand.k, None, ctx)
        if indices is None:
            return super().select(q, cand, h_kv, ctx)
        return Selection(indices, padded=len(set(cand.k)) > 1)

    def best_at(
        self, q: torch.Tensor, shortlist: torch.Tensor, cand: Candidates, h_kv: int, ctx: LayerContext
    ) -> torch.Tensor | None:
        if shortlist.shape[1] not in (1, h_kv):
            return None
        k = [min(count, shortlist.shape[2]) for count in cand.k]
        entries = torch.where(shortlist < 0, -1, shortlist - self.n_sink)
        return self._by_kernel(q, 0, [0] * len(k), k, entries, ctx)

    def _by_kernel(
        self, q: torch.Tensor, lo: int, hi: list[int], k: list[int], shortlist: torch.Tensor | None, ctx: LayerContext
    ) -> torch.Tensor | None:
        """Positions (n, h_kv, max(k)) of the best of entries lo .. hi[r]-1 or of a shortlist; None if no kernel serves."""
        if self.reduce != "sum_softmax" or self.scope != "candidates":
            return None
        centroids, codes = (self.centroids, self.codes.data) if self.far is None else self.near()
        if not kernels.native(q, centroids, codes, scaling=ctx.scaling):
            return None
        codes = codes.view(centroids.shape[0], -1, centroids.shape[2], codes.shape[-1])
        fp32 = q.dtype == centroids.dtype == torch.float32
        tables = (kernels.codes if fp32 else codebook).tables(q, centroids) * ctx.scaling
        entries = kernels.codes.top_tokens(tables, codes, lo, hi, k, shortlist)
        if entries is None:
            return None
        padded = shortlist is not None or len(set(k)) > 1
        return torch.where(entries < 0, entries, entries + self.n_sink) if padded else entries + self.n_sink

    def score_at(self, q: torch.Tensor, indices: torch.Tensor, ctx: LayerContext) -> torch.Tensor:
        """Look up the codes of these positions alone."""
        centroids, codes = self.near()
        n, h_kv, m = centroids.shape[:3]
        heads = max(h_kv, indices.shape[1])
        at = (indices - self.n_sink).clamp_min(0).expand(n, heads, -1)
        at = at.unflatten(1, (h_kv, -1))  # (n, h_kv, g, t)
        codes = codes.view(n, h_kv, m, -1)
        if heads == h_kv:
            codes = codes.gather(3, at.expand(-1, -1, m, -1))
            return codebook.score(q, codes, centroids) * ctx.scaling
        at = at.flatten(2)[:, :, None].expand(-1, -1, m, -1)  # (n, h_kv, m, g * t)
        codes = codes.gather(3, at).unflatten(3, (heads // h_kv, -1)).transpose(2, 3).flatten(1, 2)  # (n, h, m, t)
        return codebook.score(q, codes, centroids.repeat_interleave(heads // h_kv, dim=1)) * ctx.scaling

    # -- codes on the host, sent ahead of their layer -----------------------------------------------------------------

    def on_previous_input(self, ctx: LayerContext) -> None:
        """Begin to send what this layer's next step needs, unless it is still being built: the step will wait then."""
        if self.far is None or self.building is not None or not ctx.step.decode or all(self.layer.dense):
            return
        self.far.start(self.centroids, self.codes)

    on_layer_input = on_previous_input

    def end_step(self) -> None:
        if self.far is not None:
            self.far.end_step()

    # -- codes lent to kernels on the device --------------------------------------------------------------------------

    def pq_codes(self) -> PQCodes | None:
        self._take_over()
        if self.far is not None or self.refit_every:  # centroids that change: no kernel's step knows of it
            return None
        if not self.fitted or (self.reduce, self.scope) != ("sum_softmax", "candidates"):
            return None
        return PQCodes(self.centroids, self.codes)

    # -- state --------------------------------------------------------------------------------------------------------

    def map_rows(self, index: torch.Tensor) -> None:
        self.wait()
        super().map_rows(index)
        if self.fitted and self.codes.pinned:
            self.centroids = self.centroids.pin_memory()
