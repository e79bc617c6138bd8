"""Figures of what methods select.

python run.py experiment=diagnostics
python -m pqcache.harness.report.diagnostic_figures <out>      of all rows with diagnostics under <out>:
    by_layer.png     recall and attention mass by layer, methods side by side
    mass.png         mass with its 5th percentile, recall of the 10 heaviest tokens, output error and its bound
    ranks.png        ranks of tokens over decode steps (as ClusterKV's Figure 3a), how long heavy tokens stay heavy
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.diagnostic_arrays import read_arrays
from pqcache.harness.report.rows import Row, read_row
from pqcache.harness.report.tables import budget_text

Looks = dict[str, dict[str, Any]]  # a row's name -> matplotlib's arguments of its line
TOP = 1.02  # of an axis of shares


def _looks(names: Sequence[str]) -> Looks:
    lines = {"markersize": 4.5, "linewidth": 1.5}
    return {name: {**look._asdict(), **lines} for name, look in drawing.looks(names).items()}


def names_of(rows: Sequence[Row]) -> dict[str, str]:
    """Folder -> the method, with the options that differ among its rows at that budget."""
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
    first = rows[0]
    samples = sorted({(r["diagnostics"] or {}).get("samples", 0) for r in rows})
    count = str(samples[0]) if len(samples) == 1 else f"{samples[0]}-{samples[-1]}"
    models, tasks = (", ".join(dict.fromkeys(str(r[key]) for r in rows)) for key in ("model", "task"))
    return (
        f"{models}, {tasks}: {count} samples a method, {first['prompt_tokens']:.0f} prompt tokens on average;"
        " means over samples, decode steps and query heads, on each run's own queries."
    )


def draw_rows(rows: Sequence[Row], out: Path) -> list[Path]:
    """by_layer.png and mass.png."""
    rows = sorted(rows, key=lambda r: (-(r["budget_ratio"] or 0), -(r["budget_tokens"] or 0)))
    names = names_of(rows)
    looks = _looks(sorted(set(names.values())))
    budgets = list(dict.fromkeys(budget_text(row) for row in rows))
    return [_by_layer(rows, names, looks, budgets, out), _mass(rows, names, looks, budgets, out)]


def _by_layer(rows: Sequence[Row], names: dict[str, str], looks: Looks, budgets: list[str], out: Path) -> Path:
    panels = {
        "recall_kv": "recall of the oracle's choice",
        "recall_q": "recall of each query head's own top",
        "mass": "attention mass",
    }
    figure = drawing.new_figure(12, 0.9 + 2.9 * len(budgets))
    axes = figure.subplots(len(budgets), len(panels), squeeze=False)
    for line, budget in zip(axes, budgets):
        for axis, (key, title) in zip(line, panels.items()):
            for row in rows:
                values = (row["diagnostics"] or {})["by_layer"][key]
                if budget_text(row) == budget and any(v is not None for v in values):
                    shown = [float("nan") if v is None else v for v in values]
                    axis.plot(range(len(shown)), shown, label=names[row["folder"]], **looks[names[row["folder"]]])
            drawing.style(axis, f"{title}, budget {budget}", "layer", "", top=TOP)
            axis.xaxis.get_major_locator().set_params(integer=True)
    drawing.legend(figure, axes.flatten().tolist())
    text = "Recall: as many of the heaviest candidates as the method selected; 1 = a perfect index. Mass: softmax weight of all"
    text += " attended tokens under full attention."
    return drawing.save(figure, out / "by_layer.png", f"{_caption(rows)} {text}")


def _mass(rows: Sequence[Row], names: dict[str, str], looks: Looks, budgets: list[str], out: Path) -> Path:
    figure = drawing.new_figure(12, 4.2)
    axes = figure.subplots(1, 3)
    labels = list(looks)
    width = 0.8 / len(budgets)
    for row in rows:
        measured = row["diagnostics"] or {}
        name, budget = names[row["folder"]], budget_text(row)
        x = labels.index(name) + (budgets.index(budget) - (len(budgets) - 1) / 2) * width
        bar: dict[str, Any] = {
            "width": width * 0.92,
            "color": looks[name]["color"],
            "alpha": 1 - 0.45 * (budgets.index(budget) % 3),
        }
        axes[0].bar(x, measured["mass"] or 0, **bar)
        if measured["mass_p5"] is not None:
            axes[0].plot([x - width * 0.36, x + width * 0.36], [measured["mass_p5"]] * 2, color="white", linewidth=3.2)
            axes[0].plot([x - width * 0.36, x + width * 0.36], [measured["mass_p5"]] * 2, color="black", linewidth=1.6)
        axes[1].bar(x, measured["hit_top10"] or 0, **bar)
        axes[2].bar(x, measured["set_error"] or 0, **bar)
        if measured["bound"]:
            axes[2].plot(x, measured["bound"], marker="_", markersize=13, color="black", linestyle="")
    which = " | ".join(budgets)
    drawing.style(axes[0], "attention mass (bar) and its 5th percentile (line)", "", "", top=TOP)
    drawing.style(axes[1], "10 heaviest past tokens: share attended", "", "", top=TOP)
    drawing.style(axes[2], "output error |o - o_S| (bar) and its bound (dash)", "", "")
    axes[2].set_yscale("log")
    for axis in axes:
        axis.set_xticks(range(len(labels)), labels, rotation=25, ha="right", fontsize=8.5)
    text = f"Bars of a method from left to right, darker to lighter: budget {which}. The 5th percentile is over all samples,"
    text += " layers, heads and steps. Bound: 2 (1 - mass) max|v|."
    return drawing.save(figure, out / "mass.png", f"{_caption(rows)} {text}")


def draw_ranks(path: Path, out: Path, title: str) -> Path | None:
    """ranks.png of one sample's npz; None if it has fewer than two decode steps."""
    import torch

    arrays = read_arrays(path)
    if not arrays or arrays["ranks"].shape[2] < 2:
        return None
    ranks, stay = arrays["ranks"], arrays["top_stay"]  # (layers, heads, steps, tracked), (layers, heads, steps)
    mean = stay[:, :, 1:].mean(-1)
    # the head in which heavy tokens stay as long as in the median head
    at = int((mean.flatten() - mean.median()).abs().argmin())
    layer, head = divmod(at, mean.shape[1])
    figure = drawing.new_figure(11, 4.0)
    axes = figure.subplots(1, 2)
    steps = range(ranks.shape[2])
    for i, position in enumerate(arrays["positions"].tolist()):
        axes[0].plot(
            steps, ranks[layer, head, :, i] + 1, color=drawing.colour(i), linewidth=1.4, marker="o", markersize=2.5,
            label=f"token {position}",
        )  # fmt: skip
    title_left = f"rank of prompt tokens, layer {layer}, query head {head}"
    drawing.style(axes[0], title_left, "decode step", "rank among the prompt (1 = heaviest)")
    axes[0].set_yscale("log")
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=7.5, ncols=1, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for index, line in enumerate(torch.nanmean(stay, 1)):
        axes[1].plot(steps, line, label=f"layer {index}", linewidth=1.5, color=_shade(index, len(stay)))
    drawing.style(
        axes[1], "of the first step's 64 heaviest prompt tokens: share that still are", "decode step", "", top=TOP
    )
    if len(stay) <= 12:
        axes[1].legend(fontsize=7.5, frameon=False)
    text = f"{title}. Left: evenly spaced prompt tokens in the head of median change. Right: mean over query heads of each layer"
    text += " (light to dark: first to last)."
    return drawing.save(figure, out / "ranks.png", text)


def _shade(index: int, count: int) -> tuple[float, float, float]:
    share = index / max(1, count - 1)
    return 0.75 - 0.75 * share, 0.85 - 0.6 * share, 0.9 - 0.45 * share


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
    drawing.keep_files(out)
    for path in draw_rows([row for row in rows if row["method"] != "full"] or rows, out):  # Full has mass 1 everywhere
        print(path)
    methods = {r["method"] for r in rows}
    method = arguments.ranks or next((name for name in ("full", "oracle") if name in methods), rows[0]["method"])
    row = next((r for r in rows if r["method"] == method), None)
    if row is None:
        parser.error(f"--ranks {method}: no row of that method; there are {', '.join(sorted(methods))}")
    npz = sorted((out / row["folder"] / (row["diagnostics"] or {})["folder"]).glob("*.npz"))[0]
    title = f"{row['model']}, {row['task']}, {row['prompt_tokens']:.0f} prompt tokens, sample {npz.stem}, under {row['method']}"
    drawn = draw_ranks(npz, out, f"{title}, budget {budget_text(row)}" if row["method"] != "full" else title)
    if drawn is not None:
        print(drawn)


if __name__ == "__main__":
    main()
