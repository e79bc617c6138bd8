"""Figures of attention scores, from diagnostics=scores: how they are distributed (PQCache, figure 5), and where (figure 1b).

    figure: {kind: score_curves, heads: [[3, 25], [11, 15]]}    a panel per [layer, head], counted from 0; a line per position
    figure: {kind: score_map, heads: [[11, 15]]}                a panel per [layer, head]: queries over tokens, darker is higher

A model with fewer layers or heads shows the one that the number leaves over: layer 3 of 3 is layer 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.diagnostic_arrays import read_arrays
from pqcache.harness.report.figure_request import FigureRequest

if TYPE_CHECKING:
    import torch


def draw_score_curves(request: FigureRequest) -> Path | None:
    """The scores of some positions of the first prompt in descending order, both axes logarithmic."""
    arrays = _arrays(request)
    if arrays is None:
        return None
    heads, positions = _heads(request, arrays["scores"]), arrays["score_positions"].tolist()
    figure, axes = drawing.panels(len(heads), 3.3, 2.9)
    looks = drawing.looks([f"position {p}" for p in positions])
    for axis, (layer, head) in zip(axes, heads, strict=True):
        for position, weights in zip(positions, arrays["scores"][layer, head], strict=True):
            seen = weights[: position + 1].sort(descending=True).values.tolist()
            name = f"position {position}"
            axis.plot(range(1, len(seen) + 1), seen, label=name, color=looks[name].color, linewidth=1.2)
        drawing.style(axis, f"Layer {layer}, head {head}", "tokens, the highest score first", "attention score")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(1e-7, 1.5)
    drawing.legend(figure, axes)
    return drawing.save(figure, request.path, request.caption())


def draw_score_map(request: FigureRequest) -> Path | None:
    """The largest score of each part of the first prompt's queries for each part of its tokens."""
    from matplotlib.colors import LogNorm

    arrays = _arrays(request)
    if arrays is None:
        return None
    maps = arrays["score_map"]
    heads, tokens = _heads(request, maps), arrays["scores"].shape[-1]
    figure, axes = drawing.panels(len(heads), 4.4, 3.8)
    image: Any = None
    for axis, (layer, head) in zip(axes, heads, strict=True):
        shown = maps[layer, head].clamp_min(1e-5).numpy()
        image = axis.imshow(
            shown, cmap="Blues", norm=LogNorm(1e-5, 1), extent=(0, tokens, tokens, 0), interpolation="nearest"
        )
        drawing.style(axis, f"Layer {layer}, head {head}", "token", "query")
        axis.grid(visible=False)
    figure.colorbar(image, ax=list(axes), label="attention score (largest of each cell)")
    return drawing.save(figure, request.path, request.caption())


def _arrays(request: FigureRequest) -> dict[str, torch.Tensor] | None:
    """The arrays of the first sample that has scores."""
    for cell in request.plan.cells:
        if cell.name in request.rows:
            for file in sorted((cell.folder / "diagnostics").glob("*.npz")):
                if "scores" in (arrays := read_arrays(file)):
                    return arrays
    return None


def _heads(request: FigureRequest, x: torch.Tensor) -> list[tuple[int, int]]:
    """The requested (layer, head) pairs, each once, of x (layers, heads, ...)."""
    wanted = request.options.get("heads") or [[0, 0]]
    return list(dict.fromkeys((int(layer) % x.shape[0], int(head) % x.shape[1]) for layer, head in wanted))
