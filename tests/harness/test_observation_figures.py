"""PQCache's figures 1 and 5: bytes by a model's sizes, and scores from the files beside the rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from pqcache.harness.report.figure_request import FigureRequest
from pqcache.harness.report.memory_figure import draw_memory, measured_gib, token_bytes
from pqcache.harness.report.score_figures import draw_score_curves, draw_score_map
from pqcache.measure.geometries import geometry
from pqcache.selective.shape import ModelShape


def row(**fields: Any) -> Any:
    common = {"n_samples": 1, "prompt_tokens": 1000.0, "generated_tokens": 4.0, "device": "a machine", "smoke": False}
    return {**common, **fields}


def request(rows: dict[str, Any], folder: Path, **options: Any) -> FigureRequest:
    cells = [SimpleNamespace(name=name, folder=folder / name) for name in rows]
    plan: Any = SimpleNamespace(cells=cells, report={"title": "t"}, experiment="e")
    return FigureRequest(plan, [], rows, folder / "figure.png", "kind", options)


def test_bytes_of_a_token() -> None:
    """K and V in 16 bits: 32 layers of 8 heads of 128 are 128 KiB, of 32 heads four times as much."""
    shape = ModelShape.of(geometry("mistral-7b-instruct-v0.2"))
    assert token_bytes(shape) == 128 * 1024
    assert token_bytes(ModelShape.of(geometry("llama-2-7b-chat"))) == 512 * 1024
    assert token_bytes(ModelShape.of(geometry("llama-2-13b-chat"))) == 800 * 1024
    # 1003 tokens, one of 32 layers, four bytes a number: 8 KiB a token
    held = row(resident_bytes={"device": 1003 * 8192}, kv_dtype="float32", extra={"layers": 1})
    assert measured_gib(held, shape) == pytest.approx(1003 * 128 * 1024 / 2**30)


@pytest.mark.rest
def test_memory_is_drawn(tmp_path: Path) -> None:
    rows = {
        name: row(
            model_options={"geometry": name},
            resident_bytes={"device": 1e6},
            kv_dtype="float16",
            extra={"layers": 2},
        )
        for name in ("llama-2-7b-chat", "mistral-7b-instruct-v0.2")
    }
    path = draw_memory(request(rows, tmp_path, device_gib=40))
    assert path is not None and path.read_bytes()[:4] == b"\x89PNG"
    assert draw_memory(request({}, tmp_path)) is None


@pytest.mark.rest
def test_scores_are_drawn_from_the_first_sample_that_has_some(tmp_path: Path) -> None:
    rows = {"a": row(), "b": row()}
    assert draw_score_curves(request(rows, tmp_path)) is None
    folder = tmp_path / "b" / "diagnostics"
    folder.mkdir(parents=True)
    weights = numpy.random.default_rng(0).dirichlet([1.0] * 20, (2, 4, 3)).astype("float32")
    numpy.savez(
        folder / "x.npz",
        scores=weights,
        score_positions=numpy.array([9, 14, 19], "int32"),
        score_map=numpy.ones((2, 4, 8, 8), "float32"),
    )
    for draw in (draw_score_curves, draw_score_map):
        path = draw(request(rows, tmp_path, heads=[[0, 1], [3, 25]]))
        assert path is not None and path.stat().st_size > 5000
        path.unlink()
