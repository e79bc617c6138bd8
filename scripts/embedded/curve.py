"""The learning curve: points of running means and free-running scores, as a CSV file and a picture."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pqcache.atomic import replacing

# Columns of every point; free-running scores follow where a point has them.
COLUMNS = ("recipe", "step", "tokens", "minutes", "length", "loss", "accuracy", "first_value")

Point = dict[str, Any]


def read(folder: Path) -> list[Point]:
    """The points in a folder of weights; none if it has no curve."""
    path = folder / "learning_curve.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write(curve: Sequence[Point], out: Path) -> None:
    """learning_curve.csv of all runs one after the other, and a picture of it if matplotlib is installed."""
    if not curve:
        return
    scores = list(dict.fromkeys(key for point in curve for key in point if key not in COLUMNS))
    with replacing(out / "learning_curve.csv") as path, open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*COLUMNS, *scores], restval="")
        writer.writeheader()
        writer.writerows(curve)
    try:
        draw(curve, scores, out / "learning_curve.png")
    except ImportError:
        return


def draw(curve: Sequence[Point], scores: list[str], path: Path) -> None:
    """Wrong answer tokens in training and wrong free-running answers over the tokens seen, one colour per recipe."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    start = 0.0
    for number, recipe in enumerate(dict.fromkeys(point["recipe"] for point in curve)):
        points = [point for point in curve if point["recipe"] == recipe]
        seen = [start + float(point["tokens"]) / 1e6 for point in points]
        wrong = [max(0.1, 100 * (1 - float(point["accuracy"]))) for point in points]
        color = f"C{number}"
        axis.plot(seen, wrong, color=color, linewidth=1.2, label=f"{recipe}: answer tokens wrong, in training")
        tested = [
            (at, max(0.1, error))
            for at, point in zip(seen, points, strict=True)
            if (error := _mean_error(point, scores)) is not None
        ]
        if tested:
            label = f"{recipe}: 100 - free-running score"
            axis.plot(*zip(*tested, strict=True), "o", color=color, markersize=4, label=label)
        start = seen[-1]
    axis.set(xlabel="million tokens of training", ylabel="%", yscale="log", title="Learning curve, full cache")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def _mean_error(point: Point, scores: list[str]) -> float | None:
    """100 less the mean of a point's free-running scores; None if it has none."""
    tested = [float(point[name]) for name in scores if point.get(name)]
    return sum(100 - score for score in tested) / len(tested) if tested else None
