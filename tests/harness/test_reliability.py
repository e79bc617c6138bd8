"""Damaged, foreign and contradictory files: one line each, the rest runs, and nothing wrong is used."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report.rows import damage, read_row
from tests.harness.cells import ONE_THREAD, REPO, Capture, Command, rows

# name -> how a row's text is damaged; each is left out with one line
ROWS: dict[str, Any] = {
    "a score": lambda row: {**row, "score": 999.0},
    "a score that is not the mean": lambda row: {**row, "score": row["score"] + 1 if row["score"] < 50 else 1.0},
    "the number of samples": lambda row: {**row, "n_samples": 1_000_000},
    "a missing key": lambda row: {key: value for key, value in row.items() if key != "tasks"},
    "a type": lambda row: {**row, "prompt_tokens": "many"},
    "a nested type": lambda row: {**row, "resident_bytes": {"device": [1]}},
    "a sample's score": lambda row: {**row, "sample_scores": {"needle_pocket": {"0:a": -1}}},
    "true for a number": lambda row: {**row, "seed": True},
    "a list": lambda row: [row],
    "deep nesting": lambda row: "[" * 100_000,
    "no JSON": lambda row: "{",
    "no UTF-8": lambda row: b"\xff\xfe",
}


def damaged(path: Path, change: Any) -> None:
    made = change(json.loads(path.read_text()))
    path.write_bytes(
        made if isinstance(made, bytes) else (made if isinstance(made, str) else json.dumps(made)).encode()
    )


def test_a_damaged_row_is_one_line_and_is_made_again(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("method=full", "limit=2") == 0
    path = next((tmp_path / "out").glob("*/row.json"))
    whole = path.read_text()
    for name, change in ROWS.items():
        path.write_text(whole)
        damaged(path, change)
        foreign = tmp_path / name / "row.json"
        foreign.parent.mkdir()
        foreign.write_bytes(path.read_bytes())
        capsys.readouterr()
        assert read_row(foreign) is None, name
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(foreign) in said, name
    assert damage(json.loads(whole)) is None
    wide = {**json.loads(whole), "task": "lm_eval:wmt16", "score": 2700.0, "sample_scores": {"wmt16": {"0:a": 2700.0}}}
    assert damage({**wide, "n_samples": 1}) is None  # another metric's range
    for name in ("a score", "the number of samples", "no UTF-8"):
        path.write_text(whole)
        damaged(path, ROWS[name])
        assert command("method=full", "limit=2") == 0
        assert json.loads(path.read_text()) == json.loads(whole), name
    assert len(generated) == 2


BAD_LINES = ['{"task": [1]}', "[" * 50_000, "null", '"a"', "\ufffd", "{"]


def test_a_damaged_line_is_one_line_and_is_made_again(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("method=full", "limit=2") == 0
    path = next((tmp_path / "out").glob("*/samples.jsonl"))
    first, second = path.read_text().splitlines()
    listed = json.dumps({**json.loads(second), "doc_id": [1]})
    path.write_text("\n".join([*BAD_LINES, first, listed]) + "\n")
    capsys.readouterr()
    assert command("method=full", "limit=2") == 0
    assert f"{path}: {len(BAD_LINES) + 1} lines are no samples" in capsys.readouterr().err
    assert len(generated) == 3


@pytest.mark.rest
def test_an_unreadable_configuration_costs_no_other_cell(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("-m", "method=full,oracle", "limit=1", "shared_prefill=false") == 0
    for number, text in enumerate((b"\xff\xfe", b"{" * 5000)):
        path = next((tmp_path / "out").glob("*oracle*/config.yaml"))
        path.write_bytes(text)
        capsys.readouterr()
        assert command("-m", "method=full,oracle", "limit=1", "shared_prefill=false") == 0, number
        said = capsys.readouterr().err
        assert said.count(str(path)) == 1
        assert (path.parent / "config.yaml.set-aside").read_bytes() == text
    assert len(generated) == 2  # its samples name their configuration


def test_samples_of_another_method_are_not_used(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("-m", "method=full,streaming", "limit=2", "shared_prefill=false") == 0
    full, streaming = (next((tmp_path / "out").glob(f"*__{name}__*/samples.jsonl")) for name in ("full", "streaming"))
    own = rows(tmp_path / "out")["streaming 0.2"]["sample_scores"]
    streaming.write_bytes(full.read_bytes())
    capsys.readouterr()
    assert command("-m", "method=full,streaming", "limit=2", "shared_prefill=false") == 0
    assert f"{streaming}: 2 samples are of another configuration" in capsys.readouterr().err
    assert len(generated) == 6
    assert rows(tmp_path / "out")["streaming 0.2"]["sample_scores"] == own


def test_contradictory_lines_are_made_again_once(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("method=full", "limit=2") == 0
    path = next((tmp_path / "out").glob("*/samples.jsonl"))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    slower = {**first, "tt2t_s": 9.0, "prefill_s": 8.0, "step_s": [1.0], "device": "another"}
    other = {**second, "score": 100.0 - second["score"], "response": "x"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, second, slower, other)))
    capsys.readouterr()
    for _ in range(2):
        assert command("method=full", "limit=2") == 0
        assert len(generated) == 3
    assert capsys.readouterr().err.count("contradict each other") == 1
    assert json.loads(path.read_text().splitlines()[-1])["score"] == second["score"]


def test_older_lines_are_used_and_counted(command: Command, tmp_path: Path, generated: list[int]) -> None:
    assert command("method=full", "limit=2") == 0
    path = next((tmp_path / "out").glob("*/samples.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["cell"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command("method=full", "limit=3") == 0
    assert len(generated) == 3
    assert rows(tmp_path / "out")["full 1.0"]["unverified_samples"] == 2
    path.with_name("config.yaml").unlink()
    assert command("method=full", "limit=3") == 0
    assert len(generated) == 6
    assert rows(tmp_path / "out")["full 1.0"]["unverified_samples"] == 0
    assert path.with_name("samples.jsonl.set-aside").exists()


@pytest.mark.rest
def test_a_closed_pipe_loses_no_row(tiny: Path, tmp_path: Path) -> None:
    words = ["-m", "method=full,streaming", "model=hf", f"model.path={tiny}", "task.length=256", "limit=1"]
    words += [f"out={tmp_path / 'out'}", "wandb=disabled", f"cache_dir={tmp_path / 'cache'}"]
    command = [sys.executable, str(REPO / "run.py"), *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=ONE_THREAD, cwd=REPO, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "error: standard output cannot be written (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "out").glob("*/row.json"))) == 2
