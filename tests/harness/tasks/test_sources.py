"""Where rows come from: the hub, and local files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pandas as pd
import pytest
from huggingface_hub import constants, errors

from pqcache.harness.tasks import sources, task_of


def http_error(kind: type[Exception]) -> Exception:
    import httpx

    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co/x"))
    return kind("refused\nat length", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError, ["gated", "hf auth login"]),
        (errors.RepositoryNotFoundError, ["no data set zai-org/LongBench"]),
        (errors.RevisionNotFoundError, ["task.revision=v9", "no such revision"]),
        (errors.RemoteEntryNotFoundError, ["no file data.zip"]),
        (None, ["refused at length", "check the network"]),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    error: type[Exception] | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise ConnectionError("refused\nat length") if error is None else http_error(error)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError) as refused:
        sources.hub_file("zai-org/LongBench", "data.zip", "v9")
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words)


def test_a_data_set_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nmuch more")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(ValueError, match=r"^task\.source=hub: EdinburghNLP/xsum, split test, cannot be had") as error:
        task_of("xsum").prepare(limit=1)
    assert "task.source to a folder" in str(error.value)
    assert "\n" not in str(error.value)


def test_rows_of_packed_and_table_files(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in rows))
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.jsonl.gz", "rows.parquet"):
        assert sources.read_rows(tmp_path / name, fields=("a",)) == rows
        assert sources.read_rows(tmp_path / name, limit=1) == rows[:1]
        with pytest.raises(ValueError, match="lacks c"):
            sources.read_rows(tmp_path / name, fields=("c",))
