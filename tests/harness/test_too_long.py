"""One prompt longer than the model: its document is left out for every method, and row and tables say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pqcache.harness.report.rows import read_row
from pqcache.harness.run import units
from tests.harness.cells import Capture, Command, definition
from tests.harness.in_process import InProcess

SENTENCE = "The old man walked over the hill and found a lamp near the river. "


@pytest.fixture
def call(command: Command, own_definitions: None, tmp_path: Path) -> Command:
    """On tasks of five documents, the second of which is too long for a model of 100 tokens."""
    folder = tmp_path / "definitions"
    folder.mkdir()
    data = folder / "data.jsonl"
    sizes = [1, 40, 2, 1, 2]
    data.write_text("".join(json.dumps({"story": f"{i}: " + SENTENCE * n}) + "\n" for i, n in enumerate(sizes)))
    text = {
        "doc_to_text": "{{story}}",
        "doc_to_target": "one",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3},
    }
    choice = {"doc_to_text": "{{story}}", "doc_to_choice": ["one lamp", "two lamps"], "doc_to_target": 0}
    (folder / "text.yaml").write_text(definition("my_answers", data, "generate_until", ["exact_match"], **text))
    (folder / "choice.yaml").write_text(definition("my_choices", data, "multiple_choice", ["acc"], **choice))
    words = ("task=lm_eval", f"task.include={folder}", "limit=5")

    def call(*typed: str, out: str = "out", longest: int = 100) -> int:
        return command(*words, f"model.max_length={longest}", *typed, out=tmp_path / out)

    return call


def documents(out: Path) -> set[tuple[str, int]]:
    """(method, document) of every sample."""
    files = [(path.parent.name.split("__")[1], path) for path in out.glob("*/samples*.jsonl")]
    return {(method, json.loads(line)["doc_id"]) for method, path in files for line in path.open()}


@pytest.mark.parametrize(
    "how",
    [
        "shared_prefill=false",
        *(pytest.param(how, marks=pytest.mark.rest) for how in ("shared_prefill=true", "launch=ray")),
    ],
)
def test_answers(call: Command, tmp_path: Path, how: str, on: Any, monkeypatch: Any, capsys: Capture) -> None:
    monkeypatch.setattr(units, "OWN_PREFILLS", 1)
    sweep = ["-m", "method=full,snapkv", "budget=0.5", "task.name=my_answers", how]
    on(InProcess(2))
    assert call(*sweep) == 0
    assert "4 samples a cell (1 more too long, left out)" in capsys.readouterr().out
    assert documents(tmp_path / "out") == {(name, doc) for name in ("full", "snapkv") for doc in (0, 2, 3, 4)}
    for path in (tmp_path / "out").glob("*/row.json"):
        row = read_row(path)
        assert row is not None
        assert (row["n_samples"], row["n_skipped"], row["paired_samples"]) == (4, 1, 4)
        (scores,) = row["sample_scores"].values()
        assert {int(key.partition(":")[0]) for key in scores} == {0, 2, 3, 4}


@pytest.mark.rest
def test_log_likelihoods(call: Command, tmp_path: Path, capsys: Capture) -> None:
    assert call("method=full", "task.name=my_choices") == 0
    assert "4 samples (1 more too long, left out)" in capsys.readouterr().out
    assert documents(tmp_path / "out") == {("full", doc) for doc in (0, 2, 3, 4)}


@pytest.mark.rest
def test_a_task_of_which_nothing_is_left_fails_and_says_so(call: Command, tmp_path: Path, capsys: Capture) -> None:
    assert call("method=full", "task.name=my_answers", longest=9) == 1
    assert "all 5 samples are too long" in capsys.readouterr().err
