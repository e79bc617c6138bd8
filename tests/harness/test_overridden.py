"""Cells whose hyper-parameters override the budget: refused with the command, or not applicable at the first sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.cells import Capture, Command, rows, status
from tests.harness.in_process import InProcess

NEEDLE = ("task=needle", "task.lengths=[256]", "task.depths=[0,50]", "limit=2")
PAGES = ("method=quest", "method.page=100000")


def test_one_length_is_refused_alone_and_skipped_in_a_sweep(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command("method=oracle", "method.n_sink=2000") == 2
    line = capsys.readouterr().err
    assert line == "error: method.n_sink=2000: takes 256 of a prompt's 256 tokens; budget=0.2 gives 76\n"
    assert not (tmp_path / "out").exists()
    assert command("-m", "method=oracle", "method.n_sink=8,2000", "limit=1") == 0
    assert "skipped, not applicable: method.n_sink=2000" in capsys.readouterr().out
    assert list(rows(tmp_path / "out")) == ["oracle 0.2"]
    assert len(generated) == 1


def test_other_tasks_decide_at_the_first_sample(
    command: Command, tmp_path: Path, generated: list[int], capsys: Capture
) -> None:
    assert command(*NEEDLE, *PAGES) == 2
    shown = capsys.readouterr().out
    assert "skipped, not applicable: method.page=100000: takes 2" in shown
    state = status(tmp_path / "out")["quest"]
    assert state["status"] == "not applicable"
    assert state["reason"].startswith("method.page=100000: takes ")
    assert command(*NEEDLE, "-m", "method=quest", "method.page=16,100000", "shared_prefill=true") == 0
    assert sorted(rows(tmp_path / "out")) == ["quest 0.2"]
    assert len(generated) == 2


def test_a_driver_gives_its_workers_no_such_cell(command: Command, tmp_path: Path, on: Any) -> None:
    engine = on(InProcess())
    assert command(*NEEDLE, *PAGES, "launch=ray") == 2
    assert status(tmp_path / "out")["quest"]["status"] == "not applicable" and not engine.units
