"""samples*.jsonl: one line per finished sample, safe against being killed at any byte.

A line is appended, flushed and synced before the next sample starts. A sample is looked up by its task, document number
and fingerprint (weights, model input, generation settings), so that a line of other weights or another prompt is never
used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, TypedDict

from pqcache.harness.run.claims import Claim

if TYPE_CHECKING:
    from pqcache.harness.config.environment import Facts
    from pqcache.selective import GenerationResult


class Missing(RuntimeError):
    """A sample is not in the log, and the model has no weights to compute it."""


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

    Samples of workers lie beside samples.jsonl, as samples-<unit>-<attempt>.jsonl. All are read as one.
    """

    def __init__(self, path: Path) -> None:
        """A cell's samples.jsonl. Takes the cell's claim, raises Busy if a live process has it, and drops a half-written line."""
        self.path = path
        self._claim: Claim | None = Claim(path.parent)
        try:
            self._file: IO[bytes] | None = open(path, "ab+")  # noqa: SIM115 - `close` closes it
            _drop_half_line(self._file)
            self._samples = _read_all(path.parent, path.stem)
        except BaseException:
            self._claim.release()
            raise

    @classmethod
    def of_worker(cls, folder: Path, unit: str, attempt: int) -> SampleLog:
        """A new file of its own for a worker, which has no claim. `attempt` is raised while the file exists."""
        while True:
            path = folder / f"samples-{unit}-{attempt}.jsonl"
            try:
                file = open(path, "xb")  # noqa: SIM115 - `close` closes it
            except FileExistsError:
                attempt += 1
                continue
            return cls._without_claim(folder, path, file)

    @classmethod
    def to_read(cls, folder: Path) -> SampleLog:
        """A cell's samples. Nothing can be appended."""
        return cls._without_claim(folder, folder / "samples.jsonl", None)

    @classmethod
    def _without_claim(cls, folder: Path, path: Path, file: IO[bytes] | None) -> SampleLog:
        log = cls.__new__(cls)
        log.path, log._claim, log._file = path, None, file
        log._samples = _read_all(folder, "samples")
        return log

    def __len__(self) -> int:
        return len(self._samples)

    def find(self, task: str, doc_id: int, mark: str) -> Sample | None:
        """The recorded sample of a document; mark: its fingerprint."""
        return self._samples.get((task, doc_id, mark))

    def append(self, sample: Sample) -> None:
        """Record a finished sample; it is on disk when this returns. Raises Busy if the claim was lost."""
        if self._file is None:
            raise ValueError(f"{self.path}: was opened to be read")
        if self._claim is not None:
            self._claim.check()
        self._file.write(json.dumps(sample, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._samples[_key(sample)] = sample

    def close(self) -> None:
        """Close the file. A worker's file without samples is removed."""
        if self._file is not None:
            empty = self._claim is None and self._file.tell() == 0
            self._file.close()
            if empty:
                self.path.unlink(missing_ok=True)
        if self._claim is not None:
            self._claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sample_files(folder: Path, stem: str = "samples") -> list[Path]:
    """A cell's files of samples: those of workers, then samples.jsonl."""
    own = folder / f"{stem}.jsonl"
    return [*sorted(folder.glob(f"{stem}-*.jsonl")), *([own] if own.exists() else [])]


def _read_all(folder: Path, stem: str) -> dict[tuple[str, int, str], Sample]:
    """Key -> sample. Of two with the same key the later one counts, but none without times replaces one with times."""
    samples: dict[tuple[str, int, str], Sample] = {}
    for path in sample_files(folder, stem):
        for line in path.read_bytes().split(b"\n"):
            sample = _read(line)
            if sample is None:
                continue
            known = samples.get(_key(sample))
            if known is None or known["tt2t_s"] is None or sample["tt2t_s"] is not None:
                samples[_key(sample)] = sample
    return samples


def _drop_half_line(file: IO[bytes]) -> None:
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        file.truncate(whole)


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
