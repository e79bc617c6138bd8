"""PQCache: retrieve the tokens whose product-quantized keys score highest (Zhang et al., arXiv 2407.12820, section 3)."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pqcache.fields import MOST, Positive, Whole, added
from pqcache.pq.fit import Clustering
from pqcache.pq.index import PQIndex
from pqcache.pq.schedule import CostModel, Geometry, load_cost
from pqcache.selective.budget import Plan, floor_share, partition_plan
from pqcache.selective.placement import home
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape, NotApplicable


@dataclass(kw_only=True)
class PQCache(RetrievalMethod):
    """PQ codes of keys rank the candidates; see RetrievalMethod for sinks, local window and stores.

    Candidates are ranked by softmax over the candidates per query head, summed over the group, as in the released code. The
    paper ranks by scores before the softmax (section 3.1) and does not say how a group's heads share one choice; for one query
    head per KV head both are the same. Centroids are fitted to the prompt; the code of a later key is its nearest centroid, until
    refit_every, which is not in the paper, clusters again.

    protocol=release rounds window and selected tokens down separately (together a token less at most), and its block cache is
    LFU. The paper has no numbers for sinks and window; protocol=paper takes those of the released scripts, as aligned does.

    Deviations:
    - Rounds are 5 under every protocol. In the paper and the released code they adapt to the machine (section 3.3):
      max_iter=adaptive. The released code takes one layer's prefill times from a table of one GPU; here they are measured.
    - K-Means sees every key after the sinks. The released code clusters stale rows in place of the local window's keys, and a
      token that leaves the window gets the codes and the place of another one.
    - All layers advance together. In the released code the first layer's call moves the shared counters.
    - Scores are fp32, not fp16. Codes are uint8, not int64, and only new ones are sent.
    - The block cache forgets its blocks with the prompt and holds complete blocks only.
    - Prompts too short for an index stay dense. The released code then attends to the current token alone.
    - Prompt tokens in the local window are also on the host: a token leaves the window without a copy.
    """

    name: ClassVar[str] = "pqcache"
    released: ClassVar[str] = "HugoZHL/PQCache: vq_method/retrieval_based/pq_search.py"
    ranks_shortlists: ClassVar[bool] = True

    # store=block_cache: which blocks stay: lru | lfu | none (nothing is cached) | paying (no blocks: rows that a step fetched
    # anyway, by how often they were read, so that nothing is refilled; cache_block and cache_topk have no effect); null: lru,
    # under protocol=release lfu
    cache_policy: str | None = None  # type: ignore[assignment]
    # sub-spaces per key: 1 | 2 | 4 | 8 | 16, a divisor of the head dimension
    m: Literal[1, 2, 4, 8, 16] = 2
    # bits per code: 2^b centroids per sub-space
    b: Annotated[int, 1, 12] = 6
    # maximum K-Means rounds | adaptive: as many as end within one layer's prefill (section 3.3), by a profile of this machine,
    # measured before the first prompt; scores then depend on the machine, and the result row records the rounds
    max_iter: Positive | Literal["adaptive"] = 5
    # K-Means stops when the squared movements of the centroids sum to at most tol times the keys' mean variance
    tol: Annotated[float, 0, MOST] = 1e-4
    # seed of the first centroids
    kmeans_seed: int = 4321
    # where K-Means runs: cpu | cuda | auto (where the keys are)
    kmeans_device: Literal["cpu", "cuda", "auto"] = "cpu"
    # where centroids and codes are: resident (on the device) | host (a copy is sent for each step while the layer before runs,
    # section 3.4)
    codes_store: Literal["resident", "host"] = "resident"
    # cluster again, over all keys so far, after every so many generated tokens; 0: never, as published. The step waits for it,
    # and steps are not done by kernels on the device
    refit_every: Whole = added(0, absent=0)

    def fill(self) -> None:
        self.by_protocol(cache_policy=("lru", "lru", "lfu"))

    def validate(self) -> None:
        super().validate()
        if self.kmeans_device == "cuda":
            self.require("kmeans_device", torch.cuda.is_available(), "cpu or auto on a machine without CUDA")

    def setup(self) -> None:
        self.cost: CostModel | None = None  # of adaptive rounds; `prepare` loads it

    def plan(self, s: int, layer_idx: int, n_layers: int) -> Plan:
        aligned = partition_plan(self.budget_at(s), s, self.n_sink, self.recent_ratio)
        ratio = self.budget.ratio
        if self.protocol != "release" or ratio is None or self.budget.is_everything:
            return aligned
        rest = s - aligned.sinks
        local = min(rest, max(1, floor_share(rest, ratio * self.recent_ratio)))
        return Plan(aligned.sinks, local, min(rest - local, floor_share(rest, ratio * (1 - self.recent_ratio))))

    def rounds(self, count: int) -> int:
        """Maximum K-Means rounds for `count` keys per head."""
        if isinstance(self.max_iter, int):
            return self.max_iter
        if self.cost is None:
            raise RuntimeError(
                "max_iter=adaptive was not prepared for this model: call prepare(model, None, None) first"
            )
        return self.cost.rounds(count)

    def check_prepared(
        self, config: PreTrainedConfig, device: torch.device, dtype: str, cache_dir: Path | None
    ) -> None:
        """Read the profile of this machine and model, if rounds are adaptive and there is one. `prepare` makes one."""
        if self.max_iter == "adaptive":
            with contextlib.suppress(NotApplicable):
                self.cost = load_cost(self._geometry(config, device, dtype), device, cache_dir)

    def _geometry(self, config: PreTrainedConfig, device: torch.device, dtype: str) -> Geometry:
        where = device.type if self.kmeans_device == "auto" else self.kmeans_device
        return Geometry.of(config, dtype, m=self.m, b=self.b, kmeans_device=where)

    def prepare(self, model: PreTrainedModel, text: torch.Tensor | None, cache_dir: Path | None) -> None:
        """Adaptive rounds: read the profile; without one measure it where a text is given, as the harness does.

        Raises NotApplicable, one line that says how to measure it, if there is neither.
        """
        if self.max_iter != "adaptive" or (self.cost is not None and cache_dir is None):
            return
        size = self._geometry(model.config, home(model), str(model.dtype).removeprefix("torch."))
        try:
            self.cost = load_cost(size, home(model), cache_dir)
        except NotApplicable:
            if text is None or cache_dir is None:
                raise
            from pqcache.pq.profile import make_profile  # it needs a decoder layer of transformers

            self.cost = make_profile(size, home(model), cache_dir)

    def check_model(self, config: PreTrainedConfig) -> None:
        d = ModelShape.of(config).d
        self.require("m", d % self.m == 0, f"a divisor of the head dimension {d}")

    def make_index(self, layer_idx: int, shape: ModelShape) -> PQIndex:
        how = Clustering(self.m, self.b, self.rounds, self.tol, self.kmeans_seed, self.kmeans_device)
        far = self.codes_store == "host"
        return PQIndex(how, self.n_sink, self.reduce, far=far, refit_every=self.refit_every, replans=self.replans)
