"""Several cells in one command: sweeps and experiments, their tables, skipped and failed cells."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pqcache.harness.run import adapter as lm
from pqcache.harness.run import models
from pqcache.harness.tasks import Task
from tests.harness.cells import REPO, Capture, Command, Patch, planned, refused, rows, status, watch
from tests.harness.in_process import InProcess


def test_sweep_ends_with_one_table_and_full_runs_once(
    command: Command, tmp_path: Path, capsys: Capture, generated: list[int], monkeypatch: Any
) -> None:
    loads: list[int] = []
    watch(monkeypatch, models, "load", lambda *_: loads.append(1))
    watch(monkeypatch, Task, "load", lambda *_: loads.append(2))
    assert command("-m", "method=oracle,full,int8", "budget=0.1,0.2", "limit=2") == 0
    assert sorted(loads) == [1, 2]  # model and task once
    assert sorted(rows(tmp_path / "out")) == ["full 1.0", "int8 1.0", "oracle 0.1", "oracle 0.2"]
    assert len(generated) == 4 * 2
    shown = capsys.readouterr().out
    assert shown[shown.index("\nmethod") :].count("\nfull") in (1, 2)  # one table, or one of quality and one of cost
    for row in rows(tmp_path / "out").values():  # Full ran after Oracle, and is compared with all the same
        assert row["full_score"] is not None
        assert row["paired_difference"] == 0
        assert row["paired_interval"] == [0, 0]


def test_pairs_are_made_when_full_comes_later(command: Command, tmp_path: Path) -> None:
    assert command("method=oracle", "limit=2") == 0
    assert rows(tmp_path / "out")["oracle 0.2"]["full_score"] is None
    assert command("method=full", "limit=3") == 0
    assert rows(tmp_path / "out")["oracle 0.2"]["paired_samples"] == 2


@pytest.mark.parametrize("where", ["here", pytest.param("elsewhere", marks=pytest.mark.rest)])
def test_one_failed_cell_does_not_lose_the_others(
    command: Command, tmp_path: Path, on: Any, monkeypatch: Patch, capsys: Capture, where: str
) -> None:
    def fail(model: Any, method: Any, *_: Any, **__: Any) -> None:
        if method.name == "oracle" and method.budget.ratio == 0.1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine = on(InProcess(2))
    sweep = ["-m", "method=oracle,full", "budget=0.1,0.2", "limit=1", *(["launch=ray"] if where == "elsewhere" else [])]
    with monkeypatch.context() as patch:
        watch(patch, lm, "generate", fail)
        assert command(*sweep) == 1
    assert sorted(rows(tmp_path / "out")) == ["full 1.0", "oracle 0.2"]
    shown = capsys.readouterr()
    assert "failed: oracle 0.1" in shown.err and "out of memory" in shown.err
    failed = json.loads(next((tmp_path / "out").glob("*oracle__0.1*/status.json")).read_text())
    assert failed["status"] == "failed" and "CUDA out of memory" in failed["reason"]
    assert "in fail" in failed["traceback"]
    assert len(engine.results) == len(engine.units)  # not retried
    assert "failed" in shown.out.split("budget 0.1")[-1]
    assert command(*sweep) == 0  # and it is made good by a rerun


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A copy of configs/ with the experiments that a test writes."""
    folder = tmp_path / "configs"
    experiment = str(REPO / "configs" / "experiment")
    shutil.copytree(REPO / "configs", folder, ignore=lambda where, names: names if where == experiment else [])
    monkeypatch.setattr("pqcache.harness.command.CONFIGS", folder)
    return folder / "experiment"


