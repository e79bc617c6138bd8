"""Means of the measures of several requests: by layer, and over all layers that select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pqcache.diagnostics.observe import ARRAYS

# What a summary says, of ARRAYS and of chance (selected / candidates).
MEANS = (
    "recall_q", "recall_kv", "recall_budget", "hit_top10", "chance", "attended", "mass", "output_error", "set_error", "bound",
    "top_stay",
)  # fmt: skip


def summarize(samples: Sequence[Mapping[str, torch.Tensor]], dense_layers: int = 0) -> dict[str, Any]:
    """One summary of the arrays of several requests: means over samples, layers, heads and steps, each step counting once.

    The first `dense_layers` layers are left out of the means. None where a measure is not defined. Keys: MEANS, mass_p5 (5th
    percentile of mass over all of those), bound_held (share of entries whose error is within the bound), samples, steps,
    by_layer (name -> one mean per layer; chance is selected / candidates).
    """
    samples = [s for s in samples if s]
    pooled: dict[str, torch.Tensor] = {}
    for name in ARRAYS if samples else ():
        pooled[name] = torch.cat([s[name].flatten(1) for s in samples], 1)  # (layers, everything)
    if not samples:
        return {}
    pooled["chance"] = pooled["selected"] / pooled["candidates"]
    chosen = {name: x[dense_layers:] for name, x in pooled.items()}
    out: dict[str, Any] = {name: _mean(chosen[name]) for name in MEANS}
    mass = chosen["mass"][chosen["mass"].isfinite()]
    out["mass_p5"] = float(mass.sort().values[int(0.05 * (len(mass) - 1))]) if len(mass) else None
    known = chosen["bound"].isfinite()
    within = chosen["set_error"] <= chosen["bound"] * (1 + 1e-5) + 1e-12
    out["bound_held"] = float(within[known].double().mean()) if known.any() else None
    out["samples"], out["steps"] = len(samples), sum(s["mass"].shape[-1] for s in samples)
    out["by_layer"] = {name: [_mean(x) for x in pooled[name]] for name in MEANS}
    return out


def _mean(x: torch.Tensor) -> float | None:
    known = x[x.isfinite()]
    return float(known.double().mean()) if known.numel() else None
