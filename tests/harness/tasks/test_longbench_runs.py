"""LongBench from the command line: whole runs on the embedded model, and where rows come from."""

import hashlib
import json
import socket
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest

from pqcache.harness.tasks.longbench.constructed import construct
from pqcache.harness.tasks.longbench.data_sets import DATASETS
from tests.harness.cells import Capture, Command, Patch, error_of, one_row
from tests.harness.tasks.building import write_rows
from tests.harness.tasks.test_longbench import make_row


@pytest.fixture
def start(command: Command, monkeypatch: Patch) -> Command:
    """run.py without any way to the network."""
    no_network = Mock(side_effect=AssertionError("something used the network"))
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    return lambda *arguments: command("method=full", *arguments)


@pytest.mark.rest
def test_every_data_set_on_the_embedded_model(start: Command, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "data"
    for dataset in DATASETS:
        write_rows(folder / f"{dataset}.jsonl", construct(dataset, 2, 200, 7, lambda text: len(text) // 4))
    arguments = ["task=longbench", f"task.source={folder}", "limit=1", "task.max_length=160"]
    assert start(*arguments, "model=embedded") == 0
    row = one_row(tmp_path)[1]
    assert list(row["tasks"]) == [f"longbench_{name}" for name in DATASETS]
    assert row["n_samples"] == 16
    means = [t["score"] for t in row["tasks"].values()]
    assert row["score"] == pytest.approx(sum(means) / 16)
    protocol = row["prompt_protocol"]
    assert protocol["truncated_prompts"] == 16
    assert protocol["wrapper"] == "chat template / none"
    assert row["prompt_tokens"] < 200
    first = f"{protocol['first_prompt']['tokens']} tokens, sha256 {protocol['first_prompt']['sha256'][:16]}"
    assert f"first prompt: longbench_narrativeqa sample 0, {first}" in capsys.readouterr().out
    content = (folder / "hotpotqa.jsonl").read_bytes()
    assert row["data"]["source"] == "local folder"
    assert len(row["data"]["sha256"]) == 16
    assert row["data"]["sha256"]["hotpotqa.jsonl"] == hashlib.sha256(content).hexdigest()


def test_longbench_e_has_a_sub_task_per_bucket(start: Command, tmp_path: Path) -> None:
    rows = [make_row(input=f"Who{n}?", length=n) for n in (9000, 3999, 4000, 100, 8000, 200)]
    write_rows(tmp_path / "data" / "hotpotqa_e.jsonl", rows)
    write_rows(tmp_path / "data" / "lcc_e.jsonl", rows[1:2])
    arguments = ["task=longbench_e", "task.datasets=[hotpotqa,lcc]", f"task.source={tmp_path / 'data'}", "limit=2"]
    assert start(*arguments) == 0
    assert {name: t["n_samples"] for name, t in one_row(tmp_path)[1]["tasks"].items()} == {
        "longbench_e_hotpotqa_0-4k": 2,
        "longbench_e_hotpotqa_4-8k": 1,
        "longbench_e_hotpotqa_8k+": 2,
        "longbench_e_lcc_0-4k": 1,
    }


@pytest.mark.usefixtures("no_model")
@pytest.mark.rest
def test_wrong_folders_and_files_end_in_one_line(
    start: Command, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = tmp_path / "data"
    for name in ("qasper", "trec"):
        write_rows(folder / f"{name}.jsonl", [make_row()])
    (folder / "hotpotqa.jsonl").write_text('{"input": "", \n')
    (folder / "lcc.jsonl").write_text('{"input": "", "context": ""}\n')
    (folder / "musique.jsonl").write_text("\n")
    source = f"task.source={folder}"
    cases = {
        ("task=longbench_narrativeqa", source): ["holds no narrativeqa.jsonl"],
        ("task=longbench_hotpotqa", source): ["hotpotqa.jsonl is no JSON lines file"],
        ("task=longbench_lcc", source): ["lcc.jsonl, row 1", "lacks answers, length"],
        ("task=longbench_musique", source): ["musique.jsonl holds no row"],
        ("task=longbench_trec", source): ["trec.jsonl, row 1", "all_classes"],
        ("task=longbench_e", source): ["holds no qasper_e.jsonl"],
        ("task=longbench_qasper", source, "task.max_length=4000"): ["task.max_length=4000", "4096"],
        ("task=longbench_multifieldqa_zh", source): ["its score needs jieba; pip install 'pqcache-lab[zh]'"],
    }
    monkeypatch.setitem(sys.modules, "jieba", None)
    for arguments, expected in cases.items():
        line = error_of(capsys, start(*arguments))
        assert all(word in line for word in expected), line


def test_rows_of_the_hub_are_the_archives(start: Command, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    folder = tmp_path / "hub" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", "".join(json.dumps(make_row(_id=str(i))) + "\n" for i in range(3)))
    requested: list[Any] = []

    def download(repo: str, filename: str, *, revision: str | None, **_: Any) -> str:
        requested.append((repo, filename, revision))
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert start("task=longbench_qasper", "task.revision=0123", "limit=2") == 0
    assert set(requested) == {("zai-org/LongBench", "data.zip", "0123")}
    row = one_row(tmp_path)[1]
    content = (folder / "data.zip").read_bytes()
    assert row["data"] == {
        "source": "hub zai-org/LongBench",
        "revision": "0123abcd",
        "sha256": {"data.zip": hashlib.sha256(content).hexdigest()},
    }
    assert row["n_samples"] == 2
    capsys.readouterr()
    assert "is not LongBench's archive" in error_of(capsys, start("task=longbench_trec", "task.revision=0123"))
