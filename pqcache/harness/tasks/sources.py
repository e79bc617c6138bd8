"""Rows of data sets: of the hub, of local files, or constructed. Every error is a one-line ValueError.

    GSM8K = DataSet("openai/gsm8k", config="main", fields={"question": SOME, "answer": SOME}, files=("test.jsonl",))
    check_source("/data/gsm8k")                         # in an options' __post_init__; reads no file
    rows, facts = GSM8K.read("/data/gsm8k", limit=20)   # facts go into TaskSpec.data, and so into the row

    path = hub_file("zai-org/LongBench", "data.zip", None)     # one file of a data set
    rows = read_rows(path)

Only `DataSet.read` and `hub_file` use the network, and neither does under HF_HUB_OFFLINE=1. `DataSetTask` is a task over
one such data set, `LocalSplits` the local rows of a task of lm-eval.
"""

import gzip
import hashlib
import io
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from pqcache.harness.tasks import hub
from pqcache.harness.tasks.base import GENERATED, Task, require
from pqcache.outside import LONGEST_FILE, LONGEST_LINE, file_hash, open_regular, parse_json, reason, refusing

HUB, CONSTRUCTED = "hub", "constructed"
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

SOME, TEXT = re.compile(r"\S"), re.compile("")

Rows = list[dict[str, Any]]
# Name -> what its value must be: a text that holds this pattern, a list of such texts, of this type, or Any.
Fields = Mapping[str, Any]
# What a result row records of its data: source, revision, and the SHA-256 of each file.
Facts = dict[str, Any]


def check_source(source: str, *, words: Sequence[str] = (HUB, CONSTRUCTED), file: bool = True) -> None:
    """Refuse a source that is not one of the words, a folder, or with `file` a file."""
    if source not in words:
        path = Path(source).expanduser()
        allowed = f"is no folder; must be {' or '.join(words)}, or the path of a local folder"
        require(path.is_dir() or (file and path.is_file()), "source", source, allowed)


def local_file(folder: str, *names: str) -> Path:
    """The first of the names that is a file in the folder."""
    paths = [path for name in names if (path := Path(folder).expanduser() / name).is_file()]
    require(bool(paths), "source", folder, f"holds no {' or '.join(names)}")
    return paths[0]


def facts_of(source: str, sha256: dict[str, str], revision: str | None = None, **more: Any) -> Facts:
    return {"source": source, "revision": revision, **more, "sha256": sha256}


def blank(value: Any) -> bool:
    """Whether a reference answer is none: no text, or a list without one. Numbers are texts."""
    values = value if isinstance(value, list | tuple) else [value]
    return not any(one is not None and str(one).strip() for one in values)


def as_said(row: dict[str, Any], fields: Fields, where: str) -> dict[str, Any]:
    """A row whose fields are what is said of them. A number in a text's place becomes one. Raises a one-line ValueError."""

    def checked(name: str, value: Any, kind: Any) -> Any:
        if isinstance(kind, list):
            return [checked(name, one, kind[0]) for one in checked(name, value, list) or [None]]
        if isinstance(kind, re.Pattern):
            value = str(value) if type(value) in (int, float) else value
            if not isinstance(value, str) or not kind.search(value):
                why = f"holds no {kind.pattern}" if isinstance(value, str) else "is no text"
                why = "is empty" if blank(value) else why
                raise ValueError(f"task.source: {where}: {name} {why}; it cannot be graded")
        elif kind is not Any and type(value) is not kind:
            raise ValueError(f"task.source: {where}: {name} is no {kind.__name__}; it cannot be graded")
        return value

    if missing := [name for name in fields if name not in row]:
        raise ValueError(f"task.source: {where} lacks {', '.join(missing)}")
    return {**row, **{name: checked(name, row[name], kind) for name, kind in fields.items()}}


# -- whole data sets ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    """One split of a data set of the hub, and the names of its file in a local folder."""

    repo: str
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    fields: Fields = field(default_factory=dict, hash=False)  # that every row has
    files: tuple[str, ...] = ("test.jsonl", "test.jsonl.gz", "test.parquet")
    # What task.source may be without the hub, beside a folder.
    offline: str = CONSTRUCTED

    def read(self, source: str, limit: int | None = None) -> tuple[Rows, Facts]:
        """(the first `limit` rows, the facts of their source). Rows are read once per process."""
        if source == HUB:
            rows, facts = _read_hub(self)
        else:
            path = Path(source).expanduser()
            path = path if path.is_file() else local_file(source, *self.files)
            rows, facts = _read_file(path, path.stat().st_mtime_ns), file_facts(path)
        checked = [as_said(row, self.fields, f"{source}, row {number}") for number, row in enumerate(rows[:limit], 1)]
        return checked, {**facts, "sha256": dict(facts["sha256"])}


