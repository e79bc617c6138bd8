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
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypedDict, cast, get_type_hints

from filelock import FileLock, Timeout

from pqcache.atomic import write_text
from pqcache.harness.config.environment import Facts
from pqcache.harness.config.options import fits, say_once
from pqcache.selective import GenerationResult

Key = tuple[str, int, str]  # task, document, fingerprint
PROMPT_END = 300  # characters of a prompt that its line keeps
DIFFERS = "differs_alone"  # in a sample's `extra`, with batch_check: 1 if the answer alone is another one
# What a sample takes as it is from the result of a generation.
OF_THE_RESULT = (
    "prompt_tokens prefill_s tt2t_s index_build_s budget_tokens attended_tokens attended_tokens_all_layers"
    " resident_bytes peak_bytes bytes_per_step"
).split()
# What two lines of one sample must agree on. Times, bytes and what a method reports of itself may differ.
SAYS = ("response", "score", "new_tokens", "prompt_tokens", "question_tokens")
LOCK, OWNER = ".lock", "owner.json"


class Missing(RuntimeError):
    """A sample is not in the log, and the model has no weights to compute it."""


class SampleMarks(TypedDict, total=False):
    """What older lines lack."""

    prompt_sha256: str  # of the text that the tokenizer got; of the token ids where a text is scored
    prompt_end: str  # the last 300 characters that the model read; with a scored text, that one
    prompt: str  # all of it, with samples=full
    target: str | list[str]  # the right answer, or the right answers, where the task has one
    cell: str  # the configuration's 16 hex digits (config.identity)
    draw: int  # of tokens that were drawn: the number of the answer, 0 .. decode.samples - 1
    failed: str  # why it is no answer: it has no score and no times
    settles: bool  # computed again because earlier lines of the same sample contradict each other


class Sample(SampleMarks):
    """One finished sample. Times in seconds on a synchronised clock, bytes measured by the ledger."""

    task: str  # the lm-eval task
    doc_id: int  # its document's number in that task
    fingerprint: str  # of the weights, the token ids fed to the model and the generation settings
    response: str  # the answer, cut at the stop strings; with model.thinking=true also the thoughts before it
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


def prompt_marks(text: str, sha256: str, *, whole: bool = False) -> SampleMarks:
    """What a line keeps of its prompt. text: its end, or with `whole` all of it."""
    marks = SampleMarks(prompt_sha256=sha256, prompt_end=text[-PROMPT_END:])
    if whole:
        marks["prompt"] = text
    return marks


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


