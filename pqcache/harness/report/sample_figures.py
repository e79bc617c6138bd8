"""The pictures that a task names (`Task.figures`), of one run and of all runs under a folder side by side.

python -m pqcache.harness.report.sample_figures <out>      heatmaps.png, heatmaps_words.png (task=needle), perplexity.png (pg19)
"""

import argparse
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd

from pqcache.atomic import write_text
from pqcache.harness.report import plots
from pqcache.harness.report.plots import Panel
from pqcache.harness.tasks import Figure
from pqcache.outside import read_json

MAX_POINTS = 400  # of a stored curve
# what a run leaves -> the picture of all runs
HEAT_MAPS = {"heatmap.json": "heatmaps.png", "heatmap_words.json": "heatmaps_words.png"}
ENDS = {"y": "", "low": ".low", "high": ".high"}  # of a mark -> end of a column of the frame of rows
CURVES, CURVE = "perplexity.json", "perplexity.png"
Samples = Sequence[Mapping[str, Any]]


def draw(figure: Figure, samples: Samples, folder: Path, title: str) -> Path | None:
    """Write `<figure.name>.png` and the numbers it shows as .json; None if there is nothing to draw.

    samples: `score` (0..100), `metrics` (name -> 0..1), `meta`, `response` and `doc` of each document.
    """
    if figure.kind == "perplexity":
        logprobs = [(sample["meta"]["position"], getattr(sample["response"][0], "tokens", [])) for sample in samples]
        return save_curve(logprobs, str(samples[0]["doc"]["mode"]), folder, title) if samples else None
    if figure.metric is not None:
        samples = [{**sample, "score": 100 * sample["metrics"][figure.metric]} for sample in samples]
    path = needle_maps({title: samples}, folder / f"{figure.name}.png")
    if path is not None:
        shown = [{"meta": {k: s["meta"][k] for k in ("length", "depth")}, "score": s["score"]} for s in samples]
        write_text(folder / f"{figure.name}.json", json.dumps({"title": title, "samples": shown}) + "\n")
    return path


# -- task=needle -------------------------------------------------------------------------------------------------------


def needle_grid(samples: Samples) -> pd.DataFrame:
    """The mean score (0..1) by depth (down) and length (across); NaN where no sample is.

    samples: with "score" (0..100) and "meta" (length, depth).
    """
    table = pd.DataFrame([{**sample["meta"], "score": sample["score"] / 100} for sample in samples])
    return table.pivot_table(index="depth", columns="length", values="score", aggfunc="mean")


def needle_maps(runs: Mapping[str, Samples], path: Path, caption: str = "") -> Path | None:
    """Needle heat maps side by side, one per title -> samples; None if there is no sample at all.

    Each title has the mean over the grid's cells. Words that all titles share are printed once, below.
    """
    grids = {title: needle_grid(samples) for title, samples in runs.items() if samples}
    heading, titles = plots.split_titles(list(grids)) if grids else ("", [])
    panels = [
        Panel(
            f"{textwrap.fill(title, 44)}\nmean {float(grid.stack().mean()):.3f}", grid, "context length (tokens)",
            "depth of the needle (%)", kind="map", colour="score",
        )
        for title, grid in zip(titles, grids.values(), strict=True)
    ]  # fmt: skip
    width = max((3.4, *(1.0 + 0.5 * len(grid.columns) for grid in grids.values())))
    return plots.draw(panels, path, " ".join(part for part in (heading, caption) if part), size=(width, 3.2))


# -- task=pg19 ---------------------------------------------------------------------------------------------------------


def curve(scored: Sequence[tuple[int, Sequence[float]]]) -> tuple[list[int], list[float]]:
    """(lengths, perplexities). Each is of all tokens predicted so far: exp of their mean negative log-probability.

    scored: (position of the first decode step, log-probabilities of the tokens predicted from there on).
    """
    parts = sorted(scored, key=lambda part: part[0])
    every = [(at + i, -value) for at, values in parts for i, value in enumerate(values, 1)]
    totals = accumulate(loss for _, loss in every)
    return [length for length, _ in every], [math.exp(total / count) for count, total in enumerate(totals, 1)]


def save_curve(scored: Sequence[tuple[int, Sequence[float]]], mode: str, folder: Path, title: str) -> Path | None:
    """One run's perplexity.png and perplexity.json; None if nothing was predicted. scored: see `curve`."""
    lengths, perplexities = curve(scored)
    if not lengths:
        return None
    every = max(1, len(lengths) // MAX_POINTS)
    points = sorted({*range(0, len(lengths), every), len(lengths) - 1})
    run = {"title": title, "mode": mode, "lengths": [lengths[i] for i in points]}
    run["perplexity"] = [perplexities[i] for i in points]
    write_text(folder / CURVES, json.dumps(run) + "\n")
    return draw_curves([run], folder / CURVE)


def draw_curves(runs: Sequence[Mapping[str, Any]], path: Path, caption: str = "") -> Path | None:
    """The curves of perplexity.json files in one figure. Exact ones are solid, streaming ones (another measure) dashed."""
    heading, titles = plots.split_titles([run["title"] for run in runs])
    lines = [
        plots.series(f"{title} ({run['mode']})", run["lengths"], run["perplexity"], dash=int(run["mode"] != "exact"))
        for run, title in zip(runs, titles, strict=True)
    ]
    panel = Panel(heading or titles[0], plots.joined(lines), "tokens", "perplexity so far")
    return plots.draw([panel], path, caption, size=(7.0, 4.2))


# -- task=turns --------------------------------------------------------------------------------------------------------


def by_turn(title: str, records: Sequence[Mapping[Any, Any]], names: Iterable[str]) -> Panel:
    """The score of each turn of task=turns with its 95 % interval, of lines of the frame with these names."""
    points: list[dict[str, Any]] = []
    for record, name in zip(records, names, strict=True):
        turn = 1
        while (key := f"metric.turn_{turn}") in record:
            values = {end: record.get(f"{key}{column}") for end, column in ENDS.items()}
            score = {end: None if value is None else 100 * value for end, value in values.items()}
            points.append({"line": name, "x": turn, **score})
            turn += 1
    return Panel(title, plots.frame(points), "turn", "score")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the out= folder of the runs")
    out: Path = parser.parse_args(argv).out
    names = (*HEAT_MAPS, CURVES)
    found = {name: {p.parent.name: read_json(p) for p in sorted(out.glob(f"*/{name}"))} for name in names}
    if not any(found.values()):
        first = f"run task=needle or task=pg19 with out={out} first"
        parser.error(f"{out}: no {' or '.join(names)} in any folder below; {first}")
    for name, picture in HEAT_MAPS.items():
        runs = found[name].items()
        titles = [run["title"] for _, run in runs]
        own = {t if titles.count(t) == 1 else cell: run["samples"] for t, (cell, run) in zip(titles, runs, strict=True)}
        if (path := needle_maps(own, out / picture)) is not None:
            print(path)
    if found[CURVES]:
        print(draw_curves(list(found[CURVES].values()), out / CURVE))


if __name__ == "__main__":
    main()
