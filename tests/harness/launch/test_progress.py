"""The plan at the start of a run, and the total of its samples."""

import io
from pathlib import Path
from unittest.mock import Mock

import pytest

from pqcache.harness.launch import progress
from pqcache.harness.launch.progress import Total
from pqcache.harness.run.session import Session
from pqcache.harness.run.units import Progress
from tests.harness.cells import Capture, Command, Patch, planned


def test_samples_weigh_what_they_cost(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 60.0)
    words = "-m method=full,streaming task=pocket_qa task.length=512 limit=3 shared_prefill=false"
    made = planned(f"{words} out={tmp_path / 'out'} cache_dir={tmp_path}")
    now, stream = [0.0], io.StringIO()
    total = Total(stream, lambda: now[0])
    total.begin(made, Session())
    assert capsys.readouterr().out.startswith("plan: 2 cells, 6 samples; ")
    first, second = (cell.name for cell in made.cells)
    now[0] = 50.0
    total.sample(Progress(first, "t", 0, 100.0))  # most of it waiting for the model: that is no pace
    assert total.line() == "1/6 samples, 0/2 cells, 4 min left, score 100.0"
    now[0] = 80.0
    total.sample(Progress(first, "t", 1, 50.0))
    assert stream.getvalue() == "2/6 samples, 0/2 cells, 2 min left, score 75.0\n"
    total.sample(Progress(first, "t", 1, 50.0))  # reported twice
    now[0] = 116.0
    total.sample(Progress(second, "t", 0, None, tpot=12.34))
    total.sample(Progress("another", "t", 0, 0.0))
    assert total.line() == "3/6 samples, 0/2 cells, 2 min left, score 75.0, TPOT 12.3 ms"
    total.ended(second)  # it failed
    assert total.line() == "3/4 samples, 1/2 cells, 33 s left, score 75.0, TPOT 12.3 ms"
    total.end()


@pytest.mark.rest
def test_a_plan_that_fails_stops_nothing(command: Command, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(progress.planning, "make", Mock(side_effect=KeyError("x\ny")))
    assert command("method=full", "limit=1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == r"plan: not made (KeyError: 'x\ny')"
    assert not any(line.startswith("plan") for line in lines[1:])


def test_a_cell_that_does_not_apply_disturbs_no_other(command: Command, monkeypatch: Patch, capsys: Capture) -> None:
    """ZipCache has no codes of a tenth of 16 bits. Its cell ends first, and is none of those that the plan counts."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    assert command("-m", "method=zipcache,streaming", "budget=0.1") == 0
    said = capsys.readouterr()
    assert "skipped, not applicable" in said.out
    assert [line.partition(", score")[0] for line in said.err.splitlines() if "/3 samples" in line][-1] == (
        "3/3 samples, 1/1 cells, 0 s left"
    )
