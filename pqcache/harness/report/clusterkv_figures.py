"""ClusterKV's figures that no other experiment has (arXiv 2412.03213).

    figure: {kind: ranks_and_pages, steps: 64}                        figure 3: ranks of tokens, weights within pages
    figure: {kind: line_panels, panels: {title: [cell, ...]}, ...}    figure 11: lines, a panel per group of cells

`line_panels` takes `lines`'s x, y, x_label and y_label; `names` gives cells the names of the legend.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.diagnostic_arrays import read_arrays
from pqcache.harness.report.figure_request import FigureRequest, key_of

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

FAINTEST = 1e-3  # attention weight, relative to the heaviest of a head, that still has a colour of its own
HEADS = (("25th percentile", 0.25), ("median", 0.5), ("75th percentile", 0.75))


def draw_line_panels(request: FigureRequest) -> Path | None:
    """A panel per group of cells; a cell has the same look in each."""
    options = request.options
    groups = {str(title): [str(n) for n in names] for title, names in dict(options["panels"]).items()}
    names = {str(k): str(v) for k, v in dict(options.get("names") or {}).items()}
    entries = [e for e in request.entries if e.metric == request.metric and e.measured is not None]
    looks = drawing.looks(list(dict.fromkeys(cell for members in groups.values() for cell in members)))
    figure, axes = drawing.panels(len(groups), 5.4, 4.0)
    for axis, (title, members) in zip(axes, groups.items(), strict=True):
        for cell in members:
            own = [e for e in entries if cell in e.line.split(", ")]
            points = sorted((key_of(request.cells[e.folder], str(options["x"])), e.measured) for e in own)
            if points:
                color, marker = looks[cell]
                xs, ys = zip(*points, strict=True)
                axis.plot(xs, ys, label=names.get(cell, cell), color=color, marker=marker, markersize=4, linewidth=1.3)
        drawing.style(
            axis, title, str(options.get("x_label", options["x"])), str(options.get("y_label", request.metric))
        )
        axis.set_ylim(*request.limits(request.metric, (e.measured for e in entries)))
        axis.set_xticks(sorted({key_of(request.cells[e.folder], str(options["x"])) for e in entries}))
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7.5, frameon=False)
    return drawing.save(figure, request.path, request.caption())


def draw_ranks_and_pages(request: FigureRequest) -> Path | None:
    """Panel (a) and three heads of (b), of the first sample of Full's cell; None without two decode steps."""
    arrays = _first_sample(request)
    if arrays is None:
        return None
    figure = drawing.new_figure(12.5, 4.6)
    axes = figure.subplots(1, 4, width_ratios=[1.9, 1, 1, 1])
    _draw_ranks(axes[0], arrays, int(request.options.get("steps", 64)))
    maps = [_draw_pages(axis, arrays, name, share) for axis, (name, share) in zip(axes[1:], HEADS, strict=True)]
    bar = figure.colorbar(maps[0], ax=list(axes[1:]), fraction=0.05)
    bar.set_label("attention weight, relative to the heaviest shown", fontsize=8)
    text = (
        " (a) Evenly spaced prompt tokens, in the head of median change. (b) The pages of 16 tokens with most weight at the first"
        " decode step, in order of position; heads by the share of a page's weight that its heaviest token has, mean over pages."
    )
    return drawing.save(figure, request.path, request.caption() + text)


def _first_sample(request: FigureRequest) -> dict[str, torch.Tensor] | None:
    for cell in request.plan.cells:
        if cell.name in request.rows and cell.identity["method"]["name"] == "full":
            for file in sorted((cell.folder / "diagnostics").glob("*.npz")):
                arrays = read_arrays(file)
                if arrays and arrays["ranks"].shape[2] >= 2 and "pages" in arrays:
                    return arrays
    return None


def _draw_ranks(axis: Axes, arrays: dict[str, torch.Tensor], steps: int) -> None:
    ranks, stay = arrays["ranks"][:, :, :steps], arrays["top_stay"][:, :, :steps]
    mean = stay[:, :, 1:].mean(-1)
    at = int((mean.flatten() - mean.median()).abs().argmin())
    layer, head = divmod(at, mean.shape[1])
    for i, position in enumerate(arrays["positions"].tolist()):
        line = ranks[layer, head, :, i] + 1
        axis.plot(range(len(line)), line, color=drawing.colour(i), linewidth=1.2, label=f"token {position}")
    drawing.style(
        axis, f"(a) layer {layer}, query head {head}", "decode step", "rank by attention weight (1 = heaviest)"
    )
    axis.invert_yaxis()
    axis.legend(fontsize=7, ncols=2, framealpha=0.85, edgecolor="none")


def _draw_pages(axis: Axes, arrays: dict[str, torch.Tensor], name: str, share: float) -> AxesImage:
    """One head's pages as a heat map; returns the image, for the colour bar."""
    from matplotlib.colors import LogNorm

    weights, pages = arrays["page_weights"], arrays["pages"]  # (layers, heads, pages, 16), (layers, heads, pages)
    held = pages >= 0
    top = (weights.amax(-1) / weights.sum(-1).clamp_min(1e-30)).masked_fill(~held, 0)
    concentration = (top.sum(-1) / held.sum(-1).clamp_min(1)).flatten()
    at = int((concentration - concentration.quantile(share)).abs().argmin())
    layer, head = divmod(at, pages.shape[1])
    shown = held[layer, head]
    cells = weights[layer, head][shown]
    relative = (cells / cells.max().clamp_min(1e-30)).clamp_min(FAINTEST)
    heat = axis.imshow(relative, cmap="viridis", norm=LogNorm(FAINTEST, 1.0), aspect="auto")
    axis.set_title(f"(b) layer {layer}, head {head} ({name})", fontsize=9)
    axis.set_xlabel("token of the page", fontsize=8.5)
    axis.set_xticks([0, 5, 10, 15])
    axis.set_yticks(range(int(shown.sum())), [str(p) for p in pages[layer, head][shown].tolist()])
    axis.set_ylabel("page", fontsize=8.5)
    axis.tick_params(labelsize=7)
    return heat
