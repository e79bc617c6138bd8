"""Everything a user can type wrong: one clear line each, exit code 2, nothing loaded, nothing written."""

import os
from pathlib import Path

import pytest

import run
from pqcache.harness.run import models
from pqcache.outside import read_yaml
from tests.harness.cells import REPO, Capture, Patch
from tests.thin import thin

BAD = read_yaml(Path(__file__).with_name("bad_input.yaml"))
ONE_LINE: dict[str, list[str]] = {words.replace("{repo}", str(REPO)): parts for words, parts in BAD.items()}


@pytest.fixture(autouse=True)
def nothing_is_loaded(no_model: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(models, "load_config", models.load)


@pytest.mark.parametrize("line", thin(ONE_LINE, 2))
def test_one_clear_line(line: str, capsys: Capture, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(line.split()) == 2
    shown = capsys.readouterr()
    errors = shown.err.splitlines()
    expected = ONE_LINE[line]
    assert shown.out == ""
    assert any(all(part in error for part in expected) for error in errors), shown.err
    assert len(errors) == 1, shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_to_itself(tmp_path: Path, capsys: Capture) -> None:
    os.symlink(tmp_path / "a", tmp_path / "a")
    assert run.main([f"out={tmp_path / 'a' / 'b'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_all_errors_at_once(capsys: Capture) -> None:
    typed = "method=oracle buget=1 budget=7 seed=x limit=-2 method.n_sink=q method.store=hots task.lenght=3 wandb=of"
    assert run.main(typed.split()) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 8
    parts = ("buget", "budget=7", "seed=x", "limit=-2", "method.n_sink=q", "method.store=hots", "task.lenght", "wandb")
    assert all(part in errors for part in parts), errors
