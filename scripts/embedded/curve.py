"""The learning curve: points of running means and free-running scores, as a CSV file and a picture."""

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
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


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


def picture(width: float, height: float) -> tuple[Any, Any]:
    """(figure, axis), drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def draw(curve: Sequence[Point], scores: list[str], path: Path) -> None:
    """Wrong answer tokens in training and wrong free-running answers over the tokens seen, one colour per recipe."""
    figure, axis = picture(7, 3.8)
    start = 0.0
    for number, recipe in enumerate(dict.fromkeys(point["recipe"] for point in curve)):
        points = [point for point in curve if point["recipe"] == recipe]
        seen = [start + float(point["tokens"]) / 1e6 for point in points]
        wrong = [max(0.1, 100 * (1 - float(point["accuracy"]))) for point in points]
        axis.plot(seen, wrong, color=f"C{number}", linewidth=1.2, label=f"{recipe}: answer tokens wrong, in training")
        given = [[float(point[name]) for name in scores if point.get(name)] for point in points]
        tested = [(at, max(0.1, 100 - sum(all_) / len(all_))) for at, all_ in zip(seen, given, strict=True) if all_]
        if tested:
            label = f"{recipe}: 100 - free-running score"
            axis.plot(*zip(*tested, strict=True), "o", color=f"C{number}", markersize=4, label=label)
        start = seen[-1]
    axis.set(xlabel="million tokens of training", ylabel="%", yscale="log", title="Learning curve, full cache")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
