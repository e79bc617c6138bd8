"""Recall and mass by decode step: the curve of each row, its smoothing, and the picture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pqcache.harness.config.compose import compose_all
from pqcache.harness.report import drift_figure
from pqcache.harness.report.drift_figure import by_step, smoothed
from pqcache.places import CONFIGS

NAN = float("nan")


def test_means_of_samples_that_end_at_different_steps() -> None:
    long = torch.tensor([[[0.0, 1.0, 1.0]], [[1.0, NAN, 0.0]]])  # (layers, heads, steps)
    short = torch.tensor([[[1.0, 0.5]], [[1.0, 0.5]]])
    assert by_step([long, short]).tolist() == [0.75, pytest.approx(2 / 3), 0.5]


def test_smoothing_keeps_the_mean_and_leaves_gaps() -> None:
    values = torch.tensor([0.0, 3.0, NAN, 3.0, 6.0])
    assert smoothed(values, 1).tolist()[:2] == [0, 3]
    found = smoothed(values, 3)
    assert found[[0, 1, 3, 4]].tolist() == [1.5, 1.5, 4.5, 4.5] and found[2].isnan()
    assert smoothed(torch.full((9,), 0.25), 5).tolist() == [0.25] * 9


def test_the_picture(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-m", "method=pqcache,snapkv", "diagnostics=true", "limit=1") == 0
    out = str(tmp_path / "out")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["drift_figure", out, "--layers", "1", "--window", "3"])
    drift_figure.main()
    assert capsys.readouterr().out.strip() == f"{out}/drift.png"
    assert (tmp_path / "out/drift.png").stat().st_size > 10_000
    for words, line in {
        ("--window", "2"): "--window=2: allowed is an odd int",
        ("--layers", "9"): "--layers 9",
    }.items():
        monkeypatch.setattr(sys, "argv", ["drift_figure", out, *words])
        with pytest.raises(SystemExit):
            drift_figure.main()
        assert line in capsys.readouterr().err


def test_long_chain_takes_its_own_weights_where_no_model_is_typed() -> None:
    def model(*words: str) -> list[str]:
        return [one.config["model"]["name"] for one in compose_all(list(words), CONFIGS).composed]

    assert model("task=long_chain") == ["embedded_chain"]
    assert model("task=long_chain", "model=embedded") == ["embedded"]
    assert model("-m", "task=pocket_qa,long_chain") == ["embedded", "embedded_chain"]
