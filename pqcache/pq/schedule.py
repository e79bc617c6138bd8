"""How many K-Means rounds hide behind one layer's prefill (PQCache, section 3.3).

The times come from a profile of machine, model geometry and index, stored as <cache_dir>/schedule/<machine>__<geometry>.json.
A run of the harness measures it before its first prompt (profile.py). The library alone refuses max_iter=adaptive without a
profile: rounds decide which tokens are selected, so a guess must not replace it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from pqcache.atomic import write_text
from pqcache.measure.machine import device_caption, slug
from pqcache.selective.shape import ModelShape, NotApplicable

T_MIN, T_MAX = 3, 300  # 3 rounds is what the base latency below was measured with


@dataclass(frozen=True)
class CostModel:
    """Seconds as functions of x, the keys to cluster; measured on the machine and model at hand.

    compute: (a2, a1, a0) of one layer's prefill, a2 x^2 + a1 x + a0. base: (c1, c0) of clustering with 3 rounds.
    per_round: (e1, e0) of each further round.
    """

    compute: tuple[float, float, float]
    base: tuple[float, float]
    per_round: tuple[float, float]

    def rounds(self, x: int) -> int:
        """The largest T whose clustering of all groups of a layer ends within its prefill, clipped to [3, 300]."""
        a2, a1, a0 = self.compute
        budget = (a2 * x + a1) * x + a0
        base = self.base[0] * x + self.base[1]
        per_round = self.per_round[0] * x + self.per_round[1]
        if budget <= base:
            return T_MIN
        if per_round <= 0:  # measured times so noisy that further rounds look free
            return T_MAX
        return min(T_MAX, T_MIN + math.floor((budget - base) / per_round))


@dataclass(frozen=True)
class Geometry:
    """What one layer's times depend on besides the machine."""

    h: int
    h_kv: int
    d: int
    hidden: int
    intermediate: int
    dtype: str
    m: int
    b: int
    kmeans_device: str

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: str, *, m: int, b: int, kmeans_device: str) -> Geometry:
        text = config.get_text_config(decoder=True)
        shape = ModelShape.of(text)
        wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        return cls(shape.h, shape.h_kv, shape.d, text.hidden_size, wide, dtype, m, b, kmeans_device)

    def name(self) -> str:
        layer = f"h{self.h}-kv{self.h_kv}-d{self.d}-{self.hidden}-{self.intermediate}-{self.dtype}"
        return f"{layer}-m{self.m}-b{self.b}-kmeans-{self.kmeans_device}"


CACHE_DIR = Path("~/.cache/pqcache")


def profile_path(geometry: Geometry, device: torch.device, cache_dir: Path | None = None) -> Path:
    folder = (cache_dir or CACHE_DIR).expanduser() / "schedule"
    return folder / f"{slug(device_caption(device))}__{geometry.name()}.json"


def load_cost(geometry: Geometry, device: torch.device, cache_dir: Path | None = None) -> CostModel:
    """The fitted costs. Raises NotApplicable, one line that says how to measure them."""
    path = profile_path(geometry, device, cache_dir)
    try:
        cost = json.loads(path.read_text())["cost"]
        return CostModel(*(tuple(map(float, cost[key])) for key in ("compute", "base", "per_round")))  # type: ignore[arg-type]
    except (OSError, ValueError, KeyError, TypeError):
        state = "unreadable" if path.exists() else "no"
        raise NotApplicable(
            f"max_iter=adaptive: {state} profile of this machine and model ({path});"
            " method.prepare(model, ids, folder) with any token ids (1, t) measures one"
        ) from None


def save_cost(
    cost: CostModel, geometry: Geometry, device: torch.device, cache_dir: Path | None, points: dict[str, Any]
) -> Path:
    """Store a profile and the measured points it was fitted to."""
    path = profile_path(geometry, device, cache_dir)
    content = {"device": device_caption(device), "geometry": asdict(geometry), "cost": asdict(cost), "points": points}
    write_text(path, json.dumps(content, indent=1) + "\n")
    return path


def fit_cost(
    x: Sequence[int], compute: Sequence[float], base: Sequence[float], more: Sequence[float], extra_rounds: int
) -> CostModel:
    """Least squares over seconds measured at x tokens: their prefill; clustering x keys in 3 rounds, in extra_rounds more."""
    per_round = [(b - a) / extra_rounds for a, b in zip(base, more, strict=True)]
    fits = (np.polyfit(x, seconds, degree) for seconds, degree in ((compute, 2), (base, 1), (per_round, 1)))
    return CostModel(*(tuple(fit.tolist()) for fit in fits))
