"""Figures of one prompt, from the files of diagnostics=prompt (pqcache/diagnostics/prompt_maps.py).

figure: {kind: prompt_kv}                      |k| and |v| by token and channel (ZipCache, Figure 2a)
figure: {kind: prompt_saliency, share: 0.4}    the share of layers and KV heads in which a token is salient (Figure 3c)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.diagnostic_arrays import PROMPT_SUFFIX
from pqcache.harness.report.figure_request import FigureRequest
from pqcache.selective.budget import floor_share

if TYPE_CHECKING:
    import torch

PIXELS = 1024  # a map with more tokens or channels shows the largest number of each few
BRIGHTEST = 0.999  # the quantile that is drawn as the brightest colour


def draw_keys_and_values(request: FigureRequest) -> Path | None:
    """Maps of the sizes of keys and values, side by side; None without a prompt's file."""
    maps = _first(request)
    if not maps:
        return None
    figure = drawing.new_figure(10.5, 4.4)
    for axis, name in zip(figure.subplots(1, 2), ("keys", "values"), strict=True):
        sizes = shrunk(maps[name].float())
        top = float(sizes.flatten().quantile(BRIGHTEST))
        tokens, channels = maps[name].shape
        image = axis.imshow(
            sizes, aspect="auto", origin="lower", cmap="viridis", vmin=0, vmax=top, extent=(0, channels, 0, tokens)
        )
        drawing.style(axis, name, "channel (all KV heads)", "token")
        axis.grid(False)
        figure.colorbar(image, ax=axis, label=f"|{name[0]}|")
    layer = f" Layer {int(maps['layer'])}, colours end at the {100 * BRIGHTEST:g} % quantile."
    return drawing.save(figure, request.path, request.caption() + layer)


def draw_saliency(request: FigureRequest) -> Path | None:
    """How often each token is among the `share` most salient, by both metrics; None without a prompt's file."""
    maps = _first(request)
    if not maps:
        return None
    share = float(request.options.get("share", 0.4))
    figure, (axis,) = drawing.panels(1, 8.0, 3.4)
    for i, name in enumerate(("accumulated", "normalised")):
        probability = salient_share(maps[name], share)
        axis.plot(probability, color=drawing.colour(i), linewidth=0.9, alpha=0.8, label=f"{name} attention scores")
    drawing.style(axis, "", "token index", "probability of being salient", top=1.02)
    drawing.legend(figure, [axis])
    layers, heads, _ = maps["accumulated"].shape
    text = f" The {100 * share:g} % most salient tokens of each of {layers} x {heads} layers and KV heads."
    return drawing.save(figure, request.path, request.caption() + text)


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


def _first(request: FigureRequest) -> dict[str, torch.Tensor]:
    """The tensors of the first sample that has some."""
    from safetensors.torch import load_file

    for cell in request.plan.cells:
        if cell.name in request.rows:
            for file in sorted((cell.folder / "diagnostics").glob(f"*{PROMPT_SUFFIX}")):
                if maps := load_file(file):
                    return maps
    return {}