@lru_cache(maxsize=32)
def _read_hub(data: DataSet) -> tuple[Rows, Facts]:
    name = data.repo + (f"/{data.config}" if data.config else "")
    refused = f"task.source=hub: {name}, split {data.split}, cannot be had"
    help_ = f"check network and access, or set task.source to a folder with {data.files[0]}, or to {data.offline}"
    if not _has_stored_tables() and (why := hub.without(data.repo)):
        raise hub.NotAtHand(f"{refused}: {why}; {help_}")

    import datasets

    # gated, renamed, offline, no network, no space: the kinds of errors differ by version
    with refusing(refused, more=f"; {help_}", of=hub.NotAtHand):
        table = datasets.load_dataset(data.repo, data.config, split=data.split, revision=data.revision)
    rows = [dict(row) for row in table]
    return rows, facts_of(f"hub {name}", {data.split: digest(rows)}, data.revision)


def _has_stored_tables() -> bool:
    """Whether the package datasets has a cache with anything in it, where it may find tables without the hub."""
    loaded = sys.modules.get("datasets")
    folder = Path(loaded.config.HF_DATASETS_CACHE) if loaded is not None else None
    return folder is not None and folder.is_dir() and any(folder.iterdir())


@lru_cache(maxsize=32)
def _read_file(path: Path, mtime: int) -> Rows:
    return read_rows(path)


class DataSetTask(Task[Any]):
    """A task over the rows of one data set, or over rows of the same format made here (task.source=constructed)."""

    data_set: DataSet
    # Constructed rows where no limit is set.
    default_samples = GENERATED

    def __init__(self, name: str, options: Any) -> None:
        super().__init__(name, options)
        check_source(options.source)

    def construct(self, seed: int, number: int) -> dict[str, Any]:
        """One constructed row; it depends on the seed and its number alone."""
        raise NotImplementedError

    def read(self, seed: int, limit: int | None) -> tuple[Rows, Facts]:
        """(rows, the facts of their source)"""
        if self.options.source != CONSTRUCTED:
            return self.data_set.read(self.options.source, limit)
        count = self.default_samples if limit is None else limit
        rows = [self.construct(seed, number) for number in range(count)]
        return rows, constructed_facts(rows, seed)

    def prepare(self, *, limit: int | None) -> None:
        self.read(0, limit)


