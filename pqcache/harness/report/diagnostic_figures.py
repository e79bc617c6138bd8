"""Figures of what methods select, of all rows with diagnostics under a folder.

python run.py experiment=diagnostics
python -m pqcache.harness.report.diagnostic_figures <out>      writes there
    by_layer.png     recall and attention mass by layer, methods side by side
    mass.png         mass with its 5th percentile, recall of the 10 heaviest tokens, output error and its bound
    ranks.png        ranks of tokens over decode steps (as ClusterKV's Figure 3a), how long heavy tokens stay heavy
    drift.png        recall and attention mass by decode step, smoothed by a centred moving average of `--window` steps

python -m pqcache.harness.report.diagnostic_figures <out> --only drift --layers 1 --window 25 --budget 512
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pqcache.diagnostics.summary import arrays_of
from pqcache.harness.report import plots
from pqcache.harness.report.any_table import labels
from pqcache.harness.report.frame import budget_text, frame
from pqcache.harness.report.plots import Panel
from pqcache.harness.report.rows import Row, rows_by_folder
from pqcache.harness.report.special_figures import rank_panels
from pqcache.harness.report.table import several

TOP = 1.02  # of an axis of shares
WINDOW = 33  # steps of the moving average
TITLES = {"recall_kv": "recall of the oracle's choice", "recall_q": "recall of each query head's own top"}
TITLES |= {"mass": "attention mass", "hit_top10": "10 heaviest past tokens: share attended"}
BY_LAYER, BY_STEP = ("recall_kv", "recall_q", "mass"), ("recall_kv", "hit_top10", "mass")
# a number of the row, what its bars are called, and the number that a mark shows
MEANS = (
    ("mass", "attention mass (bar) and its 5th percentile (mark)", "mass_p5"),
    ("hit_top10", TITLES["hit_top10"], ""),
    ("set_error", "output error |o - o_S| (bar) and its bound (mark)", "bound"),
)
SWEPT = {
    "recall_budget": "recall of the top-B prompt tokens (ClusterKV)",
    "hit_top10": "10 heaviest past tokens: share attended (Quest)",
    "mass": "attention mass",
}
TOKENS_PER_CLUSTER = 80  # ClusterKV's default
Folders = dict[Path, Row]  # a cell's folder -> its row


def _caption(rows: Sequence[Row], over: str) -> str:
    samples = sorted({(row["diagnostics"] or {}).get("samples", 0) for row in rows})
    models, tasks = (several(row[key] for row in rows) for key in ("model", "task"))
    return (
        f"{models}, {tasks}: {several(samples)} samples a method, {rows[0]['prompt_tokens']:.0f} prompt tokens on average;"
        f" means over samples, {over} and query heads, on each run's own queries."
    )


def _ordered(folders: Folders) -> list[tuple[Path, Row, str]]:
    """(folder, row, name), the largest budget first."""
    table = frame(folders.values())
    names = labels(table.to_dict("records"), [key for key in table.attrs["keys"] if key not in ("budget", "device")])
    every = zip(folders, folders.values(), names, strict=True)
    return sorted(every, key=lambda one: (-(one[1]["budget_ratio"] or 0), -(one[1]["budget_tokens"] or 0)))


def _shares(parts: Sequence[pd.DataFrame], x: str, out: Path, caption: str) -> Path | None:
    """Panels of shares, as the parts name them."""
    panels = plots.panels_of(plots.joined(parts), x=x, limits=(0, TOP))
    return plots.draw(panels, out, caption, size=(4.0, 3.0), across=3)


def draw_by_layer(folders: Folders, out: Path) -> Path | None:
    parts = [
        plots.series(name, range(len(values)), values, panel=f"{TITLES[key]}, budget {budget_text(row)}")
        for _, row, name in _ordered(folders)
        for key in BY_LAYER
        for values in [(row["diagnostics"] or {})["by_layer"][key]]
    ]
    text = " Recall: as many of the heaviest candidates as the method selected; 1 = a perfect index. Mass: softmax weight of all"
    text += " attended tokens under full attention."
    return _shares(parts, "layer", out, _caption(list(folders.values()), "decode steps") + text)


def draw_mass(folders: Folders, out: Path) -> Path | None:
    panels = []
    for key, title, mark in MEANS:
        points = [
            {"x": name, "line": f"budget {budget_text(row)}", "y": found[key], "printed": found.get(mark)}
            for _, row, name in _ordered(folders)
            for found in [dict(row["diagnostics"] or {})]
        ]
        panels.append(Panel(title, plots.frame(points), kind="bars", limits=(0, TOP)))
    panels[-1].log, panels[-1].limits = "y", (None, None)
    text = " The 5th percentile is over all samples, layers, heads and steps. Bound: 2 (1 - mass) max|v|."
    return plots.draw(panels, out, _caption(list(folders.values()), "decode steps") + text, size=(4.2, 3.6))


def draw_ranks(folders: Folders, out: Path, method: str | None) -> Path | None:
    """Of one sample of `method` (default: full, else oracle, else the first); None if it has fewer than two decode steps."""
    methods = {row["method"]: (folder, row) for folder, row in reversed(folders.items())}
    method = method or next((name for name in ("full", "oracle") if name in methods), list(methods)[-1])
    folder, row = methods[method]
    stem, arrays = next(arrays_of(folder), ("", {}))
    if not arrays or arrays["ranks"].shape[2] < 2:
        return None
    budget = f", budget {budget_text(row)}" if method != "full" else ""
    text = f"{row['model']}, {row['task']}, {row['prompt_tokens']:.0f} prompt tokens, sample {stem}, under {method}{budget}."
    text += " Left: evenly spaced prompt tokens in the head of median change."
    text += " Right: mean over query heads of each layer."
    return plots.draw(rank_panels(arrays), out, text, size=(5.5, 4.0))


# -- by decode step ----------------------------------------------------------------------------------------------------


def draw_drift(folders: Folders, out: Path, layers: Sequence[int] | None, window: int) -> Path | None:
    """Of each decode step the mean over samples, which may end at different steps, and layers.

    layers: None for all that the method does not leave dense.
    """
    parts = []
    for folder, row, name in _ordered(folders):
        if not (samples := [arrays for _, arrays in arrays_of(folder)]):
            continue
        chosen = list(range(row["dense_layers"] or 0, len(samples[0]["mass"]))) if layers is None else list(layers)
        for key in BY_STEP:
            every = pd.concat([pd.DataFrame(arrays[key][chosen].flatten(0, 1).numpy()) for arrays in samples])
            # where a step has no value there is no point; at the ends fewer are averaged
            mean = every.astype(float).mean()
            values = mean.rolling(window, min_periods=1, center=True).mean().where(mean.notna()).tolist()
            place = f"{TITLES[key]}, budget {budget_text(row)}"
            parts.append(plots.series(name, range(1, len(values) + 1), values, panel=place))
    where = "all layers that are not dense" if layers is None else f"layers {', '.join(map(str, layers))}"
    text = (
        f" Smoothed by a centred moving average of {window} steps. Recall: as many of the heaviest candidates as the method"
        " selected; methods without a selection have none. Mass: softmax weight of all attended tokens under full attention."
    )
    return _shares(parts, "decode step", out, _caption(list(folders.values()), where) + text)


# -- a recall sweep ----------------------------------------------------------------------------------------------------


def draw_sweep(sweep: dict[str, Any], out: Path) -> list[Path]:
    """Of a recall_sweep.json (run/recall_sweep.py): recall_budgets.png, and recall_clusters.png of ClusterKV's settings."""
    header, points = sweep["header"], sweep["points"]
    tokens = header["prompt_tokens"]
    caption = (
        f"{header['model']}, {header['prompt']}: {tokens} prompt tokens, {header['steps']} decode steps of one run under full"
        " attention; every index is built on its keys and asked with its queries. Means over layers, query heads and steps."
    )
    table = plots.frame(points)
    plain = table[[not hyper for hyper in table.hyper]].rename(columns={"method": "line", "budget": "x"})
    text = (
        " Recall: |S & T| / |T|, S the attended prompt tokens (sinks and window included), T the |S| heaviest."
        " The oracle shares one choice per KV head, so it is no upper bound of a recall per query head."
    )
    axes: dict[str, Any] = {"x": "budget B (tokens)", "limits": (0, TOP)}
    panels = [Panel(title, plain.assign(y=plain[key]), **axes) for key, title in SWEPT.items()]
    drawn = [plots.draw(panels, out / "recall_budgets.png", caption + text, size=(4.0, 3.6))]
    own = table[table.method == "clusterkv"]
    own = own[own.budget.isin(own.budget[[bool(hyper) for hyper in own.hyper]])]  # budgets with other settings
    own = own.assign(y=own.recall_budget, line=[f"B = {budget}" for budget in own.budget])
    clusters = own[["distance" not in hyper for hyper in own.hyper]]
    sizes = [hyper.get("tokens_per_cluster", TOKENS_PER_CLUSTER) for hyper in clusters.hyper]
    clusters = clusters.assign(x=[max(1, tokens // size) for size in sizes])
    distances = own[["tokens_per_cluster" not in hyper for hyper in own.hyper]]
    names = [hyper.get("distance", "cosine") for hyper in distances.hyper]
    distances = distances.assign(x=distances.line, line=names, text=[f"{recall:.3f}" for recall in distances.y])
    title, label = "ClusterKV: recall over the number of clusters", f"clusters C0 (default: L / {TOKENS_PER_CLUSTER})"
    number = Panel(title, clusters, label, "recall", log="x", limits=(0, TOP))
    title = "ClusterKV: recall by clustering distance"
    distance = Panel(title, distances, "budget B (tokens)", "recall", kind="bars", limits=(0, 1.1))
    drawn.append(plots.draw([number, distance], out / "recall_clusters.png", caption, size=(5.0, 3.8)))
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
    text = f"steps of its moving average, odd (default {WINDOW})"
    parser.add_argument("--window", type=int, default=WINDOW, help=text)
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
        what = "no such row with diagnostics in any folder below"
        parser.error(f"{out}: {what}; run with diagnostics=true out={out} first")
    layers = min(len((row["diagnostics"] or {})["by_layer"]["mass"]) for row in chosen.values())
    if wrong := [n for n in given.layers or () if not 0 <= n < layers]:
        parser.error(f"--layers {wrong[0]}: allowed is 0 to {layers - 1}")
    if given.ranks and given.ranks not in (methods := {row["method"] for row in every.values()}):
        parser.error(f"--ranks {given.ranks}: no row of that method; there are {', '.join(sorted(methods))}")
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
