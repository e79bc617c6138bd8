"""samples*.jsonl: one line per finished sample, safe against being killed at any byte.

A line is appended, flushed and synced before the next sample starts. A sample is looked up by its task, document number
and fingerprint (weights, model input, generation settings), so that a line of other weights or another prompt is never
used.

Who runs a cell holds a lock on `.lock` in its folder, which ends with its process however that ends; owner.json names it.
Where the file system has no locks, filelock's own files stand for them: of a process that was killed on another machine such a
file stays, and is deleted by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from filelock import FileLock, Timeout

from pqcache.atomic import write_text
from pqcache.harness.config.environment import Facts
from pqcache.harness.config.options import one_line
from pqcache.harness.report.sample_lines import Key, Sample, SampleMarks, key_of, read_all
from pqcache.harness.run.other_load import other_load
from pqcache.outside import lines, open_regular, read_json, sealed

if TYPE_CHECKING:
    from pqcache.selective import GenerationResult

PROMPT_END = 300  # characters of a prompt that its line keeps
DIFFERS = "differs_alone"  # in a sample's `extra`, with batch_check: 1 if the answer alone is another one
# What a sample takes as it is from the result of a generation.
OF_THE_RESULT = (
    "prompt_tokens prefill_s tt2t_s index_build_s budget_tokens attended_tokens attended_tokens_all_layers"
    " resident_bytes peak_bytes bytes_per_step"
).split()
LOCK, OWNER = ".lock", "owner.json"


class Missing(RuntimeError):
    """A sample is not in the log, and the model has no weights to compute it."""


def target_marks(task: Any, doc: dict) -> SampleMarks:
    """The right answers of a document of an lm-eval task; empty where it has none."""
    try:
        target = task.doc_to_target(doc)
        if isinstance(target, int) and not isinstance(target, bool):  # a choice by its number
            target = task.doc_to_choice(doc)[target]
    except Exception:  # a definition of anyone's
        return {}
    if isinstance(target, list | tuple):
        return SampleMarks(target=[str(one) for one in target]) if target else {}
    return {} if target is None or target == "" else SampleMarks(target=str(target))


def fingerprint(of: Sequence[int] | str, settings: dict[str, Any]) -> str:
    """16 hex digits that identify a model input and the settings of its generation, not the method.

    of: token ids; for a drawn answer the fingerprint of the greedy one.
    """
    text = json.dumps([of, settings], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_sample(
    result: GenerationResult,
    key: Key,
    response: str,
    score: float | None,
    question_tokens: int,
    attn: str,
    facts: Facts,
) -> Sample:
    """The line of one generation."""
    more = {"index_work_s": result.index_work_s} if result.index_work_s else {}
    more |= other_load()  # asked for with every sample: it is of the time since the one before
    own = {name: getattr(result, name) for name in OF_THE_RESULT}
    sample = {
        **dict(zip(("task", "doc_id", "fingerprint"), key, strict=True)),
        "response": response,
        "score": score,
        "new_tokens": len(result.token_ids),
        "question_tokens": question_tokens,
        **{name: dict(value) if isinstance(value, dict) else value for name, value in own.items()},
        "step_s": [round(s, 7) for s in result.step_s],
        "extra": {**result.extra, **more},
        "attn": attn,
        **facts,
        "versions": dict(facts["versions"]),
    }
    return cast(Sample, sample)


# -- who runs a cell ---------------------------------------------------------------------------------------------------


class Busy(RuntimeError):
    """Another process has this cell."""


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Inside it this process owns a cell's folder. Raises Busy if another process has it."""
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise Busy(f"{folder}: another process is running this cell: {_owner(folder)}") from None
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        with contextlib.suppress(OSError):  # on a full disk nobody learns who runs the cell
            write_text(folder / OWNER, json.dumps(owner) + "\n")
        yield
    finally:
        lock.release()


def _owner(folder: Path) -> str:
    try:
        owner = read_json(folder / OWNER)
        return one_line(f"process {owner['pid']} on {owner['host']} (since {owner['since']})")[:200]
    except (OSError, ValueError, KeyError, TypeError):
        return "its owner is not known yet"


# -- the log -----------------------------------------------------------------------------------------------------------


class SampleLog(ExitStack):
    """The samples of one cell: those on disk, and an append-only file for new ones. Closing it lets the cell go.

    Samples of workers are beside samples.jsonl, as samples-<unit>-<number>.jsonl. All are read as one. A file is made with its
    first line.
    """

    def __init__(
        self, path: Path, cell: str = "", on_sample: Callable[[Sample], None] | None = None, *, owned: bool = True
    ) -> None:
        """A cell's log. Raises Busy if another process has the cell.

        cell: the configuration's mark. Lines of another one are not used; lines without one are, see `find`. on_sample: is
        called with each new sample, once it is on disk. owned: claim the cell, and drop the half line that a kill has left;
        false for a worker, whose driver owns the cell: it gets a new file of its own.
        """
        super().__init__()
        self.path, self.cell, self.on_sample, self.owned = path, cell, on_sample, owned
        self.appended = 0
        self._file: IO[bytes] | None = None
        if owned:
            self.enter_context(claim(path.parent))
        try:
            if owned and path.exists():
                whole = max((end for _, end, _ in lines(path)), default=0)
                if whole < path.stat().st_size:
                    os.truncate(path, whole)
            self.reload()
        except BaseException:
            self.close()
            raise

    def reload(self) -> None:
        """Read what is on disk."""
        self._samples, self._contradicted = read_all(self.path.parent, self.cell)

    def __len__(self) -> int:
        return len(self._samples)

    def find(self, task: str, doc_id: int, mark: str, old_mark: str | None = None) -> Sample | None:
        """The recorded sample of a document; mark: its fingerprint.

        old_mark: its fingerprint in lines that do not name their configuration. The folder's config.yaml is the cell's
        then; the row counts them as unverified.
        """
        sample = self._samples.get((task, doc_id, mark))
        if sample is None and old_mark is not None:
            old = self._samples.get((task, doc_id, old_mark))
            sample = old if old is not None and "cell" not in old else None
        return sample

    def append(self, sample: Sample) -> None:
        """Record a finished sample; it is on disk when this returns."""
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._file = open_regular(self.path, flags=flags) if self.owned else self._new_file()
            self.callback(self._close)
        if self.cell:
            sample["cell"] = self.cell
        if key_of(sample) in self._contradicted:
            sample["settles"] = True
        self._file.write(json.dumps(sealed(sample), ensure_ascii=False).encode() + b"\n")  # type: ignore[arg-type]
        self._file.flush()
        os.fsync(self._file.fileno())
        self._samples[key_of(sample)] = sample
        self.appended += 1
        if self.on_sample is not None:
            self.on_sample(sample)

    def _new_file(self) -> IO[bytes]:
        """A worker's next file."""
        stem = self.path.stem.rpartition("-")[0]
        for number in itertools.count():  # earlier attempts at the same unit have left files
            self.path = self.path.with_name(f"{stem}-{number}.jsonl")
            with contextlib.suppress(FileExistsError):
                return open(self.path, "xb")
        raise AssertionError("unreachable")

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a full disk, which `append` has met
                self._file.close()
