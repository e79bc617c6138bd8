"""Figures of what methods select. Drawn without a display: the files are the result.

python run.py experiment=diagnostics
python -m pqcache.harness.report.diagnostic_figures <out>      of all rows with diagnostics under <out>:
    by_layer.png     recall and attention mass by layer, methods side by side
    mass.png         mass with its 5th percentile, recall of the 10 heaviest tokens, output error and its bound
    ranks.png        ranks of tokens over decode steps (as ClusterKV's Figure 3a), how long heavy tokens stay heavy
python -m pqcache.harness.run.recall_sweep                  recall over budgets and over cluster counts
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.config.environment import keep_files_under
from pqcache.harness.config.options import RunOptions
from pqcache.harness.report.diagnostic_arrays import read_arrays
from pqcache.harness.report.rows import Row, read_row
from pqcache.harness.report.tables import budget_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#1b1b1b", "#d1495b", "#00798c", "#edae49", "#66a182", "#2e4057", "#8d96a3", "#b07aa1", "#9c755f", "#4e79a7")
MARKERS = "osD^vPX<>*"


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path, caption: str) -> Path:
    """The caption stands below, wrapped to the figure's width."""
    width = int(figure.get_figwidth() * 15.5)
    figure.supxlabel(textwrap.fill(caption, width), fontsize=8, color="#444444", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _axis(axis: Any, title: str, x: str, y: str, *, top: float | None = 1.02) -> None:
    axis.set_title(title, fontsize=9.5)
    axis.set_xlabel(x, fontsize=8.5)
    axis.set_ylabel(y, fontsize=8.5)
    if top is not None:
        axis.set_ylim(0, top)
    axis.grid(color="#e4e4e4", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _style(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each method: the same in every panel."""
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4.5,
            "linewidth": 1.5,
        }
        for i, name in enumerate(names)
    }


def _names(rows: Sequence[Row]) -> dict[str, str]:
    """folder -> what tells it apart from the other rows of its budget: the method, and options that differ."""
    names = {}
    for row in rows:
        same = [r for r in rows if r["method"] == row["method"] and budget_text(r) == budget_text(row)]
        differing = [
            f"{key}={value}"
            for key, value in row["hyper_parameters"].items()
            if any(r["hyper_parameters"].get(key) != value for r in same)
        ]
        if any(r["seed"] != row["seed"] for r in same):
            differing.append(f"seed={row['seed']}")
        names[row["folder"]] = " ".join([row["method"], *differing])
    return names


def _caption(rows: Sequence[Row]) -> str:
    some = rows[0]
    samples = sorted({(r["diagnostics"] or {}).get("samples", 0) for r in rows})
    count = str(samples[0]) if len(samples) == 1 else f"{samples[0]}-{samples[-1]}"
    models, tasks = (", ".join(dict.fromkeys(str(r[key]) for r in rows)) for key in ("model", "task"))
    return (
        f"{models}, {tasks}: {count} samples a method, {some['prompt_tokens']:.0f} prompt tokens on average;"
        " means over samples, decode steps and query heads, on each run's own queries."
    )


def draw_rows(rows: Sequence[Row], out: Path) -> list[Path]:
    """by_layer.png and mass.png."""
    rows = sorted(rows, key=lambda r: (-(r["budget_ratio"] or 0), -(r["budget_tokens"] or 0)))
    names = _names(rows)
    style = _style(sorted(set(names.values())))
    budgets = list(dict.fromkeys(budget_text(row) for row in rows))
    return [_by_layer(rows, names, style, budgets, out), _mass(rows, names, style, budgets, out)]


def _by_layer(rows: Sequence[Row], names: dict[str, str], style: dict[str, Any], budgets: list[str], out: Path) -> Path:
    panels = {
        "recall_kv": "recall of the oracle's choice",
        "recall_q": "recall of each query head's own top",
        "mass": "attention mass",
    }
    figure = _figure(12, 0.9 + 2.9 * len(budgets))
    axes = figure.subplots(len(budgets), len(panels), squeeze=False)
    for line, budget in zip(axes, budgets):
        for axis, (key, title) in zip(line, panels.items()):
            for row in rows:
                values = (row["diagnostics"] or {})["by_layer"][key]
                if budget_text(row) == budget and any(v is not None for v in values):
                    shown = [float("nan") if v is None else v for v in values]
                    axis.plot(range(len(shown)), shown, label=names[row["folder"]], **style[names[row["folder"]]])
            _axis(axis, f"{title}, budget {budget}", "layer", "")
            axis.xaxis.get_major_locator().set_params(integer=True)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(
        handles.values(), handles, loc="outside upper center", ncols=min(6, len(handles)), fontsize=8.5, frameon=False
    )
    text = "Recall: as many of the heaviest candidates as the method selected; 1 = a perfect index. Mass: softmax weight of all"
    text += " attended tokens under full attention."
    return _save(figure, out / "by_layer.png", f"{_caption(rows)} {text}")


def _mass(rows: Sequence[Row], names: dict[str, str], style: dict[str, Any], budgets: list[str], out: Path) -> Path:
    figure = _figure(12, 4.2)
    axes = figure.subplots(1, 3)
    labels = list(style)
    width = 0.8 / len(budgets)
    for row in rows:
        found = row["diagnostics"] or {}
        name, budget = names[row["folder"]], budget_text(row)
        x = labels.index(name) + (budgets.index(budget) - (len(budgets) - 1) / 2) * width
        bar: dict[str, Any] = {
            "width": width * 0.92,
            "color": style[name]["color"],
            "alpha": 1 - 0.45 * (budgets.index(budget) % 3),
        }
        axes[0].bar(x, found["mass"] or 0, **bar)
        if found["mass_p5"] is not None:
            axes[0].plot([x - width * 0.36, x + width * 0.36], [found["mass_p5"]] * 2, color="white", linewidth=3.2)
            axes[0].plot([x - width * 0.36, x + width * 0.36], [found["mass_p5"]] * 2, color="black", linewidth=1.6)
        axes[1].bar(x, found["hit_top10"] or 0, **bar)
        axes[2].bar(x, found["set_error"] or 0, **bar)
        if found["bound"]:
            axes[2].plot(x, found["bound"], marker="_", markersize=13, color="black", linestyle="")
    which = " | ".join(budgets)
    _axis(axes[0], "attention mass (bar) and its 5th percentile (line)", "", "")
    _axis(axes[1], "10 heaviest past tokens: share attended", "", "")
    _axis(axes[2], "output error |o - o_S| (bar) and its bound (dash)", "", "", top=None)
    axes[2].set_yscale("log")
    for axis in axes:
        axis.set_xticks(range(len(labels)), labels, rotation=25, ha="right", fontsize=8.5)
    text = f"Bars of a method from left to right, darker to lighter: budget {which}. The 5th percentile is over all samples,"
    text += " layers, heads and steps. Bound: 2 (1 - mass) max|v|."
    return _save(figure, out / "mass.png", f"{_caption(rows)} {text}")


def draw_ranks(path: Path, out: Path, title: str) -> Path | None:
    """ranks.png of one sample's npz; None if it has fewer than two decode steps."""
    import torch

    arrays = read_arrays(path)
    if not arrays or arrays["ranks"].shape[2] < 2:
        return None
    ranks, stay = arrays["ranks"], arrays["top_stay"]  # (layers, heads, steps, tracked), (layers, heads, steps)
    mean = stay[:, :, 1:].mean(-1)
    at = int(
        (mean.flatten() - mean.median()).abs().argmin()
    )  # the head whose heavy tokens stay as long as the median's
    layer, head = divmod(at, mean.shape[1])
    figure = _figure(11, 4.0)
    axes = figure.subplots(1, 2)
    steps = range(ranks.shape[2])
    for i, position in enumerate(arrays["positions"].tolist()):
        axes[0].plot(
            steps, ranks[layer, head, :, i] + 1, color=COLOURS[1 + i % 9], linewidth=1.4, marker="o", markersize=2.5,
            label=f"token {position}",
        )  # fmt: skip
    _axis(
        axes[0],
        f"rank of prompt tokens, layer {layer}, query head {head}",
        "decode step",
        "rank among the prompt (1 = heaviest)",
        top=None,
    )
    axes[0].set_yscale("log")
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=7.5, ncols=1, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for index, line in enumerate(torch.nanmean(stay, 1)):
        axes[1].plot(steps, line, label=f"layer {index}", linewidth=1.5, color=_shade(index, len(stay)))
    _axis(axes[1], "of the first step's 64 heaviest prompt tokens: share that still are", "decode step", "")
    if len(stay) <= 12:
        axes[1].legend(fontsize=7.5, frameon=False)
    text = f"{title}. Left: evenly spaced prompt tokens in the head of median change. Right: mean over query heads of each layer"
    text += " (light to dark: first to last)."
    return _save(figure, out / "ranks.png", text)


def _shade(index: int, count: int) -> tuple[float, float, float]:
    share = index / max(1, count - 1)
    return 0.75 - 0.75 * share, 0.85 - 0.6 * share, 0.9 - 0.45 * share


def draw_sweep(found: dict[str, Any], out: Path) -> list[Path]:
    """recall_budgets.png and recall_clusters.png of a recall_sweep.json."""
    header, points = found["header"], found["points"]
    told = f"{header['model']}, {header['prompt']}: {header['prompt_tokens']} prompt tokens, {header['steps']} decode steps of"
    told += " one run under full attention; every index is built and asked on its keys and queries."
    told += " Means over layers, query heads and steps."
    panels = {
        "recall_budget": "recall of the top-B prompt tokens (ClusterKV)",
        "hit_top10": "10 heaviest past tokens: share attended (Quest)",
        "mass": "attention mass",
    }
    plain = [p for p in points if not p["hyper"]]
    style = _style(sorted({p["method"] for p in plain}))
    figure = _figure(12, 4.2)
    axes = figure.subplots(1, len(panels))
    for axis, (key, title) in zip(axes, panels.items()):
        for name in style:
            line = sorted((p["budget"], p[key]) for p in plain if p["method"] == name)
            axis.plot(*zip(*line), label=name, **style[name])
        _axis(axis, title, "budget B (tokens)", "")
        axis.set_xticks(sorted({p["budget"] for p in plain})[1::2])
    axes[0].legend(fontsize=8.5, frameon=False)
    text = " Recall: |S & T| / |T|, S the attended prompt tokens (sinks and window included), T the |S| heaviest."
    text += " The oracle shares one choice per KV head, so it is no upper bound of a recall per query head."
    paths = [_save(figure, out / "recall_budgets.png", told + text)]

    clusterkv = [p for p in points if p["method"] == "clusterkv"]
    budgets = sorted({p["budget"] for p in clusterkv if p["hyper"]})
    if not budgets:
        return paths
    figure = _figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    tokens = header["prompt_tokens"]
    for i, budget in enumerate(budgets):
        mine = [p for p in clusterkv if p["budget"] == budget and "distance" not in p["hyper"]]
        line = sorted((tokens // p["hyper"].get("tokens_per_cluster", 80), p["recall_budget"]) for p in mine)
        left.plot(*zip(*line), label=f"B = {budget}", color=COLOURS[1 + i], marker="o", markersize=4.5)
    left.axvline(tokens // 80, color="#999999", linewidth=0.9, linestyle=":")
    left.set_xscale("log", base=2)
    clusters = sorted({tokens // p["hyper"].get("tokens_per_cluster", 80) for p in clusterkv})
    left.set_xticks(clusters, [str(c) for c in clusters])
    left.minorticks_off()
    _axis(left, "ClusterKV: recall over the number of clusters", "clusters C0 (dotted: L / 80)", "recall")
    left.legend(fontsize=8.5, frameon=False)
    for i, distance in enumerate(
        ("cosine", "l2", "ip")
    ):  # bars: the three lie so close that lines would hide each other
        mine = [p for p in clusterkv if p["hyper"].get("distance", "cosine") == distance and p["budget"] in budgets]
        line = sorted((p["budget"], p["recall_budget"]) for p in mine if "tokens_per_cluster" not in p["hyper"])
        x = [budgets.index(budget) + (i - 1) * 0.27 for budget, _ in line]
        bars = right.bar(x, [value for _, value in line], 0.25, label=distance, color=COLOURS[1 + i])
        right.bar_label(bars, fmt="%.3f", fontsize=7)
    _axis(right, "ClusterKV: recall by clustering distance (C0 = L / 80)", "budget B (tokens)", "recall")
    right.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
    right.legend(fontsize=8.5, frameon=False)
    return [*paths, _save(figure, out / "recall_clusters.png", told)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the diagnostics of all runs under a folder.")
    parser.add_argument("out", type=Path, help="the out= folder of runs with diagnostics=true")
    parser.add_argument("--ranks", help="method whose ranks are drawn (default: full, else oracle, else the first)")
    arguments = parser.parse_args()
    out = arguments.out
    read = [(path.parent, read_row(path)) for path in sorted(out.glob("*/row.json"))]
    rows = [row for _, row in read if row is not None and (row["diagnostics"] or {}).get("samples")]
    if not rows:
        parser.error(f"{out}: no row with diagnostics in any folder below; run with diagnostics=true out={out} first")
    keep_files_under(out, Path(RunOptions.cache_dir).expanduser())
    for path in draw_rows([row for row in rows if row["method"] != "full"] or rows, out):  # Full has mass 1 everywhere
        print(path)
    methods = {r["method"] for r in rows}
    wanted = arguments.ranks or next((name for name in ("full", "oracle") if name in methods), rows[0]["method"])
    row = next((r for r in rows if r["method"] == wanted), None)
    if row is None:
        parser.error(f"--ranks {wanted}: no row of that method; there are {', '.join(sorted(methods))}")
    npz = sorted((out / row["folder"] / (row["diagnostics"] or {})["folder"]).glob("*.npz"))[0]
    title = f"{row['model']}, {row['task']}, {row['prompt_tokens']:.0f} prompt tokens, sample {npz.stem}, under {row['method']}"
    drawn = draw_ranks(npz, out, f"{title}, budget {budget_text(row)}" if row["method"] != "full" else title)
    if drawn is not None:
        print(drawn)


if __name__ == "__main__":
    main()
