"""Figures. Drawn without a display: the file is the result.

python -m pqcache.harness.report.heat_maps <out>                  all needle heat maps side by side: <out>/heatmaps.png
python -m pqcache.harness.report.heat_maps <out> --value words  the share of the needle's words instead: <out>/heatmaps_words.png
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pqcache.atomic import write_text
from pqcache.harness.config.environment import keep_files_under
from pqcache.harness.config.options import RunOptions

# The colours every needle-in-a-haystack figure uses: wrong, in between, right.
NEEDLE_COLOURS = ("#F0496E", "#EBB839", "#0CD79F")


def needle_grid(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int], list[list[float]]]:
    """Lengths, depths and the mean score (0..1) of each cell, [depth][length]; NaN where no sample is.

    rows: samples with "score" (0..100) and "meta" (length, depth).
    """
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        cells.setdefault((row["meta"]["length"], row["meta"]["depth"]), []).append(row["score"] / 100)
    lengths = sorted({length for length, _ in cells})
    depths = sorted({depth for _, depth in cells})
    mean = {key: sum(scores) / len(scores) for key, scores in cells.items()}
    return lengths, depths, [[mean.get((length, depth), float("nan")) for length in lengths] for depth in depths]


def heat_maps(panels: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path | None:
    """Needle heat maps side by side, one per title -> sample rows, saved to `path`; None if there is no sample at all.

    x = context length, y = depth, colour = mean score from 0 to 1, the mean over the grid's cells in each title. What
    all titles say stands once, above.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    grids = {title: needle_grid(rows) for title, rows in panels.items() if rows}
    if not grids:
        return None
    colours = LinearSegmentedColormap.from_list("needle", NEEDLE_COLOURS).with_extremes(bad="#DDDDDD")
    widest = max(len(lengths) for lengths, _, _ in grids.values())
    figure = Figure(figsize=(max(3.4, 1.0 + 0.5 * widest) * len(grids) + 0.8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    heading, titles = split_titles(list(grids))
    if heading:
        figure.suptitle(heading, fontsize=9)
    axes = figure.subplots(1, len(grids), squeeze=False)[0]
    for axis, title, (lengths, depths, scores) in zip(axes, titles, grids.values()):
        axis.imshow(scores, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        known = [s for line in scores for s in line if s == s]  # NaN: no sample
        axis.set_title(f"{textwrap.fill(title, 44)}\nmean {sum(known) / len(known):.3f}", fontsize=9)
        axis.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=45, fontsize=8)
        axis.set_yticks(range(len(depths)), [str(d) for d in depths], fontsize=8)
        axis.set_xticks([i - 0.5 for i in range(1, len(lengths))], minor=True)
        axis.set_yticks([i - 0.5 for i in range(1, len(depths))], minor=True)
        axis.grid(which="minor", color="white", linewidth=0.6)
        axis.tick_params(which="minor", length=0)
        axis.set_xlabel("context length (tokens)", fontsize=8)
    axes[0].set_ylabel("depth of the needle (%)", fontsize=8)
    figure.colorbar(axes[0].images[0], ax=list(axes), label="score")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def split_titles(titles: list[str]) -> tuple[str, list[str]]:
    """The words that all of several titles share, and what is left of each."""
    words = [title.split() for title in titles]
    shared = [w for w in words[0] if all(w in other for other in words)] if len(words) > 1 else []
    return " ".join(shared), [" ".join(w for w in title if w not in shared) for title in words]


def save_heat_map(rows: Sequence[Mapping[str, Any]], folder: Path, title: str, name: str = "heatmap") -> Path | None:
    """One run's `<name>.png`, and the samples it shows in `<name>.json`; None if there is no sample."""
    path = heat_maps({title: rows}, folder / f"{name}.png")
    if path is not None:
        samples = [{"meta": {k: row["meta"][k] for k in ("length", "depth")}, "score": row["score"]} for row in rows]
        write_text(folder / f"{name}.json", json.dumps({"title": title, "samples": samples}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the needle heat maps of all runs under a folder side by side.")
    parser.add_argument("out", type=Path, help="the out= folder of the runs")
    parser.add_argument(
        "--value", choices=["accuracy", "words"], default="accuracy", help="keywords found, or share of words found"
    )
    arguments = parser.parse_args()
    out, name = arguments.out, {"accuracy": "heatmap", "words": "heatmap_words"}[arguments.value]
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob(f"*/{name}.json"))}
    titles = [one["title"] for one in found.values()]
    panels = {one["title"] if titles.count(one["title"]) == 1 else name: one["samples"] for name, one in found.items()}
    if found:  # else nothing is written, not even the folder
        keep_files_under(out, Path(RunOptions.cache_dir).expanduser())
    path = heat_maps(panels, out / f"{name.replace('heatmap', 'heatmaps')}.png")
    if path is None:
        parser.error(f"{out}: no {name}.json in any folder below; run task=needle with out={out} first")
    print(path)


if __name__ == "__main__":
    main()
