"""What is handed to wandb, by a stand-in for the package; what is logged later; the sweep that docs/ shows."""

import itertools
import socket
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import yaml

import run
from pqcache.harness.config.cells import Cell
from pqcache.harness.config.options import Refused
from pqcache.harness.report.rows import read_row
from pqcache.harness.run import tracking
from tests.harness.cells import Capture, Patch, planned

SAMPLE = {
    "task": "t", "doc_id": 0, "score": 50.0, "prompt_end": "Where?", "target": ["x", "y"], "response": "z",
    "new_tokens": 3, "prompt_tokens": 9, "tt2t_s": 0.5, "prefill_s": 0.4,
}  # fmt: skip


@pytest.fixture
def wandb(monkeypatch: Patch) -> MagicMock:
    """Stands for the package."""
    # other packages look for wandb when they are imported, by its spec
    stand_in = MagicMock(__spec__=ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, "set again by the code")
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_SWEEP_ID", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    tracking.say_once.cache_clear()
    tracking._obstacle.cache_clear()
    return stand_in


def cell(tmp_path: Path, *words: str) -> Cell:
    (one,) = planned([f"out={tmp_path}", "method=oracle", *words]).cells
    return one


def track(one: Cell, mode: str = "offline", score: float = 50.0) -> bool:
    row: Any = {"model": "m", "task": "t", "diagnostics": None, "score": score}
    one.folder.mkdir(exist_ok=True, parents=True)
    (one.folder / "row.json").write_text(str(row))
    return tracking.track(one, row, [SAMPLE], mode)


def test_project_group_and_tags(tmp_path: Path, wandb: MagicMock, monkeypatch: Patch) -> None:
    def told(*keys: str) -> list[Any]:
        return [wandb.init.call_args.kwargs[key] for key in keys]

    plain = cell(tmp_path)
    track(plain)
    assert told("project", "group", "tags", "mode") == ["pqcache-lab", "m/t", None, "offline"]
    (first,) = told("id")
    monkeypatch.setenv("WANDB_PROJECT", "from-outside")
    track(plain, score=60.0)
    assert told("project", "id", "resume") == ["from-outside", first, "allow"]
    words = "wandb.project=mine wandb.group=g wandb_entity=me wandb.tags=[a,b] wandb=offline"
    typed = cell(tmp_path, *words.split())
    assert typed.name == plain.name  # no part of a cell
    track(typed, score=70.0)
    assert told("project", "group", "entity", "tags") == ["mine", "g", "me", ["a", "b"]]
    assert wandb.Table.call_args.kwargs["data"] == [["t", 0, 50.0, "Where?", "x, y", "z", 3, 0.5]]
    wandb.init().log.assert_called_with({"samples": wandb.Table()})


def test_each_finished_row_is_logged_once_with_its_pair(tmp_path: Path, wandb: MagicMock) -> None:
    words = "-m method=oracle,full task=pocket_qa task.length=512 limit=1 smoke=true".split()
    words += [f"out={tmp_path}", f"cache_dir={tmp_path / 'cache'}"]
    for runs in (2, 2, 3):
        assert run.main([*words, "wandb=offline"] if runs < 3 else [*words, "budget=0.3", "wandb=offline"]) == 0
        assert wandb.init.call_count == runs
    summaries = [call.args[0] for call in wandb.init().summary.update.call_args_list]
    rows = [read_row(path) for path in (tmp_path / "smoke").glob("*/row.json")]
    assert {summary["folder"]: summary["full_score"] for summary in summaries} == {
        row["folder"]: row["full_score"] for row in rows if row is not None
    }
    assert all(summary["full_score"] is not None for summary in summaries)


def test_without_a_network_one_line_and_no_wait(
    tmp_path: Path, wandb: MagicMock, monkeypatch: Patch, capsys: Capture
) -> None:
    connect = Mock(side_effect=OSError(111, "Connection refused"))
    monkeypatch.setattr(socket, "create_connection", connect)
    for name in ("method=oracle", "method=full"):
        assert not track(cell(tmp_path, name), "online")
    connect.assert_called_once_with(("api.wandb.ai", 443), tracking.PATIENCE_S)
    wandb.init.assert_not_called()
    (line,) = capsys.readouterr().err.splitlines()
    assert "api.wandb.ai cannot be reached" in line and "wandb=sync" in line
    assert not tracking.is_logged(cell(tmp_path).folder, "online")


@pytest.mark.rest
def test_sync_sends_what_is_on_disk(tmp_path: Path, wandb: MagicMock, monkeypatch: Patch, capsys: Capture) -> None:
    words = [f"out={tmp_path}", "task=pocket_qa", "task.length=512", "limit=1", f"cache_dir={tmp_path / 'cache'}"]
    assert run.main(["method=full", *words, "wandb=disabled"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(tracking, "_obstacle", lambda server: None)
    assert run.main(["-m", "method=full,oracle", *words, "wandb=sync"]) == 0
    assert "1 sent, 0 sent before, 0 not sent, 1 cells without a row" in capsys.readouterr().out
    assert [call.kwargs["mode"] for call in wandb.init.call_args_list] == ["online"]
    assert run.main(["method=full", *words, "wandb=online"]) == 0  # nothing new to send
    monkeypatch.setattr(tracking, "_obstacle", lambda server: "gone")
    assert run.main(["method=full", *words, "wandb=sync"]) == 0
    assert "0 sent, 1 sent before" in capsys.readouterr().out
    (tmp_path / cell(tmp_path, "method=full", *words).name / tracking.MARK).unlink()
    assert run.main(["method=full", *words, "wandb=sync"]) == 1
    assert wandb.init.call_count == 1


def test_the_environment_says_where_nothing_is_typed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert cell(tmp_path).run.wandb == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert cell(tmp_path).run.wandb == "disabled"
    assert cell(tmp_path, "wandb=online").run.wandb == "online"
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(Refused, match="WANDB_MODE=of .*: allowed is online, offline, disabled"):
        cell(tmp_path)


@pytest.mark.rest
def test_every_command_of_the_documented_sweep_composes(repo: Path, tmp_path: Path) -> None:
    sweep = yaml.safe_load((repo / "docs" / "wandb_sweep.yaml").read_text())
    assert sweep["program"] == "run.py" and sweep["method"] == "grid"
    assert sweep["command"][-1] == "${args_no_hyphens}"  # method=pqcache, as run.py reads it
    fixed = [word for word in sweep["command"] if "=" in word]
    grid = [[f"{key}={value}" for value in one["values"]] for key, one in sweep["parameters"].items()]
    for words in itertools.product(*grid):
        assert cell(tmp_path, *fixed, *words).run.wandb == "online"
