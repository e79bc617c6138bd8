"""Rows of published data sets: from the hub, or from a local folder. Everything that can be wrong is one line.

    source = check_source("/data/longbench", constructed=True)       # in Options.__post_init__: no network, no files read
    path = hub_file("zai-org/LongBench", "data.zip", None)           # in prepare(): before any model is loaded
    path = local_file("/data/longbench", "hotpotqa.jsonl")
    rows = read_rows(path, fields=("input", "context", "answers"))
    facts = {"sha256": {path.name: sha256(path)}}                    # into TaskSpec.data, and so into the row

Only `hub_file` may use the network, and not under HF_HUB_OFFLINE=1. Its files lie in the hub's own cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pqcache.harness.tasks.base import require

HUB, CONSTRUCTED = "hub", "constructed"


def check_source(source: str, *, constructed: bool = False) -> str:
    """`source` if it can be one: hub, constructed (where the task has rows of its own), or a folder that exists."""
    words = [HUB, CONSTRUCTED] if constructed else [HUB]
    folder = source not in words and Path(source).expanduser().is_dir()
    allowed = f"is no folder; must be {' or '.join(words)}, or the path of a local folder"
    require(folder or source in words, "source", source, allowed)
    return source


def is_local(source: str) -> bool:
    return source not in (HUB, CONSTRUCTED)


def local_file(folder: str, *names: str) -> Path:
    """The first of the names that is a file in the folder."""
    found = [path for name in names if (path := Path(folder).expanduser() / name).is_file()]
    require(bool(found), "source", folder, f"holds no {' or '.join(names)}")
    return found[0]


def hub_file(repo: str, filename: str, revision: str | None) -> Path:
    """The path of a data set's file in the hub's cache, downloaded if it is not there yet."""
    from huggingface_hub import constants, errors, hf_hub_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what comes of them is said below

    name = f"{repo}{f'@{revision}' if revision else ''}"
    offline = bool(constants.HF_HUB_OFFLINE)
    local = "or set task.source to a local folder that holds the data"
    try:
        path = hf_hub_download(repo, filename, repo_type="dataset", revision=revision, local_files_only=offline)
    except errors.GatedRepoError as error:
        reason = f"{name} is gated; accept its terms at https://huggingface.co/datasets/{repo} and run `hf auth login`"
        raise ValueError(f"task.source=hub: {reason}, {local}") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"task.revision={revision}: the data set {repo} has no such revision on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"task.source=hub: there is no data set {name} on the hub (or no right to read it)") from error
    except errors.RemoteEntryNotFoundError as error:
        raise ValueError(f"task.source=hub: the data set {name} has no file {filename}") from error
    except errors.HFValidationError as error:
        raise ValueError(f"task.revision={revision}: {' '.join(str(error).split())}") from error
    except (OSError, ValueError, RuntimeError) as error:  # offline, no network, no space: named differently by version
        why = "HF_HUB_OFFLINE=1 and it is not in the cache" if offline else " ".join(f"{error}".split())[:200]
        way = "unset HF_HUB_OFFLINE to download it" if offline else "check the network"
        raise ValueError(f"task.source=hub: {filename} of {name} cannot be had ({why}); {way}, {local}") from error
    return Path(path)


def hub_facts(repo: str, filename: str, path: Path) -> dict[str, Any]:
    """What a row keeps of a downloaded file: data set, commit (the snapshot folder's name) and content."""
    at = path.parts
    commit = at[at.index("snapshots") + 1] if "snapshots" in at else None
    return {"source": f"hub {repo}", "revision": commit, "sha256": {filename: sha256(path)}}


def sha256(path: Path) -> str:
    """The hex digest of a file's content; computed once while size and time stay the same."""
    facts = path.stat()
    return _sha256(str(path), facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(path: str, size: int, mtime: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_rows(path: Path, *, fields: Sequence[str] = (), limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a .jsonl, .jsonl.gz or .parquet file, each with at least `fields`; the first `limit` of them."""
    if path.suffix == ".parquet":
        import pandas as pd

        rows = pd.read_parquet(path).head(limit if limit is not None else None).to_dict("records")
        return [_checked(row, fields, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    if path.suffix == ".gz":
        import gzip

        with gzip.open(path, "rt", encoding="utf-8") as file:
            return parse_lines(file, str(path), fields=fields, limit=limit)
    with open(path, encoding="utf-8") as file:
        return parse_lines(file, str(path), fields=fields, limit=limit)


def parse_lines(
    lines: Iterable[str], name: str, *, fields: Sequence[str] = (), limit: int | None = None
) -> list[dict[str, Any]]:
    """One JSON object per line, empty lines left out. name: of the file, for what is wrong with it."""
    rows: list[dict[str, Any]] = []
    try:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(rows) >= limit:
                break
            if line.strip():
                rows.append(_checked(json.loads(line), fields, f"{name}, line {number}"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"task.source: {name} is no JSON lines file ({' '.join(str(error).split())})") from error
    if not rows:
        raise ValueError(f"task.source: {name} holds no row")
    return rows


def _checked(row: Any, fields: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"task.source: {where} is no JSON object")
    if missing := [field for field in fields if field not in row]:
        raise ValueError(f"task.source: {where} lacks {', '.join(missing)}")
    return row
