"""Figures from the files that diagnostics leave beside the rows: attention scores, ranks of tokens, one prompt's K and V.

    figure: {kind: ranks}                                      ranks of tokens over decode steps (ClusterKV, figure 3a)
    figure: {kind: ranks_and_pages, steps: 64}                 these, and the weights within pages of 16 tokens (figure 3)
    figure: {kind: score_curves, heads: [[3, 25], [11, 15]]}   diagnostics=scores: sorted scores, a panel per [layer, head]
    figure: {kind: score_map, heads: [[11, 15]]}               diagnostics=scores: queries over tokens
    figure: {kind: prompt_kv}                                  diagnostics=prompt: |k| and |v| by token and channel
    figure: {kind: prompt_saliency, share: 0.4}                diagnostics=prompt: how often each token is salient

Each is of the first sample that has the file. A model with fewer layers or heads shows the one that a number leaves over: layer
3 of 3 is layer 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import plots
from pqcache.harness.report.diagnostic_arrays import PROMPT_SUFFIX, arrays_of
from pqcache.harness.report.figure_request import FigureRequest
from pqcache.harness.report.plots import Panel
from pqcache.selective.budget import floor_share

if TYPE_CHECKING:
    import torch

Arrays = dict[str, "torch.Tensor"]
FAINTEST = 1e-3  # attention weight, relative to the heaviest of a head, that still has a colour of its own
HEADS = (("25th percentile", 0.25), ("median", 0.5), ("75th percentile", 0.75))
PIXELS = 1024  # a map with more tokens or channels shows the largest number of each few
BRIGHTEST = 0.999  # the quantile that is drawn as the brightest colour


def _first(request: FigureRequest, name: str, method: str = "", suffix: str = ".npz") -> Arrays | None:
    """The arrays of the first sample that has one of this name; of two steps at least where they are ranks."""
    cells = (cell for cell, row in request.measured if method in ("", row["method"]))
    for _, arrays in (sample for cell in cells for sample in arrays_of(cell.folder, suffix)):
        if name in arrays and ("ranks" not in arrays or arrays["ranks"].shape[2] > 1 or name == "scores"):
            return arrays
    return None


# -- ranks and pages ---------------------------------------------------------------------------------------------------


def rank_panels(arrays: Arrays, steps: int | None = None) -> list[Panel]:
    """Ranks of evenly spaced prompt tokens in the head of median change, and how long heavy tokens stay heavy in each layer."""
    import torch

    ranks, stay = arrays["ranks"][:, :, :steps], arrays["top_stay"][:, :, :steps]  # (layers, heads, steps[, tracked])
    mean = stay[:, :, 1:].mean(-1)
    # the head in which heavy tokens stay as long as in the median head
    layer, head = divmod(int((mean.flatten() - mean.median()).abs().argmin()), mean.shape[1])
    shown = ranks[layer, head] + 1
    lines = [
        plots.series(f"token {position}", range(len(shown)), shown[:, i].tolist())
        for i, position in enumerate(arrays["positions"].tolist())
    ]
    title = f"layer {layer}, query head {head}"
    label = "rank by attention weight (1 = heaviest)"
    ends = (1.2 * float(shown.max()), 0.8)  # the heaviest at the top
    left = Panel(title, plots.joined(lines), "decode step", label, log="y", limits=ends)
    share = plots.wide(torch.nanmean(stay, 1))
    text = "the first step's 64 heaviest prompt tokens"
    return [left, Panel(text, share, "decode step", "layer", kind="map", colour="share that still are")]


def _ranks(request: FigureRequest) -> Path | None:
    """Of the first sample of Full's cell that has some."""
    arrays = _first(request, "ranks", "full")
    panels = rank_panels(arrays) if arrays is not None else []
    return plots.draw(panels, request.path, request.caption(), size=(5.5, 4.0))


def _ranks_and_pages(request: FigureRequest) -> Path | None:
    arrays = _first(request, "pages", "full")
    if arrays is None:
        return None
    panels = [rank_panels(arrays, int(request.options.get("steps", 64)))[0]]
    panels += [_page_panel(arrays, name, share) for name, share in HEADS]
    text = (
        " Ranks: evenly spaced prompt tokens, in the head of median change. Pages: those of 16 tokens with most weight at the"
        " first decode step, by position; heads by the share of a page's weight that its heaviest token has, mean over pages."
    )
    return plots.draw(panels, request.path, request.caption() + text, size=(4.0, 4.0))


def _page_panel(arrays: Arrays, name: str, share: float) -> Panel:
    """One head's pages."""
    weights, pages = arrays["page_weights"], arrays["pages"]  # (layers, heads, pages, 16), (layers, heads, pages)
    held = pages >= 0
    top = (weights.amax(-1) / weights.sum(-1).clamp_min(1e-30)).masked_fill(~held, 0)
    concentration = (top.sum(-1) / held.sum(-1).clamp_min(1)).flatten()
    layer, head = divmod(int((concentration - concentration.quantile(share)).abs().argmin()), pages.shape[1])
    shown = held[layer, head]
    cells = weights[layer, head][shown]
    relative = (cells / cells.max().clamp_min(1e-30)).clamp_min(FAINTEST)
    values = plots.wide(relative, down=[str(page) for page in pages[layer, head][shown].tolist()])
    title, label = f"layer {layer}, head {head} ({name})", "attention weight, relative to the heaviest"
    return Panel(title, values, "token of the page", "page", "map", "c", colour=label, scale=(FAINTEST, 1.0))


