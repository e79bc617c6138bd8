"""What is handed to wandb, by a stand-in for the package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import run
from pqcache.harness.config.cells import Cell, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.options import Refused
from pqcache.harness.run import tracking

SAMPLE = {
    "task": "t", "doc_id": 0, "score": 50.0, "prompt_end": "Where?", "target": ["x", "y"], "response": "z",
    "new_tokens": 3, "prompt_tokens": 9, "tt2t_s": 0.5, "prefill_s": 0.4,
}  # fmt: skip


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `wandb.init` was given, and `points`: what was logged."""
    seen: dict[str, Any] = {"points": []}
    started = SimpleNamespace(
        log=lambda point, step=None: seen["points"].append(point), summary={}, finish=lambda exit_code: None
    )

    def init(**given: Any) -> Any:
        seen.update(given)
        return started

    stand_in = SimpleNamespace(Settings=lambda **given: given, init=init, Table=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, "set again by the code")
    return seen


def cell(tmp_path: Path, *words: str) -> Cell:
    (one,) = make_plan(compose_all([f"out={tmp_path}", "method=oracle", *words], run.CONFIGS)).cells
    return one


def track(one: Cell) -> None:
    row: Any = {"model": "m", "task": "t", "diagnostics": None, "score": 50.0}
    tracking.track(one, row, [SAMPLE], "offline")


def test_project_group_and_tags(tmp_path: Path, logged: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cell(tmp_path)
    track(plain)
    assert (logged["project"], logged["group"], logged["tags"], logged["mode"]) == (
        "pqcache-lab",
        "m/t",
        None,
        "offline",
    )
    first = logged["id"]
    monkeypatch.setenv("WANDB_PROJECT", "from-outside")
    track(plain)
    assert (logged["project"], logged["id"], logged["resume"]) == ("from-outside", first, "allow")
    typed = cell(
        tmp_path, "wandb.project=mine", "wandb.group=g", "wandb_entity=me", "wandb.tags=[a,b]", "wandb=offline"
    )
    assert typed.name == plain.name  # no part of a cell
    track(typed)
    assert (logged["project"], logged["group"], logged["entity"], logged["tags"]) == ("mine", "g", "me", ["a", "b"])
    (table,) = [point["samples"] for point in logged["points"][-1:]]
    assert table["data"] == [["t", 0, 50.0, "Where?", "x, y", "z", 3, 0.5]]


def test_an_unknown_key_of_wandb(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="did you mean wandb_project"):
        cell(tmp_path, "wandb.projct=mine")
