"""PQCache: retrieve the tokens whose product-quantized keys score highest (Zhang et al., arXiv 2407.12820, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pqcache.pq.index import PQIndex
from pqcache.pq.schedule import CostModel, Geometry, load_cost
from pqcache.selective.retrieval import RetrievalMethod
from pqcache.selective.shape import ModelShape

CODES_STORES = ("resident", "host")


@dataclass(kw_only=True)
class PQCache(RetrievalMethod):
    """PQ codes of keys rank the candidates; see RetrievalMethod for sinks, local window and stores.

    Candidates are ranked by softmax over the candidates per query head, summed over the group. Centroids are fitted to the
    prompt; the code of a later key is its nearest centroid.

    Deviations from the released code, each for correctness:
    - K-Means sees every key after the sinks, not stale rows, and a token's codes are its own.
    - All layers advance together.
    - Scores are fp32. Codes are uint8, and only new ones are written.
    - Prompts too short for an index stay dense.
    - Prompt tokens in the local window are also on the host: a token leaves the window without a copy.
    """

    name: ClassVar[str] = "pqcache"
    ranks_shortlists: ClassVar[bool] = True

    # sub-spaces per key: 1 | 2 | 4 | 8 | 16, a divisor of the head dimension
    m: int = 2
    # bits per code: 2^b centroids per sub-space
    b: int = 6
    # maximum K-Means rounds | adaptive: as many as end within one layer's prefill, by a profile of this machine (section 3.3);
    # scores then depend on the machine, and the result row records the rounds
    max_iter: int | str = 5
    # K-Means stops when the squared movements of the centroids sum to at most tol times the keys' mean variance
    tol: float = 1e-4
    # seed of the first centroids
    kmeans_seed: int = 4321
    # where K-Means runs: cpu | cuda | auto (where the keys are)
    kmeans_device: str = "cpu"
    # where centroids and codes are: resident (on the device) | host (a copy is sent for each step while the layer before runs,
    # section 3.4)
    codes_store: str = "resident"

    def validate(self) -> None:
        super().validate()
        self.require("m", self.m in (1, 2, 4, 8, 16), "1, 2, 4, 8 or 16")
        self.require("b", 1 <= self.b <= 12, "an int in 1..12")
        rounds = isinstance(self.max_iter, int) and self.max_iter >= 1
        self.require("max_iter", rounds or self.max_iter == "adaptive", "an int >= 1 or adaptive")
        self.require("tol", self.tol >= 0, "a float >= 0")
        self.require_one_of("codes_store", CODES_STORES)
        self.require_one_of("kmeans_device", ("cpu", "cuda", "auto"))
        if self.kmeans_device == "cuda":
            self.require("kmeans_device", torch.cuda.is_available(), "cpu or auto on a machine without CUDA")

    def setup(self) -> None:
        self.cost: CostModel | None = None  # of adaptive rounds; `prepare` loads it

    def rounds(self, count: int) -> int:
        """Maximum K-Means rounds for `count` keys per head."""
        if isinstance(self.max_iter, int):
            return self.max_iter
        if self.cost is None:
            raise RuntimeError(
                "max_iter=adaptive was not prepared for this model: call prepare(model, None, None) first"
            )
        return self.cost.rounds(count)  # the profile timed all groups of a layer together

    def check_prepared(
        self, config: PreTrainedConfig, device: torch.device, dtype: str, cache_dir: Path | None
    ) -> None:
        """Raise ValueError if rounds are adaptive and no profile of this machine and model says how many fit."""
        if self.max_iter == "adaptive":
            where = device.type if self.kmeans_device == "auto" else self.kmeans_device
            geometry = Geometry.of(config, dtype, m=self.m, b=self.b, kmeans_device=where)
            self.cost = load_cost(geometry, device, cache_dir)

    def prepare(self, model: PreTrainedModel, text: torch.Tensor | None, cache_dir: Path | None) -> None:
        if self.cost is None or cache_dir is not None:
            dtype = str(model.dtype).removeprefix("torch.")
            self.check_prepared(model.config, model.device, dtype, cache_dir)

    def check_model(self, config: PreTrainedConfig) -> None:
        d = ModelShape.of(config).d
        self.require("m", d % self.m == 0, f"a divisor of the head dimension {d}")

    def make_index(self, layer_idx: int, shape: ModelShape) -> PQIndex:
        return PQIndex(self)
