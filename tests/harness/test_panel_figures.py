"""Figures of named panels and of gains: what is drawn is what was measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pqcache.harness.report import axes as drawing
from pqcache.harness.report import panel_figures
from pqcache.harness.report.entries import Entry
from pqcache.harness.report.figure_request import FigureRequest


def entry(line: str, score: float, folder: str, **changed: Any) -> Entry:
    values: dict[str, Any] = dict.fromkeys(Entry.__annotations__)
    common = {"experiment": "e", "model": "m", "dataset": "d", "metric": "score", "status": "ok", "setting": ""}
    values |= {**common, "line": line, "method": line, "measured": score, "folder": folder}
    full = None if line == "full" else score - 50.0
    return Entry(**{**values, "to_full": full, "to_full_low": full, "to_full_high": full, **changed})


def row(prefill: float, steps: float) -> Any:
    return {
        "tt2t_s": prefill,
        "tpot_p50_ms": steps,
        "generated_tokens": 12.0,
        "n_samples": 4,
        "prompt_tokens": 100.0,
        "device": "a machine",
        "smoke": False,
    }


def drawn(monkeypatch: pytest.MonkeyPatch, kind: str, entries: list[Entry], options: dict[str, Any], **of: Any) -> Any:
    figures: list[Any] = []
    monkeypatch.setattr(drawing, "save", lambda figure, path, caption="": figures.append((figure, caption)) or path)
    cells = [
        SimpleNamespace(name=e.folder, run=SimpleNamespace(scale="machine"), identity=of.get(e.folder, {}))
        for e in entries
    ]
    plan: Any = SimpleNamespace(cells=cells, report={"title": "t"}, experiment="e")
    rows = {e.folder: row(1.0 + i, 100.0) for i, e in enumerate(entries)}
    request = FigureRequest(plan, entries, rows, Path("unused.png"), kind, options)
    {"panels": panel_figures.draw_panels, "gain": panel_figures.draw_gain}[kind](request)
    return figures[0]


def test_an_answer_takes_its_prompt_and_every_step() -> None:
    assert panel_figures.latency(row(2.0, 100.0)) == pytest.approx(3.0)
    assert panel_figures.latency({**row(2.0, 0.0), "tt2t_s": None}) is None


def test_panels_show_deficit_and_normalised_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry("full", 50.0, "f"), entry("h2o", 44.0, "h"), entry("kmeans", 48.0, "k")]
    bars = {"H2O": "h2o", "K-Means": "kmeans"}
    panels = [
        {"title": "(a)", "y": "score", "show": "deficit", "bars": bars},
        {"title": "(b)", "y": "latency", "show": "normalised", "to": "h2o", "bars": bars},
        {"title": "(c)", "y": "score", "show": "change", "bars": bars},
    ]
    figure, caption = drawn(monkeypatch, "panels", entries, {"panels": panels})
    heights = [[bar.get_height() for bar in axis.patches] for axis in figure.axes]
    assert heights[0] == [6.0, 2.0]
    assert heights[1] == [pytest.approx(1.0), pytest.approx(4.0 / 3.0)]  # 3 + 1 seconds against 2 + 1
    assert heights[2] == [-6.0, -2.0]
    assert [axis.get_title() for axis in figure.axes] == ["(a)", "(b)", "(c)"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["H2O", "K-Means"]
    assert "Machine size." in caption
    with pytest.raises(ValueError, match="show=loss"):
        drawn(monkeypatch, "panels", entries, {"panels": [{"show": "loss", "bars": bars}]})


def test_gain_is_over_the_line_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "a0": ("h2o", 0.0, 40.0),
        "a5": ("h2o", 0.5, 43.0),
        "b0": ("snapkv", 0.0, 45.0),
        "b5": ("snapkv", 0.5, 44.0),
    }
    entries = [entry("c", score, name) for name, (_, _, score) in points.items()]
    identities = {name: {"method": {"base": base, "rep_ratio": x}} for name, (base, x, _) in points.items()}
    options = {"x": "method.rep_ratio", "by": "method.base", "x_label": "share", "y_label": "gain"}
    figure, _ = drawn(monkeypatch, "gain", entries, options, **identities)
    (axis,) = figure.axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines[:2]}
    assert lines == {"h2o": ([0.0, 50.0], [0.0, 3.0]), "snapkv": ([0.0, 50.0], [0.0, -1.0])}
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("share", "gain")
