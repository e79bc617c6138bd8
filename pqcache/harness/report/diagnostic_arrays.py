"""The arrays of one sample's diagnostics: <cell>/diagnostics/<task>-<document>-<fingerprint>.npz, from run/recorder.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.diagnostics.observe import ARRAYS
from pqcache.diagnostics.scores import FIELDS as SCORES

if TYPE_CHECKING:
    import torch

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
    import numpy
    import torch

    with numpy.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def arrays_of(cell: Path, suffix: str = ".npz") -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(the file's stem, its arrays) of every sample of a cell that has a decode step, or with PROMPT_SUFFIX, of every prompt."""
    from safetensors.torch import load_file

    read = read_arrays if suffix == ".npz" else load_file
    files = sorted((cell / "diagnostics").glob(f"*{suffix}"))
    return ((file.stem, arrays) for file in files if (arrays := read(file)))
