"""Figures of experiments that no line of `report.figure` can declare.

From the files that diagnostics leave beside the rows: attention scores, ranks of tokens, one prompt's K and V.

    figure: {kind: ranks_and_pages, steps: 64}                 ranks of tokens over decode steps, and the weights within pages
                                                               of 16 tokens (ClusterKV, figure 3)
    figure: {kind: score_curves, heads: [[3, 25], [11, 15]]}   diagnostics=scores: sorted scores, a panel per [layer, head]
    figure: {kind: score_map, heads: [[11, 15]]}               diagnostics=scores: queries over tokens
    figure: {kind: prompt_kv}                                  diagnostics=prompt: |k| and |v| by token and channel
    figure: {kind: prompt_saliency, share: 0.4}                diagnostics=prompt: how often each token is salient

Each is of the first sample that has the file. A model with fewer layers or heads shows the one that a number leaves over: layer
3 of 3 is layer 0. Others are computed from several rows:

    figure: {kind: throughput, full_batch: 4}    tokens per second over the batch, and the most that fits a memory
    figure: {kind: memory, to: 131072}           K and V by the models' sizes over the length, beside what runs held
    figure: {kind: phases}                       a whole answer's prefill, index and decode, stacked
    figure: {kind: rounds}                       one layer's prefill beside the clustering of its keys by rounds
"""

from math import inf
from pathlib import Path
from statistics import median_high
from typing import Any

import pandas as pd
import torch

from pqcache.diagnostics.summary import PROMPT_SUFFIX, arrays_of
from pqcache.harness.report import plots
from pqcache.harness.report.entries import seconds
from pqcache.harness.report.figure_request import FigureRequest
from pqcache.harness.report.plots import Panel
from pqcache.harness.report.rows import Row
from pqcache.measure.geometries import geometry
from pqcache.selective.budget import floor_share
from pqcache.selective.shape import ModelShape

Arrays = dict[str, "torch.Tensor"]
FAINTEST = 1e-3  # attention weight, relative to the heaviest of a head, that still has a colour of its own
HEADS = (("25th percentile", 0.25), ("median", 0.5), ("75th percentile", 0.75))
PIXELS = 1024  # a map with more tokens or channels shows the largest number of each few
BRIGHTEST = 0.999  # the quantile that is drawn as the brightest colour
GIB = 2**30
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # of a number
SHORTEST = 512  # tokens, the first point of the lines of `memory`
PROMPT = "prompt length (tokens)"


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
    share = pd.DataFrame(torch.nanmean(stay, 1).numpy())
    text = "the first step's 64 heaviest prompt tokens"
    return [left, Panel(text, share, "decode step", "layer", kind="map", colour="share that still are")]


def _ranks_and_pages(request: FigureRequest) -> Path | None:
    arrays = _first(request, "pages", "full")
    if arrays is None:
        return None
    panels = [rank_panels(arrays, int(request.options.get("steps", 64)))[0]]
    weights, pages = arrays["page_weights"], arrays["pages"]  # (layers, heads, pages, 16), (layers, heads, pages)
    held = pages >= 0
    top = (weights.amax(-1) / weights.sum(-1).clamp_min(1e-30)).masked_fill(~held, 0)
    concentration = (top.sum(-1) / held.sum(-1).clamp_min(1)).flatten()
    label = "attention weight, relative to the heaviest"
    for name, share in HEADS:
        layer, head = divmod(int((concentration - concentration.quantile(share)).abs().argmin()), pages.shape[1])
        shown = held[layer, head]
        cells = weights[layer, head][shown]
        relative = (cells / cells.max().clamp_min(1e-30)).clamp_min(FAINTEST)
        values = pd.DataFrame(relative.numpy(), [str(page) for page in pages[layer, head][shown].tolist()])
        axes: dict[str, Any] = {"kind": "map", "log": "c", "scale": (FAINTEST, 1.0), "colour": label}
        panels.append(Panel(f"layer {layer}, head {head} ({name})", values, "token of the page", "page", **axes))
    text = (
        " Ranks: evenly spaced prompt tokens, in the head of median change. Pages: those of 16 tokens with most weight at the"
        " first decode step, by position; heads by the share of a page's weight that its heaviest token has, mean over pages."
    )
    return plots.draw(panels, request.path, request.caption() + text, size=(4.0, 4.0))


# -- attention scores --------------------------------------------------------------------------------------------------


def _heads(request: FigureRequest, x: torch.Tensor | None) -> list[tuple[int, int]]:
    """The requested (layer, head) pairs, each once, of x (layers, heads, ...)."""
    if x is None:
        return []
    wanted = request.options.get("heads") or [[0, 0]]
    return list(dict.fromkeys((int(layer) % len(x), int(head) % len(x[0])) for layer, head in wanted))


