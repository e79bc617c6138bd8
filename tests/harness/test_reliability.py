"""Damaged, foreign and contradictory files: one line each, the rest runs, and nothing wrong is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pqcache.outside import DIGEST, sealed, unsealed
from tests.harness.cells import ONE_THREAD, REPO, Capture, Command, rows


def test_damaged_rows_and_lines_are_made_again(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("method=full", "limit=2") == 0
    (path,) = (tmp_path / "out").glob("*/row.json")
    whole = json.loads(path.read_text())
    older = {key: value for key, value in whole.items() if key != DIGEST}
    other = {"resident_bytes": {"device": 1.0}, "extra": {"batch": "many"}, "versions": {}, "score_interval": None}
    other["score"] = 1.0
    for key, value in other.items():
        path.write_text(json.dumps({**older, key: value}))
        assert command("method=full", "limit=2") == 0
        assert json.loads(path.read_text()) == whole, key
    log = path.parent / "samples.jsonl"
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    log.write_text("\n".join([json.dumps(first), "{", json.dumps({**second, "prompt_tokens": 900})]) + "\n")
    assert len(generated) == 2 and command("method=full", "limit=2") == 0
    assert len(generated) == 3 and f"{log}: 2 lines are no samples" in capsys.readouterr().err
    foreign = sealed({**unsealed(second), "fingerprint": "0" * 16})
    log.write_text("\n".join([json.dumps(first), json.dumps(foreign)]) + "\n")
    assert command("method=full", "limit=2") == 0 and len(generated) == 4  # a line of another prompt


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


@pytest.mark.rest
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


@pytest.mark.rest
def test_contradictory_lines_are_made_again_once(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("method=full", "limit=2") == 0
    path = next((tmp_path / "out").glob("*/samples.jsonl"))
    first, second = (unsealed(json.loads(line)) for line in path.read_text().splitlines())
    slower = {**first, "tt2t_s": 9.0, "prefill_s": 8.0, "step_s": [1.0], "device": "another"}
    other = {**second, "score": 100.0 - second["score"], "response": "x"}
    path.write_text("".join(json.dumps(line) + "\n" for line in map(sealed, (first, second, slower, other))))
    capsys.readouterr()
    for _ in range(2):
        assert command("method=full", "limit=2") == 0
        assert len(generated) == 3
    assert capsys.readouterr().err.count("contradict each other") == 1
    assert json.loads(path.read_text().splitlines()[-1])["score"] == second["score"]


def test_older_lines_are_used_and_counted(command: Command, tmp_path: Path, generated: list[int]) -> None:
    assert command("method=full", "limit=2") == 0
    path = next((tmp_path / "out").glob("*/samples.jsonl"))
    lines = [unsealed(json.loads(line)) for line in path.read_text().splitlines()]
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
