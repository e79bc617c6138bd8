"""`diagnostics=true` and `=trace` from the command line: the row, the files beside it, resuming, replaying, figures."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.torch import load_file

from pqcache.diagnostics import PROMPT_ARRAYS, scores, summary
from pqcache.diagnostics.summary import PROMPT_SUFFIX
from pqcache.harness.report import diagnostic_figures
from pqcache.harness.report.diagnostic_figures import PICTURES
from pqcache.harness.report.rows import Diagnostics
from tests.harness.cells import Capture, Command
from tests.harness.cells import one_row as only


def test_row_and_files(command: Command, tmp_path: Path, capsys: Capture) -> None:
    assert command("method=oracle", "diagnostics=true", "method.n_sink=8") == 0
    folder, row = only(tmp_path / "out", "oracle")
    result: Any = row["diagnostics"]
    assert result.keys() == Diagnostics.__annotations__.keys()
    assert result["recall_kv"] == 1
    assert 0 < result["mass_p5"] <= result["mass"] < 1
    assert result["bound_held"] == 1
    assert result["chance"] < result["recall_q"] <= 1
    steps = sum(len(json.loads(line)["step_s"]) for line in (folder / "samples.jsonl").open())
    assert (result["samples"], result["steps"]) == (3, steps)
    assert [len(x) for x in result["by_layer"].values()] == [2] * len(result["by_layer"])
    for key in ("tt2t_s", "tpot_p50_ms", "tpot_p95_ms", "prefill_s", "index_build_s", "roofline"):
        assert row[key] is None  # type: ignore[literal-required]
    files = sorted((folder / result["folder"]).iterdir())
    assert [f.suffix for f in files] == [".npz"] * 3
    arrays = numpy.load(files[0])
    assert set(arrays.files) == summary.FIELDS.keys() - scores.FIELDS.keys()
    assert arrays["mass"].shape[:2] == (2, 4)
    shown = capsys.readouterr().out
    assert "not measured: diagnostics slow the steps" in shown
    assert "recall 1.000 of the oracle's" in shown


def test_only_what_is_missing_is_measured_again(command: Command, tmp_path: Path, generated: list[int]) -> None:
    """Killed between a sample's file and its line, or a file lost since: that sample alone is done again."""
    line = ("method=pqcache", "diagnostics=trace", "method.b=3", "budget=0.3")
    assert command(*line) == 0
    folder, row = only(tmp_path / "out", "pqcache")
    assert (len(generated), len(list((folder / "diagnostics").iterdir()))) == (3, 6)
    assert command(*line) == 0
    assert len(generated) == 3
    log = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "samples.jsonl").write_bytes(b"".join(log[:2]) + log[2][:40])  # a line cut short
    (folder / "row.json").unlink()
    assert command(*line) == 0
    assert len(generated) == 4
    next((folder / "diagnostics").glob("*-0-*.npz")).unlink()
    assert command(*line) == 0
    assert len(generated) == 5
    assert only(tmp_path / "out", "pqcache")[1]["diagnostics"] == row["diagnostics"]


@pytest.mark.rest
def test_a_recorded_cell_is_replayed(command: Command, tmp_path: Path, capsys: Capture) -> None:
    assert command("method=quest", "diagnostics=trace", "budget=0.3", "method.page=8") == 0
    folder, row = only(tmp_path / "out", "quest")
    assert command("method=replay", f"method.trace='{folder / 'diagnostics'}'", "diagnostics=true") == 0
    _, again = only(tmp_path / "out", "replay")
    assert again["sample_scores"] == row["sample_scores"]
    assert again["attended_tokens"] == row["attended_tokens"]
    assert again["extra"]["attended_union"] == row["extra"]["attended_union"]
    for key in ("recall_q", "recall_kv", "mass", "mass_p5", "output_error"):
        assert again["diagnostics"][key] == pytest.approx(row["diagnostics"][key], abs=1e-6)
    capsys.readouterr()
    assert command("method=replay", f"method.trace='{folder / 'diagnostics'}'", "seed=7", out=tmp_path / "other") == 1
    assert "holds no trace of this prompt" in capsys.readouterr().err


@pytest.mark.rest
def test_figures(command: Command, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert command("-m", "method=full,oracle,quest", "budget=0.2,0.4", "diagnostics=true", "limit=1") == 0
    capsys.readouterr()
    diagnostic_figures.main([str(out), "--window", "3", "--layers", "1"])
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [f"{n}.png" for n in PICTURES]
    diagnostic_figures.main([str(out), "--only", "drift", "--budget", "0.2", "--methods", "quest", "--name", "own"])
    assert capsys.readouterr().out.strip() == str(out / "own.png")
    assert all((out / f"{name}.png").stat().st_size > 5000 for name in (*PICTURES, "own"))


def test_what_no_row_has_is_refused(command: Command, tmp_path: Path, capsys: Any) -> None:
    assert command("method=oracle", "diagnostics=true", "limit=1") == 0
    for words, line in (
        ("--window 2", "--window=2: allowed is an odd int"),
        ("--layers 9", "--layers 9: allowed is 0 to 1"),
        ("--ranks quest", "--ranks quest: no row of that method; there are oracle"),
        ("--methods quest", "no such row with diagnostics"),
    ):
        with pytest.raises(SystemExit):
            diagnostic_figures.main([str(tmp_path / "out"), *words.split()])
        assert line in capsys.readouterr().err


def test_maps_of_the_prompt_are_stored_and_drawn(command: Command, tmp_path: Path) -> None:
    line = ("method=full", "diagnostics=prompt", "limit=1")
    assert command(*line) == 0
    folder, row = only(tmp_path / "out", "full")
    (file,) = (folder / "diagnostics").glob(f"*{PROMPT_SUFFIX}")
    maps = load_file(file)
    assert maps.keys() == PROMPT_ARRAYS.keys()
    assert maps["keys"].shape[0] == maps["normalised"].shape[2] == row["prompt_tokens"]
    file.unlink()
    assert command(*line) == 0  # measured again
    assert file.exists()
