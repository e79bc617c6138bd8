"""Figures of what methods select, of all rows with diagnostics under a folder.

python run.py experiment=diagnostics
python -m pqcache.harness.report.diagnostic_figures <out>      writes there
    by_layer.png     recall and attention mass by layer, methods side by side
    mass.png         mass with its 5th percentile, recall of the 10 heaviest tokens, output error and its bound
    ranks.png        ranks of tokens over decode steps (as ClusterKV's Figure 3a), how long heavy tokens stay heavy
    drift.png        recall and attention mass by decode step, smoothed by a centred moving average of `--window` steps

python -m pqcache.harness.report.diagnostic_figures <out> --only drift --layers 1 --window 25 --budget 512
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.harness.report import axes as drawing
from pqcache.harness.report import plots
from pqcache.harness.report.diagnostic_arrays import read_arrays
from pqcache.harness.report.frame import budget_text
from pqcache.harness.report.observed_figures import rank_panels
from pqcache.harness.report.plots import Panel
from pqcache.harness.report.rows import Row, rows_by_folder

if TYPE_CHECKING:
    import torch

TOP = 1.02  # of an axis of shares
WINDOW = 33  # steps of the moving average
BY_LAYER = {
    "recall_kv": "recall of the oracle's choice",
    "recall_q": "recall of each query head's own top",
    "mass": "attention mass",
}
BY_STEP = {
    "recall_kv": "recall of the oracle's choice",
    "hit_top10": "10 heaviest past tokens: share attended",
    "mass": "attention mass",
}
# a number of the row, what its bars are called, and the number that a mark shows
MEANS = (
    ("mass", "attention mass (bar) and its 5th percentile (mark)", "mass_p5"),
    ("hit_top10", "10 heaviest past tokens: share attended", None),
    ("set_error", "output error |o - o_S| (bar) and its bound (mark)", "bound"),
)
SWEPT = {
    "recall_budget": "recall of the top-B prompt tokens (ClusterKV)",
    "hit_top10": "10 heaviest past tokens: share attended (Quest)",
    "mass": "attention mass",
}
TOKENS_PER_CLUSTER = 80  # ClusterKV's default
Folders = dict[Path, Row]  # a cell's folder -> its row


def names_of(rows: Sequence[Row]) -> list[str]:
    """Each row's method, with the options that differ among the method's rows at that budget."""
    names = []
    for row in rows:
        same = [r for r in rows if r["method"] == row["method"] and budget_text(r) == budget_text(row)]
        options = [
            f"{key}={value}"
            for key, value in row["hyper_parameters"].items()
            if any(r["hyper_parameters"].get(key) != value for r in same)
        ]
        options += [f"seed={row['seed']}"] if any(r["seed"] != row["seed"] for r in same) else []
        names.append(" ".join([row["method"], *options]))
    return names


def _caption(rows: Sequence[Row], over: str) -> str:
    samples = sorted({(row["diagnostics"] or {}).get("samples", 0) for row in rows})
    count = "-".join(str(n) for n in dict.fromkeys([samples[0], samples[-1]]))
    models, tasks = (", ".join(dict.fromkeys(str(row[key]) for row in rows)) for key in ("model", "task"))
    return (
        f"{models}, {tasks}: {count} samples a method, {rows[0]['prompt_tokens']:.0f} prompt tokens on average; means over"
        f" samples, {over} and query heads, on each run's own queries."
    )


def _ordered(folders: Folders) -> list[tuple[Path, Row, str]]:
    """(folder, row, name), the largest budget first."""
    every = zip(folders, folders.values(), names_of(list(folders.values())), strict=True)
    return sorted(every, key=lambda one: (-(one[1]["budget_ratio"] or 0), -(one[1]["budget_tokens"] or 0)))


def _grid(lines: Sequence[tuple[str, str, str, Any, Sequence[float]]], x: str, out: Path, caption: str) -> Path | None:
    """Panels of shares: a line of panels per budget. lines: (budget, title, name, x, y)."""
    parts = [
        plots.series(name, xs, ys, panel=f"{title}, budget {of}")
        for budget in dict.fromkeys(line[0] for line in lines)
        for of, title, name, xs, ys in lines
        if of == budget
    ]
    panels = plots.panels_of(plots.joined(parts), x=x, limits=(0, TOP))
    return plots.draw(panels, out, caption, size=(4.0, 3.0), across=3)


def draw_by_layer(folders: Folders, out: Path) -> Path | None:
    lines = []
    for key, title in BY_LAYER.items():
        for _, row, name in _ordered(folders):
            values = [float("nan") if v is None else v for v in (row["diagnostics"] or {})["by_layer"][key]]
            lines.append((budget_text(row), title, name, range(len(values)), values))
    text = " Recall: as many of the heaviest candidates as the method selected; 1 = a perfect index. Mass: softmax weight of all"
    text += " attended tokens under full attention."
    return _grid(lines, "layer", out, _caption(list(folders.values()), "decode steps") + text)


def draw_mass(folders: Folders, out: Path) -> Path | None:
    panels = []
    for key, title, mark in MEANS:
        points = []
        for _, row, name in _ordered(folders):
            found = row["diagnostics"] or {}
            point = {"x": name, "line": f"budget {budget_text(row)}", "y": found[key]}
            points.append({**point, **({"printed": found[mark]} if mark else {})})
        panels.append(Panel(title, plots.frame(points), kind="bars", limits=(0, TOP)))
    panels[-1].log, panels[-1].limits = "y", (None, None)
    text = " The 5th percentile is over all samples, layers, heads and steps. Bound: 2 (1 - mass) max|v|."
    return plots.draw(panels, out, _caption(list(folders.values()), "decode steps") + text, size=(4.2, 3.6))


def draw_ranks(folders: Folders, out: Path, method: str | None) -> Path | None:
    """Of one sample of `method` (default: full, else oracle, else the first); None if it has fewer than two decode steps."""
    methods = {row["method"] for row in folders.values()}
    method = method or next(
        (name for name in ("full", "oracle") if name in methods), next(iter(folders.values()))["method"]
    )
    folder, row = next((folder, row) for folder, row in folders.items() if row["method"] == method)
    npz = next(iter(sorted((folder / (row["diagnostics"] or {})["folder"]).glob("*.npz"))), None)
    arrays = read_arrays(npz) if npz else {}
    if npz is None or not arrays or arrays["ranks"].shape[2] < 2:
        return None
    budget = f", budget {budget_text(row)}" if method != "full" else ""
    text = f"{row['model']}, {row['task']}, {row['prompt_tokens']:.0f} prompt tokens, sample {npz.stem}, under {method}{budget}."
    text += (
        " Left: evenly spaced prompt tokens in the head of median change. Right: mean over query heads of each layer."
    )
    return plots.draw(rank_panels(arrays), out, text, size=(5.5, 4.0))


# -- by decode step ----------------------------------------------------------------------------------------------------


def by_step(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Means of each decode step, (steps,), over samples (layers, heads, steps) that may end at different steps; NaN for none."""
    import torch

    steps = max(x.shape[-1] for x in samples)
    widened = [torch.nn.functional.pad(x.flatten(0, 1), (0, steps - x.shape[-1]), value=torch.nan) for x in samples]
    return torch.cat(widened).nanmean(0)


