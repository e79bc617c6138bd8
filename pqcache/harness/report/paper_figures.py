"""Figures of experiments: `draw` draws the kind that the experiment's `report.figure` names.

    figure: {kind: lines, x: budget, y: score, log: true}         a line per method (or cell, or `by:`); Full is dotted
    figure: {kind: lines, x: method.r, y: score}                  x: any key of the configuration
    figure: {kind: bars, y: score}                                a group of bars per data set
    figure: {kind: differences, y: score}                         the same, each as its difference to Full
    figure: {kind: scatter, x: time, y: score, size: ratio}       a point per line; columns of `report.columns`
    figure: {kind: heat_maps}                                     needle: a map per method, side by side
    figure: {kind: curves, x: tokens, y: perplexity}              pg19: perplexity over the length
    figure: {kind: ranks}                                         diagnostics: ranks of tokens over decode steps
    figure: {kind: throughput, full_batch: 4}                     latency: tokens per second over the batch, within a memory
    figure: {kind: memory}                                        latency: bytes of K and V by model over the length
    figure: {kind: score_curves, heads: [[3, 25]]}                diagnostics=scores: sorted scores, a panel per layer and head
    figure: {kind: score_map, heads: [[11, 15]]}                  diagnostics=scores: queries over tokens, darker is higher
    figure: {kind: prompt_kv}                                     diagnostics=prompt: sizes of keys and values
    figure: {kind: prompt_saliency, share: 0.4}                   diagnostics=prompt: how often each token is salient
    figure: {kind: ranks_and_pages}, {kind: line_panels}          see clusterkv_figures.py
    figure: {kind: panels, panels: [...]}                         panels of named bars, see panel_figures.py
    figure: {kind: gain, x: method.rep_ratio, by: method.base}    lines of the gain over x = 0

`by:` names the key whose values are the lines. There is a panel per model; lines have one per model and data set. Axes of
scores and shares begin at 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.report import axes as drawing
from pqcache.harness.report import latency_figures
from pqcache.harness.report.bar_figure import draw_bars
from pqcache.harness.report.clusterkv_figures import draw_line_panels, draw_ranks_and_pages
from pqcache.harness.report.diagnostic_figures import draw_ranks
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.figure_request import FigureRequest, cell_title
from pqcache.harness.report.heat_maps import heat_maps
from pqcache.harness.report.line_figure import draw_lines
from pqcache.harness.report.memory_figure import draw_memory
from pqcache.harness.report.panel_figures import draw_gain, draw_panels
from pqcache.harness.report.prompt_figures import draw_keys_and_values, draw_saliency
from pqcache.harness.report.rows import Row
from pqcache.harness.report.score_figures import draw_score_curves, draw_score_map
from pqcache.harness.report.throughput_figure import draw_throughput


def draw(plan: RunPlan, entries: Sequence[Entry], rows: Mapping[str, Row], path: Path) -> Path | None:
    """The experiment's figure with what is measured so far; None for a table, or with nothing measured.

    Raises ValueError for an unknown kind.
    """
    options = dict(plan.report.get("figure") or {})
    kind = options.pop("kind", None)
    if not rows:
        return None
    if kind is None:
        return _latency(plan, rows, path)
    if kind not in KINDS:
        raise ValueError(f"report.figure.kind={kind}: known: {', '.join(KINDS)}")
    return KINDS[kind](FigureRequest(plan, entries, rows, path, kind, options))


def _latency(plan: RunPlan, rows: Mapping[str, Row], path: Path) -> Path | None:
    """The efficiency figures, which are drawn by the experiment's name; None for other experiments."""
    named = [
        (latency_figures.label_of(cell.names, rows[cell.name]), rows[cell.name])
        for cell in plan.cells
        if cell.name in rows
    ]
    return latency_figures.draw(plan.experiment or "", named, path)


