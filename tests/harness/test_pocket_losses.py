"""Losses by family beside the attention mass, through real runs on a tiny random model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from pqcache.harness.report import pocket_losses
from pqcache.harness.report.frame import group_rows
from pqcache.harness.report.pocket_losses import HEAD

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
    measured = pocket_losses.masses(mass)
    row = next(r for r in group_rows(mass) if r["method"] == "snapkv")
    assert len(measured) == 8 and measured.mass.between(0, 1).all()
    assert (measured["worst head"] <= measured.mass).all() and (measured.p5 <= measured.mass).all()
    assert measured.mass.min() <= row["diagnostics"]["mass"] <= measured.mass.max()
    rows = {r["method"]: r for r in group_rows(scores)}
    for loss in pocket_losses.losses(group_rows(scores)).to_dict("records"):
        own, full = (rows[method]["tasks"][f"pocket_{loss['family']}"]["score"] for method in ("snapkv", "full"))
        assert (loss["score"], loss["to Full"]) == (pytest.approx(own), pytest.approx(own - full))
        assert loss["lost"].endswith(" of 2")


def test_names_of_rows_are_text_in_the_table() -> None:
    lost = pd.DataFrame([("a|b", "<img src=x>", "[c](file:d)", 1.0, -1.0, "1 of 2", 0.5, None)], columns=HEAD[:8])
    mass = pd.DataFrame([], columns=["method", "budget", "family", *HEAD[8:]])
    line = pocket_losses.table(lost, mass).splitlines()[-1]
    assert line.startswith("| a\\|b | &lt;img src=x> | [c]\\(file:d) | ")


def test_folders_without_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        pocket_losses.main([str(tmp_path), str(tmp_path)])
    assert stopped.value.code == 2
    assert "run experiment=pocket with out=" in capsys.readouterr().err
