"""Runs in units: sharded, resumed and unsharded runs give the same rows; failed cells and lost workers lose nothing else."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import run
from pqcache.harness.config import environment
from pqcache.harness.run.samples import claim
from pqcache.harness.run.units import Job, Unit
from tests.harness.cells import Capture, Command, Patch, rows
from tests.harness.in_process import InProcess
from tests.harness.same_rows import results

SWEEP = ("-m", "method=full,oracle,pqcache,snapkv,zipcache,infllm", "budget=0.25", "limit=8")


@pytest.mark.rest
def test_sharded_resumed_and_plain_runs_give_the_same_rows(command: Command, tmp_path: Path, on: Any) -> None:
    assert command(*SWEEP, "shared_prefill=false", out=tmp_path / "plain") == 0
    engine = on(InProcess(2))
    assert command(*SWEEP, "launch=ray", out=tmp_path / "sharded") == 0
    assert [(u.first, u.stop, u.timed) for u in engine.units] == [
        (5, 6, False),
        (6, 7, False),
        (7, 8, False),
        (0, 5, True),
    ]
    assert engine.units[0].cells[0].split("__")[1] == "full"
    # one shared prefill and InfLLM's own for each of three prompts, then five of each cell
    assert sum(r.shared + r.own for r in engine.results) == 3 * 2 + 5 * 6
    on(InProcess(2, most=2))
    assert command(*SWEEP, "launch=ray", out=tmp_path / "resumed") == 0  # pending
    assert not rows(tmp_path / "resumed")
    assert command(*SWEEP, "shared_prefill=true", out=tmp_path / "resumed") == 0
    plain = rows(tmp_path / "plain")
    assert len(plain) == 6
    for other in ("sharded", "resumed"):
        assert results(tmp_path / "plain") == results(tmp_path / other)
    sharded = rows(tmp_path / "sharded")
    assert all(row["timed_samples"] == 5 and row["timed_alone"] and row["tt2t_s"] for row in sharded.values())
    files = list((tmp_path / "sharded").glob("*/samples*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.open()]
    assert len(lines) == 6 * 8  # no sample twice
    assert not list((tmp_path / "sharded").glob("*/samples.jsonl"))


@pytest.mark.rest
def test_another_drivers_cell_is_named_and_left_alone(
    command: Command, tmp_path: Path, on: Any, capsys: Capture
) -> None:
    on(InProcess(2))
    assert command("method=full", "limit=1", "launch=ray") == 0
    folder = next(path.parent for path in (tmp_path / "out").glob("*/row.json"))
    with claim(folder):
        assert command("-m", "method=full,oracle", "limit=1", "launch=ray") == 1
    assert f"process {os.getpid()} on " in capsys.readouterr().err
    assert rows(tmp_path / "out").keys() == {"full 1.0", "oracle 0.2"}


def test_a_worker_with_other_code_versions_or_folders_refuses(
    command: Command, tmp_path: Path, on: Any, monkeypatch: Patch, capsys: Capture
) -> None:
    jobs: list[Job] = []

    class Keeping(InProcess):
        def run(self, job: Job, units: Sequence[Unit], report: Any, *, alone: bool) -> None:
            jobs.append(job)
            with monkeypatch.context() as patch:
                patch.setattr(environment, "git_commit", lambda: "other")
                super().run(job, units, report, alone=alone)

    monkeypatch.setattr(environment, "git_commit", lambda: "c-dirty.0123456789")
    on(Keeping())
    assert command("method=full", "limit=1", "launch=ray") == 1
    assert "commit other, but the driver has c-dirty.0123456789" in capsys.readouterr().err
    (one,) = jobs
    assert one.differences() == []
    monkeypatch.setattr(environment, "versions", lambda: {**one.versions, "torch": "1"})
    Path(one.token[0]).unlink()
    lines = "\n".join(one.differences())
    assert "torch 1, but the driver has" in lines and "does not see the driver's folder" in lines


@pytest.mark.rest
def test_latency_runs_on_an_engine_by_itself(tmp_path: Path, on: Any) -> None:
    """Its worker writes the row; every round is reported once, and a second run measures nothing."""
    words = ["-m", "model=random", "model.geometry=tiny", "task=latency", "task.length=150", "task.rounds=2"]
    words += ["task.new_tokens=4", "method=full,streaming", "wandb=disabled", f"out={tmp_path}", "launch=ray"]
    engine = on(InProcess(2))
    assert run.main(words) == 0
    assert [(unit.whole, unit.timed, len(unit.cells)) for unit in engine.units] == [(True, True, 1)] * 2
    found = rows(tmp_path)
    assert all(row["n_samples"] == 2 and row["timed_alone"] and row["tpot_p50_ms"] for row in found.values())
    assert len(found) == 2
    before = {path: path.read_bytes() for path in tmp_path.glob("*/row.json")}
    assert run.main(words) == 0
    assert {path: path.read_bytes() for path in tmp_path.glob("*/row.json")} == before