def _score_curves(request: FigureRequest) -> Path | None:
    """The scores of some positions in descending order."""
    arrays, panels = _first(request, "scores") or {}, []
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
    arrays, panels = _first(request, "score_map") or {}, []
    for layer, head in _heads(request, arrays.get("score_map")):
        shown = arrays["score_map"][layer, head].clamp_min(1e-5)
        starts = [arrays["scores"].shape[-1] / len(shown) * i for i in range(len(shown))]
        title, label = f"layer {layer}, head {head}", "attention score (largest of each part)"
        axes: dict[str, Any] = {"kind": "map", "log": "c", "colour": label, "scale": (1e-5, 1.0)}
        panels.append(Panel(title, pd.DataFrame(shown.numpy(), starts, starts), "token", "query", **axes))
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
        pairs = zip(sizes.shape, small.shape, strict=True)
        tokens, channels = ([i * whole / part for i in range(part)] for whole, part in pairs)
        scale = 0.0, float(small.flatten().quantile(BRIGHTEST))
        values = pd.DataFrame(small.numpy(), tokens, channels)
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
    s = scores.shape[2]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : s - floor_share(s, 1 - share)]
    return torch.zeros_like(scores).scatter_(-1, best, 1.0).mean((0, 1))


def shrunk(x: torch.Tensor) -> torch.Tensor:
    """x (tokens, channels) with at most PIXELS of each: the largest of neighbours, so that no outlier vanishes."""
    pool = [-(-size // PIXELS) for size in x.shape]
    return torch.nn.functional.max_pool2d(x[None, None], pool, ceil_mode=True)[0, 0]


# -- throughput within a memory ---------------------------------------------------------------------------------------


def _throughput(request: FigureRequest) -> Path | None:
    """At the left a line per method (or cell); filled points fit the memory. At the right the most that fits, with its batch.

    The memory is what the cache of Full holds at most at batch `full_batch`, or `gib` GiB; without either every point fits. A
    cache's peak on the device counts, of the layers that were run. Every prompt length has a pair of panels.
    """
    table = plots.frame(
        [
            {
                "line": cell.line, "method": row["method"], "length": row["prompt_tokens"], "x": row["extra"]["batch"],
                "y": row["extra"]["tokens_per_s"], "peak": row["peak_bytes"].get("device", 0.0),
            }
            for cell, row in request.measured
            if row["extra"].get("tokens_per_s") is not None
        ]
    )  # fmt: skip
    panels, texts, gib = [], [], request.options.get("gib")
    for length, block in table.groupby("length") if len(table) else ():
        full = block[(block.method == "full") & (block.x == request.options.get("full_batch"))].peak
        limit = float(gib) * GIB if gib else float(full.iloc[0]) if len(full) else inf
        within = "any memory" if limit == inf else f"{limit / GIB:.3g} GiB of cache"
        fits = block[block.peak <= limit]
        best = fits.loc[fits.groupby("line", sort=False).y.idxmax()]
        best = best.assign(text=[f"batch {batch:g}" for batch in best.x], x=best.line)
        label = "tokens per second, all prompts"
        lines = block.assign(hollow=block.peak > limit)
        axes: dict[str, Any] = {"y": label, "limits": (0, None)}
        panels += [
            Panel(f"prompts of {length:.0f} tokens", lines, "batch", log="x", ticks=sorted(set(block.x)), **axes),
            Panel(f"the most within {within}", best, kind="bars", **axes),
        ]
        texts.append(within)
    memory = " / ".join(dict.fromkeys(texts))
    why = "" if gib else f", what Full's holds at batch {request.options.get('full_batch')}"
    text = f" Hollow points need more than {memory}{why}; weights and temporaries do not count."
    text = " No memory is fixed." if memory == "any memory" else text
    return plots.draw(panels, request.path, request.caption() + text, size=(4.6, 3.4))


# -- memory over the length (PQCache, figure 1a) -----------------------------------------------------------------------


def token_bytes(shape: ModelShape) -> int:
    """Bytes of one token's K and V in all layers, 16 bits a number."""
    return 2 * shape.n_layers * shape.token


def measured_gib(row: Row, shape: ModelShape) -> float:
    """GiB that all layers would hold for one prompt at 16 bits, from what the row's layers held."""
    layers = row["extra"]["layers"] * row["extra"].get("batch", 1)
    return sum(row["resident_bytes"].values()) / BYTES[row["kv_dtype"]] * 2 * shape.n_layers / layers / GIB


def _memory(request: FigureRequest) -> Path | None:
    """Lines by the models' sizes, marks from runs of model=random. device_gib: memory of one GPU."""
    longest = int(request.options.get("to", 131072))
    lengths = [SHORTEST * 2**i for i in range((longest // SHORTEST).bit_length())]
    points: list[dict[str, Any]] = []
    rows = [row for _, row in request.measured if row["model_options"].get("geometry")]
    for row in rows:
        name = str(row["model_options"]["geometry"])
        shape = ModelShape.of(geometry(name).get_text_config(decoder=True))
        kind = "MHA" if shape.h == shape.h_kv else f"GQA, {shape.h_kv} KV heads"
        line = {"line": name, "label": f"{name} ({kind})"}
        if not any(point["line"] == name for point in points):
            sizes = [(s, token_bytes(shape) * s / GIB) for s in lengths]
            points += [{**line, "x": x, "y": y, "dash": 0, "only": "line"} for x, y in sizes]
        held = row["prompt_tokens"] + row["generated_tokens"] - 1
        points.append({**line, "x": held, "y": measured_gib(row, shape), "dash": 1, "only": "marker"})
    if memory := request.options.get("device_gib"):
        points.append({"line": f"memory of one GPU, {float(memory):.0f} GiB", "y": float(memory), "dash": 0})
    runs = ", ".join(dict.fromkeys(f"{row['extra']['layers']:g} layer(s) in {row['kv_dtype']}" for row in rows))
    text = " Lines: by the models' sizes, batch 1, 16 bits."
    text += f" Marks: measured on {runs}, scaled to all layers and 16 bits."
    ticks = [s for s in lengths if s >= 1024]
    panel = Panel("", plots.frame(points), "sequence length (tokens)", "K and V (GiB)", log="xy", ticks=ticks)
    return plots.draw([panel] if rows else [], request.path, request.caption() + text, size=(5.6, 3.8))


# -- times of a prompt and of an answer --------------------------------------------------------------------------------


def _rounds(request: FigureRequest) -> Path | None:
    """PQCache, figure 7: one layer's prefill, its offloading, the clustering of its keys (by rounds), over the prompt's length.

    The last layer computes little but keys and values (see selective/attach.py), so it is not counted if there are others.
    """
    points: list[dict[str, Any]] = []
    once: dict[tuple[str, float], list[float]] = {}  # what does not depend on the rounds: median over the lines
    for cell, row in request.measured:
        layers, x = max(1.0, row["extra"].get("layers") or 1.0), row["prompt_tokens"]
        whole, index, offload = row["prefill_s"], row["index_build_s"], row["extra"].get("offload_s")
        if whole is not None and index is not None:
            one = 1e3 * (whole - index) / max(1.0, layers - 1)
            once.setdefault(("computation: one layer's prefill", x), []).append(one)
        if offload is not None:
            once.setdefault(("offloading: its K and V to the host", x), []).append(1e3 * offload)
        work = row["extra"].get("index_work_s")
        y = None if work is None else 1e3 * work / layers
        points.append({"line": f"clustering, {cell.line}", "x": x, "y": y})
    points += [{"line": line, "x": x, "y": median_high(values)} for (line, x), values in once.items()]
    title = "one layer's computation, offloading and clustering"
    panel = Panel(title, plots.frame(points), PROMPT, "ms per layer", limits=(0, None))
    return plots.draw([panel], request.path, request.caption(), size=(5.6, 3.8))


def _phases(request: FigureRequest) -> Path | None:
    """ClusterKV, figures 12 and 13: bars of a whole answer, prefill and index below the decode steps.

    A panel per answer length; where cells are named "a ..." or "b ...", one for each of these letters.
    """
    points: list[dict[str, Any]] = []
    for cell, row in request.measured:
        title = cell.line
        letter, _, rest = title.partition(" ")
        part, line = (f"({letter}) ", rest) if len(letter) == 1 and rest else ("", title)
        prefill, index, decode = (seconds(row, phase) for phase in ("prefill", "index", "decode"))
        if prefill is not None and index is not None and decode is not None:
            order = part, row["generated_tokens"], row["prompt_tokens"]
            place = {"panel": f"{part}{order[1]:.0f} new tokens", "line": line, "x": f"{order[2]:.0f}", "order": order}
            parts = (decode, prefill, ""), (prefill - index, 0.0, "pale"), (index, prefill - index, "red")
            points += [{**place, "y": y, "base": base, "fill": fill} for y, base, fill in parts]
    points.sort(key=lambda point: point["order"])
    panels = plots.panels_of(plots.frame(points), x=PROMPT, y="s", kind="bars")
    return plots.draw(panels, request.path, request.caption() + " Pale: prefill; red: index.", size=(5.2, 3.6))


_FROM_FILES = (_ranks_and_pages, _score_curves, _score_map, _prompt_kv, _prompt_saliency)
KINDS = {of.__name__[1:]: of for of in (*_FROM_FILES, _throughput, _memory, _rounds, _phases)}
