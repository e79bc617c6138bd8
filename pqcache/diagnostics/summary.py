"""The arrays of samples on disk, and means of the measures of several: by layer, and over all layers that select.

<cell>/diagnostics/<task>-<document>-<fingerprint>.npz has the arrays of FIELDS, with PROMPT_SUFFIX those of PROMPT_ARRAYS.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file

from pqcache.diagnostics.observe import ARRAYS
from pqcache.diagnostics.scores import FIELDS as SCORES

# name -> shape and meaning; each of ARRAYS is (layers, heads, steps) float32, NaN where not defined
FIELDS = {
    **ARRAYS,
    "ranks": "(layers, heads, steps, tracked) int32: rank of some prompt tokens among the prompt's, 0 = heaviest",
    "positions": "(tracked,) int32: positions of those tokens",
    **SCORES,  # with diagnostics=scores
    "pages": "(layers, heads, pages) int32: at the first step, the pages of 16 prompt tokens with most weight; -1 = fewer",
    "page_weights": "(layers, heads, pages, 16) float32: softmax weight of each of their tokens",
}
PROMPT_SUFFIX = ".prompt.safetensors"  # of the tensors of PROMPT_ARRAYS, with diagnostics=prompt


def read_arrays(path: Path) -> dict[str, torch.Tensor]:
    """The arrays of FIELDS; empty if the sample had no decode step."""
    with numpy.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def arrays_of(cell: Path, suffix: str = ".npz") -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(the file's stem, its arrays) of every sample of a cell that has a decode step, or with PROMPT_SUFFIX, of every prompt."""
    read = read_arrays if suffix == ".npz" else load_file
    files = sorted((cell / "diagnostics").glob(f"*{suffix}"))
    return ((file.stem, arrays) for file in files if (arrays := read(file)))


# -- means --------------------------------------------------------------------------------------------------------------

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
    if not samples:
        return {}
    pooled = {name: torch.cat([s[name].flatten(1) for s in samples], 1) for name in ARRAYS}  # (layers, everything)
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