def _scatter(request: FigureRequest) -> Path:
    """A point per line, named in the legend; its area grows with the column `size`."""
    x_name, y_name, size_name = (str(request.options.get(k, "")) for k in ("x", "y", "size"))
    points: dict[str, dict[str, float | None]] = {}
    for e in request.entries:
        points.setdefault(request.point_title(e), {})[e.metric] = e.measured
    looks = drawing.looks(list(points))
    figure, (axis,) = drawing.panels(1, 5.6, 3.8)
    for line, values in points.items():
        x, y, size = values.get(x_name), values.get(y_name), values.get(size_name) or 1.0
        if x is None or y is None:
            continue
        style: dict[str, Any] = {
            "color": looks[line].color,
            "marker": looks[line].marker,
            "alpha": 0.75,
            "edgecolor": "white",
        }
        axis.scatter([x], [y], s=40 * size, clip_on=False, **style)
        axis.scatter([], [], s=40, label=line, **style)
    labels = request.options.get("labels") or {}
    axis.margins(0.18)
    drawing.style(axis, "", str(labels.get(x_name, x_name)), str(labels.get(y_name, y_name)))
    axis.set_ylim(*request.limits(y_name, (values.get(y_name) for values in points.values())))
    drawing.legend(figure, [axis])
    area = f" Area: {labels.get(size_name, size_name)}." if size_name else ""
    return drawing.save(figure, request.path, request.caption() + area)


def _heat_maps(request: FigureRequest) -> Path | None:
    """heatmap.json of every cell, as task=needle writes it."""
    panels: dict[str, Any] = {}
    for cell in request.plan.cells:
        file = cell.folder / "heatmap.json"
        if cell.name in request.rows and file.exists():
            budget = "" if cell.ignores_budget else f" {cell.identity['budget']:g}"
            panels[f"{cell_title(cell)}{budget}"] = json.loads(file.read_text())["samples"]
    folders = dict.fromkeys(row["task_options"].get("haystack") for row in request.rows.values())
    text = ", ".join("constructed prose" if folder is None else str(folder) for folder in folders)
    return heat_maps(panels, request.path, f"{request.caption()} Haystack: {text}.")


def _curves(request: FigureRequest) -> Path | None:
    """perplexity.json of every cell, as task=pg19 writes it."""
    files = {cell_title(c): c.folder / "perplexity.json" for c in request.plan.cells if c.name in request.rows}
    curves = {title: json.loads(file.read_text()) for title, file in files.items() if file.exists()}
    if not curves:
        return None
    figure, (axis,) = drawing.panels(1, 6.0, 3.6)
    looks = drawing.looks([title for title in curves if title != "full"])
    for title, curve in curves.items():
        color, line = (drawing.BLACK, ":") if title == "full" else (looks[title].color, "-")
        marker = "o" if len(curve["lengths"]) < 12 else None
        points = curve["lengths"], curve["perplexity"]
        axis.plot(*points, line, label=title, color=color, linewidth=1.3, marker=marker, markersize=3)
    drawing.style(axis, "", str(request.options.get("x", "tokens")), str(request.options.get("y", "perplexity")))
    drawing.legend(figure, [axis])
    return drawing.save(figure, request.path, request.caption())


def _ranks(request: FigureRequest) -> Path | None:
    """Ranks of tokens over decode steps, of the first sample of Full's cell that has some."""
    for cell in request.plan.cells:
        if cell.name in request.rows and cell.identity["method"]["name"] == "full":
            for file in sorted((cell.folder / "diagnostics").glob("*.npz")):
                drawn = draw_ranks(file, request.path.parent, request.caption().rstrip("."))
                if drawn is not None:
                    drawn.with_suffix(".pdf").replace(request.path.with_suffix(".pdf"))
                    return drawn.replace(request.path)
    return None


KINDS = {
    "lines": draw_lines,
    "bars": draw_bars,
    "differences": draw_bars,
    "scatter": _scatter,
    "heat_maps": _heat_maps,
    "curves": _curves,
    "ranks": _ranks,
    "memory": draw_memory,
    "throughput": draw_throughput,
    "score_curves": draw_score_curves,
    "score_map": draw_score_map,
    "prompt_kv": draw_keys_and_values,
    "prompt_saliency": draw_saliency,
    "ranks_and_pages": draw_ranks_and_pages,
    "line_panels": draw_line_panels,
    "panels": draw_panels,
    "gain": draw_gain,
}