def smoothed(values: torch.Tensor, window: int) -> torch.Tensor:
    """Centred moving average, (steps,) -> (steps,): at each step the mean of the `window` steps around it that have a value.

    window: odd. At both ends the steps that exist are averaged. NaN where the step itself has no value.
    """
    import torch

    known = values.isfinite()
    kernel = torch.ones(1, 1, window, dtype=torch.float64)

    def sums(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x.double()[None, None], kernel, padding=window // 2)[0, 0]

    mean = sums(values.masked_fill(~known, 0)) / sums(known)
    return mean.masked_fill(~known, torch.nan).float()


def draw_drift(folders: Folders, out: Path, layers: Sequence[int] | None, window: int) -> Path | None:
    """layers: None for all that the method does not leave dense."""
    lines = []
    for folder, row, name in reversed(_ordered(folders)):
        files = sorted((folder / (row["diagnostics"] or {})["folder"]).glob("*.npz"))
        if not (samples := [arrays for arrays in map(read_arrays, files) if arrays]):
            continue
        chosen = (
            list(layers) if layers is not None else list(range(row["dense_layers"] or 0, samples[0]["mass"].shape[0]))
        )
        for key, title in BY_STEP.items():
            values = smoothed(by_step([arrays[key][chosen] for arrays in samples]), window).tolist()
            lines.append((budget_text(row), title, name, range(1, len(values) + 1), values))
    where = "all layers that are not dense" if layers is None else f"layers {', '.join(map(str, layers))}"
    text = (
        f" Smoothed by a centred moving average of {window} steps. Recall: as many of the heaviest candidates as the method"
        " selected; methods without a selection have none. Mass: softmax weight of all attended tokens under full attention."
    )
    return _grid(lines, "decode step", out, _caption(list(folders.values()), where) + text)


# -- a recall sweep ----------------------------------------------------------------------------------------------------


def draw_sweep(sweep: dict[str, Any], out: Path) -> list[Path]:
    """Of a recall_sweep.json (run/recall_sweep.py): recall_budgets.png, and recall_clusters.png of ClusterKV's settings."""
    header, points = sweep["header"], sweep["points"]
    tokens = header["prompt_tokens"]
    caption = (
        f"{header['model']}, {header['prompt']}: {tokens} prompt tokens, {header['steps']} decode steps of one run under full"
        " attention; every index is built on its keys and asked with its queries. Means over layers, query heads and steps."
    )
    plain = [
        {"panel": title, "line": point["method"], "x": point["budget"], "y": point[key]}
        for key, title in SWEPT.items()
        for point in points
        if not point["hyper"]
    ]
    text = (
        " Recall: |S & T| / |T|, S the attended prompt tokens (sinks and window included), T the |S| heaviest."
        " The oracle shares one choice per KV head, so it is no upper bound of a recall per query head."
    )
    panels = plots.panels_of(plots.frame(plain), x="budget B (tokens)", limits=(0, TOP))
    drawn = [plots.draw(panels, out / "recall_budgets.png", caption + text, size=(4.0, 3.6))]
    own = [point for point in points if point["method"] == "clusterkv"]
    budgets = {point["budget"] for point in own if point["hyper"]}
    clusters, distances = [], []
    for point in own:
        hyper, line, recall = point["hyper"], f"B = {point['budget']}", point["recall_budget"]
        if point["budget"] in budgets and "distance" not in hyper:
            count = max(1, tokens // hyper.get("tokens_per_cluster", TOKENS_PER_CLUSTER))
            clusters.append({"line": line, "x": count, "y": recall})
        if point["budget"] in budgets and "tokens_per_cluster" not in hyper:
            distances.append({"line": hyper.get("distance", "cosine"), "x": line, "y": recall, "text": f"{recall:.3f}"})
    title, label = "ClusterKV: recall over the number of clusters", f"clusters C0 (default: L / {TOKENS_PER_CLUSTER})"
    number = Panel(title, plots.frame(clusters), label, "recall", log="x", limits=(0, TOP))
    title = "ClusterKV: recall by clustering distance"
    distance = Panel(title, plots.frame(distances), "budget B (tokens)", "recall", kind="bars", limits=(0, 1.1))
    panels = [number, distance]
    drawn.append(plots.draw(panels, out / "recall_clusters.png", caption, size=(5.0, 3.8)))
    return [path for path in drawn if path is not None]


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the out= folder of runs with diagnostics=true")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=PICTURES, help="these pictures (default: all)")
    parser.add_argument("--methods", nargs="+", help="only these methods (default: all but full)")
    parser.add_argument("--budget", help="only rows of this budget, as it was typed")
    parser.add_argument("--ranks", help="method whose ranks are drawn (default: full, else oracle, else the first)")
    parser.add_argument("--layers", type=int, nargs="+", help="layers of drift.png (default: all that are not dense)")
    parser.add_argument(
        "--window", type=int, default=WINDOW, help=f"steps of its moving average, odd (default {WINDOW})"
    )
    parser.add_argument("--name", default="drift", help="its file name (default drift)")
    given = parser.parse_args(argv)
    out: Path = given.out
    if given.window < 1 or given.window % 2 == 0:
        parser.error(f"--window={given.window}: allowed is an odd int >= 1")
    every = {f: row for f, row in rows_by_folder(out).items() if (row["diagnostics"] or {}).get("samples")}
    if given.budget is not None:
        every = {folder: row for folder, row in every.items() if budget_text(row) == given.budget}
    named = {f: row for f, row in every.items() if row["method"] in (given.methods or {row["method"]} - {"full"})}
    chosen = named or ({} if given.methods else every)  # Full attends to everything
    if not chosen:
        parser.error(
            f"{out}: no such row with diagnostics in any folder below; run with diagnostics=true out={out} first"
        )
    layers = min(len((row["diagnostics"] or {})["by_layer"]["mass"]) for row in chosen.values())
    if wrong := [n for n in given.layers or () if not 0 <= n < layers]:
        parser.error(f"--layers {wrong[0]}: allowed is 0 to {layers - 1}")
    if given.ranks and given.ranks not in (methods := {row["method"] for row in every.values()}):
        parser.error(f"--ranks {given.ranks}: no row of that method; there are {', '.join(sorted(methods))}")
    drawing.keep_files(out)
    pictures = {
        "by_layer": lambda: draw_by_layer(chosen, out / "by_layer.png"),
        "mass": lambda: draw_mass(chosen, out / "mass.png"),
        "ranks": lambda: draw_ranks(every, out / "ranks.png", given.ranks),
        "drift": lambda: draw_drift(chosen, out / f"{given.name}.png", given.layers, given.window),
    }
    for name in given.only:
        if (path := pictures[name]()) is not None:
            print(path)


PICTURES = ("by_layer", "mass", "ranks", "drift")

if __name__ == "__main__":
    main()