# -- attention scores --------------------------------------------------------------------------------------------------


def _heads(request: FigureRequest, x: torch.Tensor | None) -> list[tuple[int, int]]:
    """The requested (layer, head) pairs, each once, of x (layers, heads, ...)."""
    if x is None:
        return []
    wanted = request.options.get("heads") or [[0, 0]]
    return list(dict.fromkeys((int(layer) % len(x), int(head) % len(x[0])) for layer, head in wanted))


def _score_curves(request: FigureRequest) -> Path | None:
    """The scores of some positions in descending order."""
    arrays = _first(request, "scores") or {}
    panels = []
    for layer, head in _heads(request, arrays.get("scores")):
        lines = []
        for position, weights in zip(arrays["score_positions"].tolist(), arrays["scores"][layer, head], strict=True):
            seen = weights[: position + 1].sort(descending=True).values.tolist()
            lines.append(plots.series(f"position {position}", range(1, len(seen) + 1), seen, only="line"))
        labels = f"layer {layer}, head {head}", "tokens, the highest score first", "attention score"
        panels.append(Panel(labels[0], plots.joined(lines), *labels[1:], log="xy", limits=(1e-7, 1.5)))
    return plots.draw(panels, request.path, request.caption(), size=(3.3, 2.9))


def _score_map(request: FigureRequest) -> Path | None:
    """The largest score of each part of the prompt's queries for each part of its tokens."""
    arrays = _first(request, "score_map") or {}
    panels = []
    for layer, head in _heads(request, arrays.get("score_map")):
        shown = arrays["score_map"][layer, head].clamp_min(1e-5)
        starts = [arrays["scores"].shape[-1] / len(shown) * i for i in range(len(shown))]
        title, label = f"layer {layer}, head {head}", "attention score (largest of each part)"
        axes: dict[str, Any] = {"kind": "map", "log": "c", "colour": label, "scale": (1e-5, 1.0)}
        panels.append(Panel(title, plots.wide(shown, starts, starts), "token", "query", **axes))
    return plots.draw(panels, request.path, request.caption(), size=(4.4, 3.8))


# -- one prompt --------------------------------------------------------------------------------------------------------


def _prompt_kv(request: FigureRequest) -> Path | None:
    maps = _first(request, "keys", suffix=PROMPT_SUFFIX)
    if maps is None:
        return None
    panels = []
    for name in ("keys", "values"):
        sizes = maps[name].float()
        small = shrunk(sizes)
        tokens, channels = (
            [i * whole / part for i in range(part)] for whole, part in zip(sizes.shape, small.shape, strict=True)
        )
        scale = 0.0, float(small.flatten().quantile(BRIGHTEST))
        values = plots.wide(small, tokens, channels)
        panels.append(Panel(name, values, "channel (all KV heads)", "token", "map", colour=f"|{name[0]}|", scale=scale))
    layer = f" Layer {int(maps['layer'])}, colours end at the {100 * BRIGHTEST:g} % quantile."
    return plots.draw(panels, request.path, request.caption() + layer, size=(5.2, 4.0))


def _prompt_saliency(request: FigureRequest) -> Path | None:
    """How often each token is among the `share` most salient, by both metrics."""
    maps = _first(request, "normalised", suffix=PROMPT_SUFFIX)
    if maps is None:
        return None
    share = float(request.options.get("share", 0.4))
    lines = []
    for name in ("accumulated", "normalised"):
        often = salient_share(maps[name], share).tolist()
        lines.append(plots.series(f"{name} attention scores", range(len(often)), often, only="line", dash=0))
    layers, heads, _ = maps["accumulated"].shape
    text = f" The {100 * share:g} % most salient tokens of each of {layers} x {heads} layers and KV heads."
    panel = Panel("", plots.joined(lines), "token index", "probability of being salient", limits=(0, 1.02))
    return plots.draw([panel], request.path, request.caption() + text, size=(8.0, 3.4))


def salient_share(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Of layers and heads, the share in which each token is salient: scores (layers, heads, s) -> (s,)."""
    import torch

    s = scores.shape[2]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : s - floor_share(s, 1 - share)]
    return torch.zeros_like(scores).scatter_(-1, best, 1.0).mean((0, 1))


def shrunk(x: torch.Tensor) -> torch.Tensor:
    """x (tokens, channels) with at most PIXELS of each: the largest of neighbours, so that no outlier vanishes."""
    import torch.nn.functional as F

    pool = [-(-size // PIXELS) for size in x.shape]
    return F.max_pool2d(x[None, None], pool, ceil_mode=True)[0, 0]


KINDS: dict[str, Any] = {
    "ranks": _ranks,
    "ranks_and_pages": _ranks_and_pages,
    "score_curves": _score_curves,
    "score_map": _score_map,
    "prompt_kv": _prompt_kv,
    "prompt_saliency": _prompt_saliency,
}
