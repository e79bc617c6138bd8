"""Where rows come from: the hub, and local files."""

import gzip
import json
import zipfile
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pandas as pd
import pytest
from huggingface_hub import constants, errors

from pqcache.harness.tasks import hub, sources, task_of
from tests.harness.cells import Patch


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
def test_what_the_hub_refuses_is_one_line(error: type[Exception] | None, words: list[str], monkeypatch: Patch) -> None:
    said = ConnectionError("refused\nat length") if error is None else http_error(error)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=said))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    with pytest.raises(ValueError) as refused:
        sources.hub_file("zai-org/LongBench", "data.zip", "v9")
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words)


def test_rows_of_packed_and_table_files(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in rows))
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.jsonl.gz", "rows.parquet"):
        assert sources.read_rows(tmp_path / name) == rows
        assert sources.read_rows(tmp_path / name, limit=1) == rows[:1]
        with pytest.raises(ValueError, match="row 1 lacks c"):
            sources.DataSet("rows", fields={"a": int, "c": str}).read(str(tmp_path / name))


@pytest.mark.rest
def test_damaged_and_endless_files_are_one_line(tmp_path: Path, monkeypatch: Patch) -> None:
    whole = gzip.compress(b'{"a": 1}\n' * 5000)
    # the first megabytes of a line that would be far longer
    bomb = gzip.compress(b'{"a": "' + b"x" * (1 << 22) + b'"}')
    files = {
        "cut.jsonl.gz": whole[: len(whole) // 2],
        "flipped.jsonl.gz": whole[:30] + bytes([whole[30] ^ 255]) + whole[31:],
        "no.jsonl.gz": b"no archive",
        "bomb.jsonl.gz": bomb,
        "many.jsonl.gz": gzip.compress(b'{"a": 1}\n' * 300_000),
        "deep.jsonl": b"[" * 100_000,
        "latin.jsonl": b'{"a": "\xe9"}',
        "no.parquet": b"PAR1",
        "empty.parquet": b"",
    }
    monkeypatch.setattr(sources, "LONGEST_LINE", 1 << 16)
    monkeypatch.setattr(sources, "LONGEST_FILE", 1 << 21)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=r"^task\.source: ") as error:
            sources.read_rows(tmp_path / name)
        assert "\n" not in str(error.value) and name in str(error.value), name


def test_damaged_archives_are_one_line(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/qasper.jsonl", b"{}\n" * 5000)
    whole = path.read_bytes()
    entry = whole.index(b"PK\x01\x02")
    encrypted = bytearray(whole)
    for flags in (6, entry + 8):  # of the file's header and of the directory
        encrypted[flags] |= 1
    kinds = {
        "cut": whole[: len(whole) // 2],
        "encrypted": bytes(encrypted),
        "flipped": whole[:60] + bytes([whole[60] ^ 255]) + whole[61:],
        "unknown method": whole[: entry + 10] + b"\x63" + whole[entry + 11 :],
        "empty": b"",
    }
    monkeypatch.setattr(sources, "hub_file", lambda *_: path)
    for name, data in kinds.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"^task\.source") as error:
            task_of("longbench_qasper", {"source": "hub"}).prepare(limit=1)
        assert "\n" not in str(error.value), name
