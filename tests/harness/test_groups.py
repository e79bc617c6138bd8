"""The table and the picture of a group of tasks, through a real run on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pqcache.harness import groups


def test_table_and_picture_of_a_pocket_run(
    command: Callable[..., int], tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["-m", "method=full,oracle", "budget=0.5", "task=pocket", "task.length=512", "limit=1"]
    assert command(*line) == 0
    capsys.readouterr()
    (folder,) = {path.parent.parent for path in tmp_path.rglob("row.json")}
    groups.main([str(folder)])
    head, rule, full, oracle, _, caption = capsys.readouterr().out.splitlines()
    assert " | qa | hop | decisions | labels | passages | count | chain | code | " in head
    assert full.startswith("| full | 1 |") and oracle.startswith("| oracle | 0.5 |")
    assert caption.startswith(f"{tiny}, pocket: ") and "Machine: " in caption
    assert (folder / "groups.png").stat().st_size > 1000 and (folder / "groups.md").exists()
    row = json.loads(next(folder.glob("*oracle*/row.json")).read_text())
    means = [task["score"] for task in row["tasks"].values()]
    assert len(means) == 8 and row["score"] == pytest.approx(sum(means) / 8)


def test_a_folder_without_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        groups.main([str(tmp_path)])
