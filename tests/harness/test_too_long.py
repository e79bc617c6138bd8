"""One prompt longer than the model: its document is left out for every method, and row and tables say so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import run
from pqcache.harness.report.rows import read_row
from pqcache.harness.run import runner, units
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.tasks import any_lm_eval
from tests.harness.in_process import InProcess

TEXT = """\
task: my_answers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{story}}}}"
doc_to_target: "one"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 3
metric_list:
  - metric: exact_match
metadata:
  version: 1.0
"""
CHOICE = """\
task: my_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{story}}}}"
doc_to_choice: ["one lamp", "two lamps"]
doc_to_target: 0
metric_list:
  - metric: acc
metadata:
  version: 1.0
"""
SENTENCE = "The old man walked over the hill and found a lamp near the river. "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tasks of five documents. The second one is too long for a model of 100 tokens."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(
        any_lm_eval, "manager", lambda include: TaskManager(include_path=include, include_defaults=False)
    )
    folder = tmp_path / "definitions"
    folder.mkdir()
    data = folder / "data.jsonl"
    sizes = [1, 40, 2, 1, 2]
    data.write_text("".join(json.dumps({"story": f"{i}: " + SENTENCE * n}) + "\n" for i, n in enumerate(sizes)))
    (folder / "text.yaml").write_text(TEXT.format(data=data))
    (folder / "choice.yaml").write_text(CHOICE.format(data=data))
    return folder


def call(tiny: Path, folder: Path, out: Path, *typed: str) -> int:
    base = ["model=hf", f"model.path={tiny}", f"out={out}", "wandb=disabled", f"cache_dir={folder.parent / 'c'}"]
    return run.main([*base, "task=lm_eval", f"task.include={folder}", "model.max_length=100", *typed])


def documents(out: Path) -> dict[str, set[int]]:
    """Method -> the documents that have a sample."""
    return {
        path.parent.name.split("__")[1]: {json.loads(line)["doc_id"] for line in path.open()}
        for path in out.glob("*/samples.jsonl")
    }


@pytest.mark.parametrize("shared", [pytest.param("true", marks=pytest.mark.rest), "false"])
def test_answers(
    tiny: Path, folder: Path, tmp_path: Path, shared: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(units, "OWN_PREFILLS", 1)
    sweep = ["-m", "method=full,snapkv", "budget=0.5", "task.name=my_answers", f"shared_prefill={shared}"]
    assert call(tiny, folder, tmp_path / "out", *sweep) == 0
    assert "4 samples a cell (1 more too long, left out)" in capsys.readouterr().out
    assert documents(tmp_path / "out") == dict.fromkeys(("full", "snapkv"), {0, 2, 3, 4})
    for path in (tmp_path / "out").glob("*/row.json"):
        row = read_row(path)
        assert row is not None
        assert (row["n_samples"], row["n_skipped"], row["paired_samples"]) == (4, 1, 4)
        (scores,) = row["sample_scores"].values()
        assert {int(key.partition(":")[0]) for key in scores} == {0, 2, 3, 4}


@pytest.mark.rest
def test_log_likelihoods(tiny: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tiny, folder, tmp_path / "out", "method=full", "task.name=my_choices") == 0
    assert "4 samples (1 more too long, left out)" in capsys.readouterr().out
    assert documents(tmp_path / "out") == {"full": {0, 2, 3, 4}}


@pytest.mark.rest
def test_a_task_of_which_nothing_is_left_fails_and_says_so(
    tiny: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tiny, folder, tmp_path / "out", "method=full", "task.name=my_answers", "model.max_length=9") == 1
    assert "all 5 samples are too long" in capsys.readouterr().err


@pytest.mark.rest
def test_units(tiny: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "engine_for", lambda _: InProcess(2))
    monkeypatch.setattr(units, "OWN_PREFILLS", 1)
    sweep = ["-m", "method=full,snapkv", "budget=0.5", "task.name=my_answers", "launch=ray"]
    assert call(tiny, folder, tmp_path / "out", *sweep) == 0
    rows = [read_row(path) for path in (tmp_path / "out").glob("*/row.json")]
    assert [(row["n_samples"], row["n_skipped"]) for row in rows if row is not None] == [(4, 1)] * 2


@pytest.mark.rest
def test_a_prompt_is_tokenized_once_for_all_cells(
    tiny: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()
    encode = LoadedModel.encode

    def counted(self: LoadedModel, text: str) -> list[int]:
        read[text] += SENTENCE in text
        return encode(self, text)

    monkeypatch.setattr(LoadedModel, "encode", counted)
    monkeypatch.setattr(runner, "engine_for", lambda _: InProcess(1))
    sweep = ["-m", "method=full,snapkv,streaming", "budget=0.5", "task.name=my_answers"]
    assert call(tiny, folder, tmp_path / "here", *sweep) == 0
    assert sorted(count for count in read.values() if count) == [1, 1, 1, 1, 2]  # the plan counts the longest one
    assert call(tiny, folder, tmp_path / "there", *sweep, "launch=ray") == 0
    assert sorted(count for count in read.values() if count) == [3, 3, 3, 3, 5]  # by the driver and by its worker
    assert call(tiny, folder, tmp_path / "there", *sweep, "launch=ray") == 0  # the rows alone
    assert sorted(count for count in read.values() if count) == [4, 4, 4, 4, 7]
