"""A published data set wherever it lies: on the hub, in a local folder, or one local file; as rows and their facts.

    GSM8K = DataSet("openai/gsm8k", config="main", fields=("question", "answer"), files=("test.jsonl",))
    rows, facts = GSM8K.read("hub", limit=20)

What is wrong with a source is one line of `sources`. Rows are read once per process: `prepare` and `build` both ask.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pqcache.harness.tasks import sources
from pqcache.harness.tasks.base import require

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class DataSet:
    """One split of a data set of the hub, and the names its file has elsewhere."""

    repo: str
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    fields: tuple[str, ...] = ()
    files: tuple[str, ...] = ("test.jsonl", "test.jsonl.gz", "test.parquet")

    def read(self, source: str, limit: int | None = None) -> tuple[Rows, dict[str, Any]]:
        """(the first `limit` rows, what a result keeps of where they came from). Raises a one-line ValueError."""
        rows, facts = _hub(self) if source == sources.HUB else _local(self, source)
        return rows[:limit], dict(facts)


def check(source: str, *, constructed: bool = True) -> str:
    """`source` if it can be one: hub, constructed, a folder, or a file."""
    return source if Path(source).expanduser().is_file() else sources.check_source(source, constructed=constructed)


@lru_cache(maxsize=32)
def _hub(data: DataSet) -> tuple[Rows, dict[str, Any]]:
    import datasets

    name = data.repo + (f"/{data.config}" if data.config else "")
    try:
        table = datasets.load_dataset(data.repo, data.config, split=data.split, revision=data.revision)
    except Exception as error:  # gated, renamed, offline, no network, no space: many kinds, which differ by version
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ValueError(
            f"task.source=hub: {name}, split {data.split}, cannot be had ({type(error).__name__}: {reason}); check network"
            f" and access, or set task.source to a folder with {data.files[0]}, or to constructed"
        ) from error
    rows = [dict(row) for row in table]
    if rows and (missing := [field for field in data.fields if field not in rows[0]]):
        raise ValueError(f"task.source=hub: {name} lacks {', '.join(missing)}")
    facts = {"source": f"hub {name}", "revision": data.revision, "sha256": {data.split: digest(rows)}}
    return rows, facts


def _local(data: DataSet, source: str) -> tuple[Rows, dict[str, Any]]:
    path = Path(source).expanduser()
    if not path.is_file():
        path = sources.local_file(source, *data.files)
    rows = _file(path, data.fields, path.stat().st_mtime_ns)
    return rows, {"source": str(path), "revision": None, "sha256": {path.name: sources.sha256(path)}}


@lru_cache(maxsize=32)
def _file(path: Path, fields: tuple[str, ...], mtime: int) -> Rows:
    return sources.read_rows(path, fields=fields)


def digest(rows: Rows) -> str:
    """SHA-256 of the rows as JSON."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


def constructed(rows: Rows, seed: int) -> dict[str, Any]:
    """The facts of rows that were made here."""
    return {"source": "constructed", "revision": None, "seed": seed, "sha256": {"rows": digest(rows)}}


def require_positive(option: str, value: int | None) -> None:
    require(value is None or value >= 1, option, value, "must be at least 1")
