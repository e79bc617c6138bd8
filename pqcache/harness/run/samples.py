"""samples.jsonl: one line per finished sample, safe against being killed at any byte.

A line is appended, flushed and synced before the next sample starts. A sample is looked up by its task, document number
and fingerprint (weights, model input, generation settings), so that a line of other weights or another prompt is never
used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, TypedDict

if TYPE_CHECKING:
    from pqcache.harness.config.environment import Facts
    from pqcache.selective import GenerationResult


class Busy(RuntimeError):
    """Another process is running this cell."""


class Sample(TypedDict):
    """One finished sample. Times in seconds on a synchronised clock, bytes measured by the ledger."""

    task: str  # the lm-eval task
    doc_id: int  # its document's number in that task
    fingerprint: str  # of the weights, the token ids fed to the model and the generation settings
    response: str  # the answer, cut at the stop strings
    score: float | None  # 0..100; None where the task needs more than this answer to score it
    new_tokens: int  # tokens generated, eos included
    prompt_tokens: int
    question_tokens: int  # prompt tokens fed through the decode path
    # Prompt submitted -> first token. None: another cell's prefill was used. With diagnostics, times include measuring.
    prefill_s: float | None
    # Prompt submitted -> second token. None: one token was generated, or another cell's prefill was used.
    tt2t_s: float | None
    step_s: list[float]  # every decode step
    index_build_s: float
    budget_tokens: float | None  # tokens planned per layer and KV head; None: the method ignores the budget
    attended_tokens: float | None  # None without a decode step
    attended_tokens_all_layers: float | None
    resident_bytes: dict[str, float]  # tier -> bytes after the last step
    peak_bytes: dict[str, float]
    bytes_per_step: dict[str, float]
    extra: dict[str, Any]  # what the method reports of itself
    attn: str  # the dense attention of prefill
    device: str  # caption of the machine that computed it
    git_commit: str | None
    versions: dict[str, str | None]


def fingerprint(ids: Sequence[int], settings: dict[str, Any]) -> str:
    """16 hex digits that identify a model input and the settings of its generation, not the method."""
    text = json.dumps([list(ids), settings], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_sample(
    result: GenerationResult,
    *,
    task: str,
    doc_id: int,
    mark: str,
    response: str,
    score: float | None,
    question_tokens: int,
    attn: str,
    facts: Facts,
) -> Sample:
    """The line of one generation. mark: its fingerprint."""
    return {
        "task": task,
        "doc_id": doc_id,
        "fingerprint": mark,
        "response": response,
        "score": score,
        "new_tokens": len(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "question_tokens": question_tokens,
        "prefill_s": result.prefill_s,
        "tt2t_s": result.tt2t_s,
        "step_s": [round(s, 7) for s in result.step_s],
        "index_build_s": result.index_build_s,
        "budget_tokens": result.budget_tokens,
        "attended_tokens": result.attended_tokens,
        "attended_tokens_all_layers": result.attended_tokens_all_layers,
        "resident_bytes": dict(result.resident_bytes),
        "peak_bytes": dict(result.peak_bytes),
        "bytes_per_step": dict(result.bytes_per_step),
        "extra": {**result.extra, **({"index_work_s": result.index_work_s} if result.index_work_s else {})},
        "attn": attn,
        "device": facts["device"],
        "git_commit": facts["git_commit"],
        "versions": dict(facts["versions"]),
    }


class SampleLog:
    """The samples of one cell: those on disk, and an append-only file for new ones.

    Opening it takes a lock, so that two processes cannot run the same cell at once, and drops a half-written last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        self._drop_half_line()
        self._samples: dict[tuple[str, int, str], Sample] = {}
        self._file.seek(0)
        for line in self._file:
            sample = _read(line)
            if sample is not None:
                self._samples[_key(sample)] = sample

    def _drop_half_line(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)

    def __len__(self) -> int:
        return len(self._samples)

    def find(self, task: str, doc_id: int, mark: str) -> Sample | None:
        """The recorded sample of a document; mark: its fingerprint."""
        return self._samples.get((task, doc_id, mark))

    def append(self, sample: Sample) -> None:
        """Record a finished sample; it is on disk when this returns."""
        self._file.write(json.dumps(sample, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._samples[_key(sample)] = sample

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_locked(path: Path) -> IO[bytes]:
    """The file for reading and appending, locked until it is closed. Raises Busy if another process has it."""
    file = open(path, "ab+")  # noqa: SIM115 - its caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Busy(f"{path.parent}: another process is running this cell") from None
    except OSError:
        pass  # a file system without locks
    return file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a cell's lock (path: its samples.jsonl). Raises Busy if another process has it."""
    file = _open_locked(path)
    try:
        yield
    finally:
        file.close()


def _key(sample: Sample) -> tuple[str, int, str]:
    return sample["task"], sample["doc_id"], sample["fingerprint"]


def _read(line: bytes) -> Sample | None:
    """A sample from its line. None for a damaged line: its sample is computed again."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    complete = isinstance(value, dict) and Sample.__annotations__.keys() <= value.keys()
    return value if complete else None
