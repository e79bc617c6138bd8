"""Figures of a recall_sweep.json (run/recall_sweep.py): recall over budgets, and over ClusterKV's settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import axes as drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "recall_budget": "recall of the top-B prompt tokens (ClusterKV)",
    "hit_top10": "10 heaviest past tokens: share attended (Quest)",
    "mass": "attention mass",
}
DISTANCES = ("cosine", "l2", "ip")
TOKENS_PER_CLUSTER = 80  # ClusterKV's default
TOP = 1.02
Point = dict[str, Any]  # one entry of "points"


def draw_sweep(sweep: dict[str, Any], out: Path) -> list[Path]:
    """recall_budgets.png and, where ClusterKV's settings were swept, recall_clusters.png."""
    header = sweep["header"]
    caption = (
        f"{header['model']}, {header['prompt']}: {header['prompt_tokens']} prompt tokens, {header['steps']} decode steps of"
        " one run under full attention; every index is built on its keys and asked with its queries."
        " Means over layers, query heads and steps."
    )
    paths = [_draw_budgets(sweep["points"], out / "recall_budgets.png", caption)]
    clusterkv = [p for p in sweep["points"] if p["method"] == "clusterkv"]
    budgets = sorted({p["budget"] for p in clusterkv if p["hyper"]})
    if budgets:
        figure = drawing.new_figure(10, 4.2)
        left, right = figure.subplots(1, 2)
        _draw_clusters(left, clusterkv, budgets, header["prompt_tokens"])
        _draw_distances(right, clusterkv, budgets)
        paths.append(drawing.save(figure, out / "recall_clusters.png", caption))
    return paths


def _draw_budgets(points: Sequence[Point], path: Path, caption: str) -> Path:
    """A panel per measure, a line per method."""
    plain = [p for p in points if not p["hyper"]]
    looks = drawing.looks(sorted({p["method"] for p in plain}))
    figure = drawing.new_figure(12, 4.2)
    axes = figure.subplots(1, len(PANELS))
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        for name, look in looks.items():
            line = sorted((p["budget"], p[key]) for p in plain if p["method"] == name)
            axis.plot(*zip(*line, strict=True), label=name, markersize=4.5, linewidth=1.5, **look._asdict())
        drawing.style(axis, title, "budget B (tokens)", "", top=TOP)
        axis.set_xticks(sorted({p["budget"] for p in plain})[1::2])
    axes[0].legend(fontsize=8.5, frameon=False)
    text = (
        " Recall: |S & T| / |T|, S the attended prompt tokens (sinks and window included), T the |S| heaviest."
        " The oracle shares one choice per KV head, so it is no upper bound of a recall per query head."
    )
    return drawing.save(figure, path, caption + text)


def _draw_clusters(axis: Axes, points: Sequence[Point], budgets: Sequence[int], prompt_tokens: int) -> None:
    """Recall over the number of clusters."""

    def clusters(point: Point) -> int:
        return prompt_tokens // point["hyper"].get("tokens_per_cluster", TOKENS_PER_CLUSTER)

    for i, budget in enumerate(budgets):
        line = sorted(
            (clusters(p), p["recall_budget"]) for p in points if p["budget"] == budget and "distance" not in p["hyper"]
        )
        axis.plot(*zip(*line, strict=True), label=f"B = {budget}", color=drawing.colour(i), marker="o", markersize=4.5)
    axis.axvline(prompt_tokens // TOKENS_PER_CLUSTER, color="#999999", linewidth=0.9, linestyle=":")
    axis.set_xscale("log", base=2)
    ticks = sorted({clusters(p) for p in points})
    axis.set_xticks(ticks, [str(c) for c in ticks])
    axis.minorticks_off()
    title = "ClusterKV: recall over the number of clusters"
    drawing.style(axis, title, f"clusters C0 (dotted: L / {TOKENS_PER_CLUSTER})", "recall", top=TOP)
    axis.legend(fontsize=8.5, frameon=False)


def _draw_distances(axis: Axes, points: Sequence[Point], budgets: Sequence[int]) -> None:
    """Recall by clustering distance, as bars: the values are so close that lines would cover each other."""
    for i, distance in enumerate(DISTANCES):
        line = sorted(
            (p["budget"], p["recall_budget"])
            for p in points
            if p["hyper"].get("distance", DISTANCES[0]) == distance
            and p["budget"] in budgets
            and "tokens_per_cluster" not in p["hyper"]
        )
        x = [budgets.index(budget) + (i - 1) * 0.27 for budget, _ in line]
        bars = axis.bar(x, [value for _, value in line], 0.25, label=distance, color=drawing.colour(i))
        axis.bar_label(bars, fmt="%.3f", fontsize=7)
    title = f"ClusterKV: recall by clustering distance (C0 = L / {TOKENS_PER_CLUSTER})"
    drawing.style(axis, title, "budget B (tokens)", "recall", top=TOP)
    axis.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
    axis.legend(fontsize=8.5, frameon=False)