class LocalSplits(dict[str, Any]):
    """Split -> its `datasets.Dataset`, read when it is asked for: `task.source=<folder or file>` of a task of lm-eval.

    A split is `<split>.jsonl`, `.jsonl.gz` or `.parquet` of the folder. A file, or a folder with one file of rows, serves
    every split. Raises a one-line ValueError where there is no such file.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.paths: dict[str, Path] = {}  # of the splits that were read

    def __missing__(self, split: str) -> Any:
        from datasets import Dataset

        path = self.paths[split] = self._file(split)
        known = next((name for name, other in self.paths.items() if other == path and name in self), None)
        self[split] = self[known] if known is not None else Dataset.from_list(read_rows(path))
        return self[split]

    def _file(self, split: str) -> Path:
        root = Path(self.source).expanduser()
        if root.is_file():
            return root
        files = [path for path in sorted(root.iterdir()) if path.name.endswith(SUFFIXES) and path.is_file()]
        return files[0] if len(files) == 1 else local_file(self.source, *(f"{split}{suffix}" for suffix in SUFFIXES))

    @property
    def facts(self) -> Facts:
        """Facts of the files that were read, for row["data"]."""
        return facts_of(self.source, {path.name: file_hash(path) for path in self.paths.values()})


# -- single files of the hub -------------------------------------------------------------------------------------------


def hub_file(repo: str, filename: str, revision: str | None) -> Path:
    """The path of a data set's file in the hub's cache; it is downloaded if it is not there yet."""
    from huggingface_hub import constants, errors, hf_hub_download

    # Its retries are not shown; their outcome is reported below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    name = f"{repo}{f'@{revision}' if revision else ''}"
    offline = bool(constants.HF_HUB_OFFLINE)
    local = "or set task.source to a local folder that holds the data"
    terms = f"accept its terms at https://huggingface.co/datasets/{repo} and run `hf auth login`"
    reasons: dict[type[Exception], str] = {
        errors.GatedRepoError: f"task.source=hub: {name} is gated; {terms}, {local}",
        errors.RevisionNotFoundError: f"task.revision={revision}: the data set {repo} has no such revision on the hub",
        errors.RepositoryNotFoundError: f"task.source=hub: there is no data set {name} on the hub (or no right to read it)",
        errors.RemoteEntryNotFoundError: f"task.source=hub: the data set {name} has no file {filename}",
        errors.HFValidationError: f"task.revision={revision}: is no name of a branch, tag or commit",
    }
    if why := hub.without(repo):
        raise hub.NotAtHand(f"task.source=hub: {filename} of {name} cannot be had: {why}; check the network, {local}")
    try:
        return Path(hf_hub_download(repo, filename, repo_type="dataset", revision=revision, local_files_only=offline))
    except (OSError, ValueError, RuntimeError) as error:  # offline, no network, no space: the kinds differ by version
        if known := next((text for kind, text in reasons.items() if isinstance(error, kind)), None):
            raise ValueError(known) from error
        why = "HF_HUB_OFFLINE=1 and it is not in the cache" if offline else reason(error)
        way = "unset HF_HUB_OFFLINE to download it" if offline else "check the network"
        raise hub.NotAtHand(f"task.source=hub: {filename} of {name} cannot be had ({why}); {way}, {local}") from error


def hub_facts(repo: str, filename: str, path: Path) -> Facts:
    """Facts of a downloaded file: data set, commit (the name of the snapshot folder) and content."""
    parts = path.parts
    commit = parts[parts.index("snapshots") + 1] if "snapshots" in parts else None
    return facts_of(f"hub {repo}", {filename: file_hash(path)}, commit)


def file_facts(path: Path) -> Facts:
    return facts_of(str(path), {path.name: file_hash(path)})


def constructed_facts(rows: Rows, seed: int) -> Facts:
    return facts_of(CONSTRUCTED, {"rows": digest(rows)}, seed=seed)


def digest(rows: Rows) -> str:
    """SHA-256 of the rows as JSON."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


# -- files of rows -----------------------------------------------------------------------------------------------------


def read_rows(path: Path, limit: int | None = None) -> Rows:
    """The first `limit` rows of a .jsonl, .jsonl.gz or .parquet file."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with refusing(f"task.source: {path} is no Parquet file"), open_regular(path) as file:
            return parquet.read_table(file).slice(0, limit).to_pylist()
    return list(read_lines(path, limit).values())


def read_lines(path: Path, limit: int | None = None) -> dict[int, dict[str, Any]]:
    """Line number -> row of a .jsonl or .jsonl.gz file."""
    with refusing(f"task.source: {path} cannot be read", OSError), open_regular(path) as file:
        text = io.TextIOWrapper(gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, encoding="utf-8-sig")
        return parse_lines(text, str(path), limit)


def parse_lines(file: TextIO, name: str, limit: int | None = None) -> dict[int, dict[str, Any]]:
    """One JSON object per line, by its number; empty lines are skipped. name: the file's, for error messages."""
    rows: dict[int, dict[str, Any]] = {}
    number = 0
    try:
        for number, line in enumerate(_bounded(file, name), 1):
            if limit is not None and len(rows) >= limit:
                break
            if line.strip():
                rows[number] = row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError(f"task.source: {name}, line {number} is no JSON object")
    except Exception as error:  # what a cut, encrypted or foreign file does to its reader has many kinds
        if str(error).startswith("task.source"):
            raise
        why = f"after line {number}: {reason(error)}"
        if isinstance(error, json.JSONDecodeError):
            why = f"line {number}: {error.msg}, column {error.colno}"
        raise ValueError(f"task.source: {name} is no JSON lines file ({why})") from error
    if not rows:
        raise ValueError(f"task.source: {name} holds no row")
    return rows


def _bounded(file: TextIO, name: str) -> Iterator[str]:
    """The lines of a file, none of which is read further than LONGEST_LINE: a compressed megabyte can hold gigabytes."""
    total = 0
    while line := file.readline(LONGEST_LINE + 1):
        total += len(line)
        if len(line) > LONGEST_LINE or total > LONGEST_FILE:
            what = f"a line of more than {LONGEST_LINE}" if len(line) > LONGEST_LINE else f"more than {LONGEST_FILE}"
            raise ValueError(f"task.source: {name} holds {what} characters")
        yield line


@lru_cache(maxsize=8)
def published_texts(task: str) -> dict[str, str]:
    """The fixed parts of a benchmark's prompts, word for word as published."""
    return json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))[task]
