"""The learning curve: points of running means and free-running scores, as a CSV file."""

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
    """learning_curve.csv of all runs one after the other."""
    scores = dict.fromkeys(key for point in curve for key in point if key not in COLUMNS)
    with replacing(out / "learning_curve.csv") as path, open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*COLUMNS, *scores], restval="")
        writer.writeheader()
        writer.writerows(curve)