def fingerprint(ids: Sequence[int], settings: dict[str, Any]) -> str:
    """16 hex digits that identify a model input and the settings of its generation, not the method."""
    text = json.dumps([list(ids), settings], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def drawn_mark(mark: str, settings: dict[str, Any]) -> str:
    """The fingerprint of a drawn answer. mark: of the greedy one. settings: how it is drawn, its number included."""
    text = json.dumps([mark, settings], sort_keys=True)
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
    work = {"index_work_s": result.index_work_s} if result.index_work_s else {}
    own = {name: getattr(result, name) for name in OF_THE_RESULT}
    sample = {
        **dict(zip(("task", "doc_id", "fingerprint"), key, strict=True)),
        "response": response,
        "score": score,
        "new_tokens": len(result.token_ids),
        "question_tokens": question_tokens,
        **{name: dict(value) if isinstance(value, dict) else value for name, value in own.items()},
        "step_s": [round(s, 7) for s in result.step_s],
        "extra": {**result.extra, **work},
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
        write_text(folder / OWNER, json.dumps(owner) + "\n")
        yield
    finally:
        lock.release()


def _owner(folder: Path) -> str:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "its owner is not known yet"


# -- the log -----------------------------------------------------------------------------------------------------------


class SampleLog:
    """The samples of one cell: those on disk, and an append-only file for new ones.

    Samples of workers are beside samples.jsonl, as samples-<unit>-<number>.jsonl. All are read as one. A file is made with its
    first line.
    """

    def __init__(
        self,
        path: Path,
        cell: str = "",
        on_sample: Callable[[Sample], None] | None = None,
        *,
        owned: bool = True,
        read_only: bool = False,
    ) -> None:
        """A cell's log. Raises Busy if another process has the cell.

        cell: the configuration's mark. Lines of another one are not used; lines without one are, see `find`. on_sample: is
        called with each new sample, once it is on disk. owned: claim the cell, and drop the half line that a kill has left.
        """
        self.path, self.cell, self.on_sample, self.owned, self.read_only = path, cell, on_sample, owned, read_only
        self.appended = 0
        self._file: IO[bytes] | None = None
        self._stack = ExitStack()  # what ends with the log
        if owned:
            self._stack.enter_context(claim(path.parent))
        try:
            if owned and path.exists():
                _drop_half_line(path)
            self.reload()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_worker(
        cls, folder: Path, unit: str, cell: str = "", on_sample: Callable[[Sample], None] | None = None
    ) -> SampleLog:
        """A log with a new file of its own for a worker: its driver owns the cell."""
        return cls(folder / f"samples-{unit}-0.jsonl", cell, on_sample, owned=False)

    @classmethod
    def to_read(cls, folder: Path, cell: str = "") -> SampleLog:
        """A cell's samples. Nothing can be appended."""
        return cls(folder / "samples.jsonl", cell, owned=False, read_only=True)

    def reload(self) -> None:
        """Read what is on disk."""
        self._samples, self._contradicted = _read_all(self.path.parent, self.cell)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        """The recorded samples, in the order of their lines."""
        return iter(self._samples.values())

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
        if self.read_only:
            raise ValueError(f"{self.path}: was opened to be read")
        if self._file is None:
            self._file = self._open()
        if self.cell:
            sample["cell"] = self.cell
        if _key(sample) in self._contradicted:
            sample["settles"] = True
        self._file.write(json.dumps(sample, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._samples[_key(sample)] = sample
        self.appended += 1
        if self.on_sample is not None:
            self.on_sample(sample)

    def _open(self) -> IO[bytes]:
        if self.owned:
            return open(self.path, "ab")
        stem = self.path.stem.rpartition("-")[0]
        for number in itertools.count():  # earlier attempts at the same unit have left files
            self.path = self.path.with_name(f"{stem}-{number}.jsonl")
            with contextlib.suppress(FileExistsError):
                return open(self.path, "xb")
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the file and let the cell go."""
        if self._file is not None:
            self._file.close()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sample_files(folder: Path) -> list[Path]:
    """A cell's files of samples: those of workers, then samples.jsonl."""
    own = folder / "samples.jsonl"
    return [*sorted(folder.glob("samples-*.jsonl")), *([own] if own.exists() else [])]


def _read_all(folder: Path, cell: str) -> tuple[dict[Key, Sample], set[Key]]:
    """(key -> sample, the keys whose lines contradict each other). Lines of another cell are left out.

    Of two that say the same the later one counts, but none without times replaces one with times. Contradictory lines
    are left out until the sample is computed again.
    """
    samples: dict[Key, Sample] = {}
    contradicted: set[Key] = set()
    for path in sample_files(folder):
        bad: list[int] = []
        foreign = 0
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            sample = _read(line)
            if sample is None:
                bad += [number] if line.strip() else []
                continue
            if cell and sample.get("cell", cell) != cell:
                foreign += 1
                continue
            key = _key(sample)
            known = samples.get(key)
            if known is not None and known.get("settles", False) != sample.get("settles", False):
                if sample.get("settles", False):
                    contradicted.discard(key)
                    samples[key] = sample
                continue
            if known is not None and any(known[name] != sample[name] for name in SAYS):  # type: ignore[literal-required]
                contradicted.add(key)
            if known is None or known["tt2t_s"] is None or sample["tt2t_s"] is not None:
                samples[key] = sample
        if bad:
            say_once(f"{path}: {len(bad)} lines are no samples (the first is line {bad[0]}); they are computed again")
        if foreign:
            say_once(f"{path}: {foreign} samples are of another configuration; they are not used")
    for key in contradicted:
        say_once(f"{folder}: the lines of {key[0]} sample {key[1]} contradict each other; it is computed again")
        del samples[key]
    return samples, contradicted


def _drop_half_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _key(sample: Sample) -> Key:
    return sample["task"], sample["doc_id"], sample["fingerprint"]


def _read(line: bytes) -> Sample | None:
    """A sample from its line. None for a damaged line: its sample is computed again."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    marks = SampleMarks.__annotations__
    whole = all(fits(value[key], kind) if key in value else key in marks for key, kind in _kinds().items())
    return cast(Sample, value) if whole else None


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Sample)
