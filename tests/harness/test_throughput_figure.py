"""The figure of throughput: which points fit the memory, and the most that each line reaches within it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pqcache.harness.report import axes as drawing
from pqcache.harness.report.figure_request import FigureRequest
from pqcache.harness.report.throughput_figure import GIB, draw_throughput

# (method, batch) -> tokens per second, GiB of the cache
MEASURED = {
    ("full", 1): (10, 1),
    ("full", 4): (30, 4),
    ("snapkv", 4): (32, 1),
    ("snapkv", 8): (50, 2),
    ("snapkv", 32): (60, 8),
}


def request(**options: Any) -> FigureRequest:
    cells, rows = [], {}
    for (method, batch), (speed, gib) in MEASURED.items():
        name = f"{method}-{batch}"
        cells.append(SimpleNamespace(name=name, names=[method], identity={"method": {"name": method}}))
        rows[name] = {
            "extra": {"tokens_per_s": float(speed), "batch": batch},
            "peak_bytes": {"device": float(gib * GIB)},
            "method": method,
            "prompt_tokens": 2048.0,
            "n_samples": 3,
            "device": "a machine",
            "smoke": False,
        }
    rows["full-1"]["extra"] = {}  # as older rows have it
    plan: Any = SimpleNamespace(cells=cells, report={"title": "t"}, experiment="e")
    return FigureRequest(plan, [], rows, Path("unused.png"), "throughput", options)  # type: ignore[arg-type]


def drawn(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, str]:
    figures: list[Any] = []
    monkeypatch.setattr(drawing, "save", lambda figure, path, caption="": figures.append((figure, caption)) or path)
    draw_throughput(request(**options))
    return figures[0]


@pytest.mark.parametrize(
    ("options", "most", "hollow", "text"),
    [
        (
            {"full_batch": 4},
            {"full": 30.0, "snapkv": 50.0},
            1,
            "more than 4 GiB of cache, what Full's holds at batch 4",
        ),
        ({"gib": 1.5}, {"snapkv": 32.0}, 3, "more than 1.5 GiB of cache; weights"),
        ({}, {"full": 30.0, "snapkv": 60.0}, 0, "No memory is fixed."),
        ({"full_batch": 2}, {"full": 30.0, "snapkv": 60.0}, 0, "No memory is fixed."),
    ],
)
def test_the_most_that_fits(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], most: dict[str, float], hollow: int, text: str
) -> None:
    figure, caption = drawn(monkeypatch, **options)
    left, right = figure.axes
    names = [label.get_text() for label in right.get_xticklabels()]
    assert dict(zip(names, [bar.get_height() for bar in right.patches], strict=True)) == most
    assert sum(line.get_markerfacecolor() == "white" for line in left.lines) == hollow
    assert text in caption and "batch 1 / 4 / 8 / 32" in caption
