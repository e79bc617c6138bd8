"""The table and the picture of a group of tasks, through a real run on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report import groups


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


def _row(method: str, folder: str, budget: float, score: float, length: int = 512, **hyper: int) -> dict[str, Any]:
    return {
        "method": method, "folder": folder, "budget_ratio": budget, "budget_tokens": 9, "budget_applied": budget, "score": score,
        "score_interval": [score - 1, score + 1], "hyper_parameters": hyper, "task_options": {"length": length}, "model": "m",
        "task": "pocket", "prompt_tokens": length, "tasks": {"a": {}, "b": {}},
    }  # fmt: skip


def test_rows_are_named_by_what_differs_and_sorted_by_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        _row("pqcache", f"x__pqcache__method.max_iter={t}__y" if t != 5 else "x__pqcache__y", 0.1, t, max_iter=t, m=2)
        for t in (25, 5, 10)
    ]
    rows += [_row("full", "x__full__y", 1.0, 90, 512), _row("full", "x__full__z", 1.0, 90, 1024)]
    monkeypatch.setattr(groups, "rows_under", lambda folder: rows)
    assert groups.labels(groups.group_rows(tmp_path)) == [
        "full 512 tokens",
        "full 1024 tokens",
        "pqcache max_iter=5 512 tokens",
        "pqcache max_iter=10 512 tokens",
        "pqcache max_iter=25 512 tokens",
    ]


@pytest.mark.parametrize("budgets", [(0.1,), (0.1, 0.2)])
def test_pictures_of_one_budget_and_of_several(tmp_path: Path, budgets: tuple[float, ...]) -> None:
    rows: list[Any] = [_row("oracle", f"o{b}", b, 80) for b in budgets] + [_row("full", "f", 1.0, 90)]
    assert groups.picture(rows, tmp_path / "a.png") and (tmp_path / "a.png").stat().st_size > 1000
    assert groups.picture(rows[-1:], tmp_path / "b.png") is None
    with pytest.raises(SystemExit):
        groups.main([str(tmp_path)])
