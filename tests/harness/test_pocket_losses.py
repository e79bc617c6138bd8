"""Losses by family beside the attention mass, through real runs on a tiny random model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pqcache.harness.report import pocket_losses
from pqcache.harness.report.groups import group_rows

RUN = ("-m", "method=full,snapkv", "budget=0.3", "task=pocket", "task.length=512", "limit=2")


@pytest.mark.rest
def test_table_and_picture(command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores, mass = tmp_path / "scores", tmp_path / "mass"
    assert command(*RUN, out=scores) == 0
    assert command(*(a.replace("full,", "") for a in RUN), "diagnostics=true", out=mass) == 0
    capsys.readouterr()
    pocket_losses.main([str(scores), str(mass)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8  # one method, eight families
    assert (scores / "losses.png").stat().st_size > 1000
    assert (scores / "losses.md").read_text().splitlines() == lines
    measured = pocket_losses.masses(mass)["snapkv", "0.3"]
    row = next(r for r in group_rows(mass) if r["method"] == "snapkv")
    assert len(measured) == 8
    assert all(0 < m.worst_head <= m.mean < 1 and m.p5 <= m.mean for m in measured.values())
    assert (
        min(m.mean for m in measured.values()) <= row["diagnostics"]["mass"] <= max(m.mean for m in measured.values())
    )
    lost = pocket_losses.losses(group_rows(scores))["snapkv", "0.3"]
    rows = {r["method"]: r for r in group_rows(scores)}
    for task, loss in lost.items():
        assert loss.score == pytest.approx(rows["snapkv"]["tasks"][task]["score"])
        gap = rows["snapkv"]["tasks"][task]["score"] - rows["full"]["tasks"][task]["score"]
        assert loss.difference == pytest.approx(gap) and loss.samples == 2


def test_names_of_rows_are_text_in_the_table() -> None:
    loss = pocket_losses.Loss(1.0, -1.0, 1, 2, 0.5, None)
    line = pocket_losses.table({("a|b", "<img src=x>"): {"pocket_[c](file:d)": loss}}, {}).splitlines()[-1]
    assert line.startswith("| a\\|b | &lt;img src=x> | [c]\\(file:d) | ")


def test_folders_without_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        pocket_losses.main([str(tmp_path), str(tmp_path)])
    assert stopped.value.code == 2
    assert "run experiment=pocket with out=" in capsys.readouterr().err