@pytest.mark.rest
def test_cells_by_name_and_the_best_of_them(
    command: Command, experiments: Path, tmp_path: Path, capsys: Capture
) -> None:
    text = (
        "# python run.py experiment=picked\n"
        "cells:\n"
        "  everything: {method: full}\n"
        "  few: [method=oracle, budget=0.1, method.n_sink=4]\n"
        "  many: {method: quest, budget: 0.1}\n"
        "best_of:\n  either: [few, many]\n"
        "hydra:\n  mode: MULTIRUN\n"
    )
    (experiments / "picked.yaml").write_text(text)
    assert command("experiment=picked", "limit=1") == 0
    made = rows(tmp_path / "out")
    assert sorted(made) == ["full 1.0", "oracle 0.1", "quest 0.1"]
    assert made["oracle 0.1"]["hyper_parameters"]["n_sink"] == 4
    lines = capsys.readouterr().out.splitlines()
    for name in ("everything", "few", "many"):
        assert any(line.startswith(name) for line in lines)
    (line,) = [line for line in lines if line.startswith("either: ")]
    few, many = made["oracle 0.1"]["score"], made["quest 0.1"]["score"]
    assert few is not None and many is not None and line.startswith(f"either: {max(few, many):.1f} (")
    assert f"best of 2, chosen on these samples: few {few:.1f}, many {many:.1f})" in line
    shutil.rmtree(tmp_path / "out")
    assert command("experiment=picked", "cell=few,many", "limit=1") == 0
    assert sorted(rows(tmp_path / "out")) == ["oracle 0.1", "quest 0.1"]
    assert command("experiment=picked", "cell=fwe") == 2
    assert "did you mean few?" in capsys.readouterr().err
    (experiments / "picked.yaml").write_text(text.replace("[few, many]", "[few, mny]"))
    assert command("experiment=picked", "limit=1") == 2
    assert "best_of.either=mny: unknown cell; did you mean many?" in capsys.readouterr().err


def test_a_wrong_value_in_an_experiment_refuses_it_whole(
    command: Command, experiments: Path, tmp_path: Path, capsys: Capture
) -> None:
    (experiments / "wrong.yaml").write_text(
        "# python run.py experiment=wrong\ncells:\n  a: {method: full}\n  b: {method: oracle, budget: 7}\n"
        "hydra:\n  mode: MULTIRUN\n"
    )
    assert command("experiment=wrong") == 2
    assert re.search(r"budget=7.*\(in cell b\)", capsys.readouterr().err)
    assert command("experiment=wrong", "budget=0.2", "seed=-1") == 2  # in all of its cells
    assert "in cell" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_line_wins_over_the_experiment_and_scale_paper_sets_what_it_lists(experiments: Path) -> None:
    (experiments / "two_sizes.yaml").write_text(
        "# python run.py experiment=two_sizes\n"
        "defaults:\n  - override /task: pocket_qa\n"
        "paper_scale: {task.length: '1024,4096', budget: 0.1}\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {task.length: 512}\n"
    )

    def points(*argv: str) -> set[tuple[int, float]]:
        cells = planned(["experiment=two_sizes", *argv], experiments.parent).cells
        return {(cell.identity["task"]["length"], cell.identity["budget"]) for cell in cells}

    assert points() == {(512, 0.2)} and points("task.length=600") == {(600, 0.2)}
    assert points("scale=paper") == {(1024, 0.1), (4096, 0.1)}
    assert points("scale=paper", "budget=0.5") == {(1024, 0.5), (4096, 0.5)}
    for line, said in (
        ("scale=paper", "scale=paper: only an experiment with"),
        ("-m experiment=two_sizes scale=machine,paper", "scale: one at a time"),
    ):
        assert refused(line, experiments.parent)[0].startswith(said)


# -- cells whose hyper-parameters override the budget: refused with the command, or not applicable at the first sample -


NEEDLE = ("task=needle", "task.lengths=[256]", "task.depths=[0,50]", "limit=2")
PAGES = ("method=quest", "method.page=100000")


@pytest.mark.rest
def test_other_tasks_decide_at_the_first_sample(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture, on: Any
) -> None:
    engine = on(InProcess())
    assert command(*NEEDLE, *PAGES, "launch=ray") == 2 and not engine.units  # a driver gives its workers no such cell
    assert command(*NEEDLE, *PAGES) == 2
    shown = capsys.readouterr().out
    assert "skipped, not applicable: method.page=100000: takes 2" in shown
    state = status(tmp_path / "out")["quest"]
    assert state["status"] == "not applicable"
    assert state["reason"].startswith("method.page=100000: takes ")
    assert command(*NEEDLE, "-m", "method=quest", "method.page=16,100000", "shared_prefill=true") == 0
    assert sorted(rows(tmp_path / "out")) == ["quest 0.2"]
    assert len(generated) == 2
