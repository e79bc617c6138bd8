"""Heat maps of task=needle: the score over context length and depth of the needle.

python -m pqcache.harness.report.heat_maps <out>                  the maps of all runs side by side: <out>/heatmaps.png
python -m pqcache.harness.report.heat_maps <out> --value words    share of the needle's words: <out>/heatmaps_words.png
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pqcache.atomic import write_text
from pqcache.harness.report import axes as drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From wrong (dark) to right (light): told apart with any colour vision and in grey, unlike the red and green of the papers.
SCALE = "cividis"
Grid = tuple[list[int], list[int], list[list[float]]]  # lengths, depths, scores [depth][length]


def needle_grid(samples: Sequence[Mapping[str, Any]]) -> Grid:
    """Lengths, depths and the mean score (0..1) of each cell, [depth][length]; NaN where no sample is.

    samples: with "score" (0..100) and "meta" (length, depth).
    """
    cells: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        cells.setdefault((sample["meta"]["length"], sample["meta"]["depth"]), []).append(sample["score"] / 100)
    lengths = sorted({length for length, _ in cells})
    depths = sorted({depth for _, depth in cells})
    means = {key: fmean(scores) for key, scores in cells.items()}
    return lengths, depths, [[means.get((length, depth), float("nan")) for length in lengths] for depth in depths]


def heat_maps(panels: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, caption: str = "") -> Path | None:
    """Needle heat maps side by side, one per title -> samples, saved to `path`; None if there is no sample at all.

    Each title has the mean over the grid's cells. Words that all titles share are printed once, above.
    """
    from matplotlib import colormaps

    grids = {title: needle_grid(samples) for title, samples in panels.items() if samples}
    if not grids:
        return None
    colours = colormaps[SCALE].with_extremes(bad="#DDDDDD")
    max_columns = max(len(lengths) for lengths, _, _ in grids.values())
    figure = drawing.new_figure(max(3.4, 1.0 + 0.5 * max_columns) * len(grids) + 0.8, 3.6)
    heading, titles = drawing.split_titles(list(grids))
    if heading:
        figure.suptitle(heading, fontsize=9)
    axes = figure.subplots(1, len(grids), squeeze=False)[0]
    for axis, title, grid in zip(axes, titles, grids.values(), strict=True):
        _draw_map(axis, title, grid, colours)
    axes[0].set_ylabel("depth of the needle (%)", fontsize=8)
    figure.colorbar(axes[0].images[0], ax=list(axes), label="score")
    return drawing.save(figure, path, caption)


def _draw_map(axis: Axes, title: str, grid: Grid, colours: Any) -> None:
    lengths, depths, scores = grid
    axis.imshow(scores, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    mean = fmean(score for line in scores for score in line if score == score)  # NaN: no sample
    axis.set_title(f"{textwrap.fill(title, 44)}\nmean {mean:.3f}", fontsize=9)
    axis.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=45, fontsize=8)
    axis.set_yticks(range(len(depths)), [str(d) for d in depths], fontsize=8)
    axis.set_xticks([i - 0.5 for i in range(1, len(lengths))], minor=True)
    axis.set_yticks([i - 0.5 for i in range(1, len(depths))], minor=True)
    axis.grid(which="minor", color="white", linewidth=0.6)
    axis.tick_params(which="minor", length=0)
    axis.set_xlabel("context length (tokens)", fontsize=8)


def save_heat_map(samples: Sequence[Mapping[str, Any]], folder: Path, title: str, name: str = "heatmap") -> Path | None:
    """One run's `<name>.png`, and the samples it shows in `<name>.json`; None if there is no sample."""
    path = heat_maps({title: samples}, folder / f"{name}.png")
    if path is not None:
        shown = [{"meta": {k: s["meta"][k] for k in ("length", "depth")}, "score": s["score"]} for s in samples]
        write_text(folder / f"{name}.json", json.dumps({"title": title, "samples": shown}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the needle heat maps of all runs under a folder side by side.")
    parser.add_argument("out", type=Path, help="the out= folder of the runs")
    parser.add_argument(
        "--value",
        choices=["accuracy", "words"],
        default="accuracy",
        help="answers with all keywords, or the share of the needle's words",
    )
    arguments = parser.parse_args()
    out, name = arguments.out, {"accuracy": "heatmap", "words": "heatmap_words"}[arguments.value]
    runs = {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob(f"*/{name}.json"))}
    if not runs:
        parser.error(f"{out}: no {name}.json in any folder below; run task=needle with out={out} first")
    titles = [run["title"] for run in runs.values()]
    panels = {run["title"] if titles.count(run["title"]) == 1 else cell: run["samples"] for cell, run in runs.items()}
    drawing.keep_files(out)
    print(heat_maps(panels, out / f"{name.replace('heatmap', 'heatmaps')}.png"))


if __name__ == "__main__":
    main()
