"""Runs that go on after an end, a kill or another limit: finished samples are used again, others never."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import run
from baselines.double_sparsity import DoubleSparsity
from pqcache.harness.config import environment
from pqcache.harness.run import adapter as lm
from tests.harness.cells import ONE_THREAD, REPO, Capture, Command, Patch, lines_of, rows, status, watch


def test_rerun_skips_finished_samples_and_larger_limit_extends(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("method=oracle", "limit=2") == 0
    first = rows(tmp_path / "out")["oracle 0.2"]
    assert command("method=oracle", "limit=2") == 0
    assert len(generated) == 2
    assert rows(tmp_path / "out")["oracle 0.2"] == first  # times included: they come from the samples
    assert command("method=oracle", "limit=5") == 0
    assert len(generated) == 5
    row = rows(tmp_path / "out")["oracle 0.2"]
    assert row["n_samples"] == 5
    old, new = first["sample_scores"]["needle_pocket"], row["sample_scores"]["needle_pocket"]
    assert old.items() <= new.items()
    path = next((tmp_path / "out").glob("*/row.json"))
    before = path.read_bytes(), path.stat().st_mtime_ns
    capsys.readouterr()
    assert command("method=oracle", "limit=3") == 0  # prints its figures and leaves the row
    shown = capsys.readouterr().out
    assert "3 samples" in shown and "row.json keeps" in shown
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before and len(generated) == 5
    assert status(tmp_path / "out")["oracle"]["n_samples"] == 5


@pytest.mark.rest
def test_only_cells_that_lack_an_answer_calibrate(command: Command, monkeypatch: Patch) -> None:
    made: list[DoubleSparsity] = []
    watch(monkeypatch, DoubleSparsity, "prepare", lambda self, model, text, _: text is not None and made.append(self))
    assert command("method=double_sparsity", "budget=0.2", "limit=1") == 0
    assert command("-m", "method=double_sparsity", "budget=0.1,0.2", "limit=1") == 0
    assert list(dict.fromkeys(one.budget.ratio for one in made)) == [0.2, 0.1]
    assert sum(one.budget.ratio == 0.2 for one in made) == 1


@pytest.mark.rest
def test_a_resumed_row_states_what_was_measured(
    command: Command, tmp_path: Path, monkeypatch: Any, generated: list[int]
) -> None:
    assert command("method=full", "limit=1") == 0
    path = next((tmp_path / "out").glob("*/row.json"))
    before = path.read_bytes(), path.stat().st_mtime_ns
    first = rows(tmp_path / "out")["full 1.0"]
    elsewhere = {"device": "another machine", "git_commit": "another commit", "versions": first["versions"]}
    monkeypatch.setattr(environment, "facts", lambda *_: elsewhere)
    assert command("method=full", "limit=1") == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert command("method=full", "limit=2") == 0
    row = rows(tmp_path / "out")["full 1.0"]
    assert row["device"] == f"{first['device']} / another machine"
    assert row["git_commit"] == " / ".join(filter(None, [first["git_commit"], "another commit"]))
    assert row["versions"] == first["versions"]
    assert len(generated) == 2


def test_fresh_does_a_cell_again_and_keeps_the_old_files(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("method=oracle", "limit=2") == 0
    (folder,) = (tmp_path / "out").glob("*oracle*")
    old = (folder / "samples.jsonl").read_bytes()
    for number in (1, 2):
        assert command("method=oracle", "limit=2", "fresh=true") == 0
        assert len(generated) == 2 + 2 * number
        assert f"the old files are kept as *.replaced-{number}" in capsys.readouterr().out
    assert (folder / "samples.jsonl.replaced-1").read_bytes() == old
    assert (folder / "row.json.replaced-2").exists() and list(rows(tmp_path / "out")) == ["oracle 0.2"]


@pytest.mark.rest
def test_other_weights_under_the_same_path_are_computed_again(
    command: Command, tiny: Path, tmp_path: Path, generated: list[int]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    for _ in range(2):
        assert command("method=full", f"model.path={copy}", "limit=1") == 0
    assert len(generated) == 1
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert command("method=full", f"model.path={copy}", "limit=1") == 0
    assert len(generated) == 1  # the same content
    for count, name in enumerate(("model.safetensors", "config.json", "generation_config.json"), 2):
        path = copy / name
        facts, data = path.stat(), path.read_bytes()
        path.write_bytes(data.replace(b"1e-06", b"1e-05") if name == "config.json" else data[:-1] + b" ")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        assert path.stat().st_size == facts.st_size
        assert command("method=full", f"model.path={copy}", "limit=1") == 0
        assert len(generated) == count, name


def test_interrupt_leaves_a_cell_that_goes_on(
    command: Command, tmp_path: Path, monkeypatch: Patch, generated: list[int]
) -> None:
    with monkeypatch.context() as patch:
        watch(patch, lm, "generate", Mock(side_effect=[None, None, KeyboardInterrupt]))
        assert command("method=full") == 130
    assert status(tmp_path / "out")["full"]["status"] == "interrupted"
    assert command("method=full") == 0
    assert len(generated) == 3


@pytest.mark.rest
def test_kill_9_in_the_middle_of_a_run(tmp_path: Path, tiny: Path) -> None:
    """A real process, really killed; the rerun gives the undisturbed run's answers and keeps every finished sample."""
    arguments = ["method=oracle", "budget=0.2", "model=hf", f"model.path={tiny}", "task.length=768", "limit=8"]

    typed = [sys.executable, str(REPO / "run.py"), *arguments, f"out={tmp_path / 'killed'}", "wandb=disabled"]
    disturbed = subprocess.Popen(typed, cwd=tmp_path, env=ONE_THREAD, stdout=-1, stderr=-1, text=True)
    log = None
    try:
        for _ in range(12_000):
            log = next(iter((tmp_path / "killed").glob("*/samples.jsonl")), None)
            if log is not None and log.read_bytes().count(b"\n") >= 2:
                break
            assert disturbed.poll() is None, disturbed.communicate()
            time.sleep(0.01)
    finally:
        disturbed.send_signal(signal.SIGKILL)
        disturbed.wait()
    assert log is not None
    before = log.read_bytes()
    finished = before[: before.rfind(b"\n") + 1]
    assert 2 <= finished.count(b"\n") < 8
    log.write_bytes(finished + b'{"task": "needle_pocket", "doc_id": 6, "respon')  # killed while writing
    assert json.loads((log.parent / "status.json").read_text())["status"] == "running"

    for out in ("killed", "whole"):
        assert run.main([*arguments, f"out={tmp_path / out}", "wandb=disabled"]) == 0
    assert log.read_bytes().startswith(finished)  # not recomputed: those bytes, times included, are still there
    assert log.read_bytes().count(b"\n") == 8
    killed, whole = (next(iter(rows(tmp_path / out).values())) for out in ("killed", "whole"))
    assert killed["sample_scores"] == whole["sample_scores"]
    answers = [{s["doc_id"]: s["response"] for s in lines_of(tmp_path / out)} for out in ("killed", "whole")]
    assert answers[0] == answers[1]
    assert len(set(answers[0].values())) > 4  # the random model does say different things
