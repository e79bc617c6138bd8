"""The documents of a command, counted before it runs: how long their prompts and answers are, and which samples are done."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pqcache.harness.config.cells import Cell
from pqcache.harness.run import models, smoke_models
from pqcache.harness.run.models import LoadedModel
from pqcache.harness.run.session import task_of_cell
from pqcache.harness.run.too_long import TooLong

if TYPE_CHECKING:
    from pqcache.harness.run.session import Session

SPREAD = (5**0.5 - 1) / 2  # multiples of it are spread evenly over 0..1
LEAST_S = 1.0
COUNTED_CHARACTERS = 6_000_000  # prompts beyond this are counted in part: tokenizing takes seconds


@dataclass(frozen=True)
class Document:
    """One prompt."""

    task: str  # lm-eval's
    doc_id: int
    prompt: int  # tokens
    new: int  # most tokens of an answer
    answer: int | None = None  # tokens of the reference answer
    mark: str | None = None  # the sample's fingerprint; None where the prompt was not tokenized
    fed: int = 0  # prompt tokens that go through the decode path
    old_mark: str | None = None  # the same as older samples have it
    longest: int | None = None  # an upper bound of `prompt`, where that is a mean
    draw: int = 0  # the answer's number, where several are drawn

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells the samples of a cell apart."""
        return self.task, self.doc_id, self.draw


@dataclass
class Counted:
    """The documents of cells with the same prompts."""

    documents: list[Document]
    exact: bool  # every prompt was tokenized; else lengths are approximate
    why: str = ""  # why they are approximate
    notes: list[str] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(document.prompt for document in self.documents)

    @property
    def new_tokens(self) -> int:
        return sum(document.new for document in self.documents)

    @property
    def longest(self) -> tuple[int, int]:
        """(prompt, answer) of the longest document in tokens."""
        return max(
            ((document.longest or document.prompt, document.new) for document in self.documents),
            key=sum,
            default=(0, 0),
        )


def text_side(cell: Cell) -> LoadedModel:
    """The cell's tokenizer and prompt protocol, without its weights: `model` is None."""
    options = dict(cell.identity["model"])
    name = options.pop("name")
    if cell.run.smoke:
        return smoke_models.text_side(name, options)
    return models.text_side(name, options)


def count(cell: Cell, session: Session, until: float = math.inf) -> Counted:
    """The cell's documents. Raises OSError or ValueError if data or tokenizer is not at hand.

    until: the moment after which no more prompts are tokenized, but for LEAST_S; those left count as long as one near them.
    """
    from pqcache.harness.run.adapter import HarnessLM
    from pqcache.harness.run.one_cell import requests_of

    loaded = session.text_side(cell, text_side)
    spec, tasks = session.task(cell, loaded)
    nothing: Any = SimpleNamespace()
    lm = HarnessLM(
        loaded,
        cell.method,
        nothing,
        attn=cell.run.attn,
        seed=cell.identity["seed"],
        question_as_decode=cell.run.question_as_decode,
        max_new_tokens=task_of_cell(cell).max_new_tokens,
        facts=nothing,
        tokens=spec.tokens,
        smoke=cell.run.smoke,
        decode=cell.decode,
        known=session.known_prompts(cell),
    )
    requests = requests_of(tasks, cell.run.limit, cell.identity["seed"])
    size = sum(len(str(request.args[0])) for request in requests)
    every = max(1, round(size / COUNTED_CHARACTERS))
    until = max(until, time.monotonic() + LEAST_S)
    read: dict[int, Document] = {}
    skipped: set[int] = set()
    for index in sorted(range(0, len(requests), every), key=lambda i: i * SPREAD % 1):
        if read and time.monotonic() > until:
            break
        request = requests[index]
        try:
            read[index] = _document(lm, tasks["tasks"][str(request.task_name)], request, spec.tokens)
        except TooLong:
            skipped.add(index)
    found: list[Document] = []
    for index, request in enumerate(requests):
        if index in skipped or not read:
            continue
        near = read.get(index) or (found[-1] if found else next(iter(read.values())))
        task, doc_id = str(request.task_name), int(request.doc_id or 0)
        found.append(read.get(index) or Document(task, doc_id, near.prompt, near.new, near.answer))
    whole = len(read) + len(skipped) == len(requests)
    notes = [f"{len(skipped)} prompts are too long for the model and left out"] if skipped else []
    return Counted(found, whole, "" if whole else f"{len(read)} of {len(requests)} prompts were tokenized", notes)


def _document(lm: Any, task: Any, request: Any, tokens: Any) -> Document:
    name, doc_id = str(request.task_name), int(request.doc_id or 0)
    if request.request_type == "generate_until":
        prepared = lm.read(request, tokens=False)
        answer = _answer(lm.loaded, task, request.doc)
        size, marks = prepared.known.tokens, (prepared.known.mark, prepared.question, prepared.known.old_mark)
        return Document(name, doc_id, size, prepared.new_tokens, answer, *marks)
    lm.check_request(request)
    if tokens is not None:
        ids, _, prefill = tokens(request.doc)
        return Document(name, doc_id, prefill, len(ids) - prefill, len(ids) - prefill)
    if request.request_type == "loglikelihood":
        ids, first, _ = lm._pair(str(request.args[0]), str(request.args[1]))
        return Document(name, doc_id, max(1, first - 1), len(ids) - first + 1, len(ids) - first + 1)
    whole = len(lm.loaded.encode(str(request.args[0])))
    return Document(name, doc_id, max(1, whole // 2), whole - whole // 2, whole - whole // 2)


def _answer(loaded: LoadedModel, task: Any, doc: Any) -> int | None:
    """Tokens of the reference answer and an end token; None if the task has no text as its answer."""
    try:
        target = task.doc_to_target(doc)
    except Exception:  # a definition of anyone's
        return None
    if isinstance(target, list) and target:
        target = target[0]
    if not isinstance(target, str) or not target:
        return None
    return len(loaded.tokenizer(target, add_special_tokens=False)["input_ids"]) + 1


def drawn(cell: Cell, counted: Counted) -> Counted:
    """The documents once for each answer that the cell draws."""
    from pqcache.harness.run.prepared import drawn_marks

    decode, seed = cell.decode, cell.identity["seed"]
    if not decode.drawn:
        return counted

    def answer(document: Document, draw: int) -> Document:
        if document.mark is None:
            return replace(document, draw=draw)
        mark, old_mark = drawn_marks(document.mark, document.old_mark or document.mark, decode, seed, draw)
        return replace(document, draw=draw, mark=mark, old_mark=old_mark)

    every = [answer(document, draw) for document in counted.documents for draw in range(decode.samples)]
    return replace(counted, documents=every)


def done(cell: Cell, documents: Iterable[Document]) -> set[tuple[str, int, int]]:
    """The keys of the documents whose sample is on disk. Takes no lock."""
    known: set[tuple] = set()
    for path in sorted(cell.folder.glob("samples*.jsonl")):
        known |= keys(path)
    marks = [(d, mark) for d in documents for mark in (d.mark, d.old_mark or d.mark)]
    return {d.key for d, mark in marks if ((*d.key, None) if mark is None else (d.task, d.doc_id, mark)) in known}


def keys(path: Path) -> set[tuple]:
    """(task, document, fingerprint) of every line, and (task, document, answer, None) for documents that were not tokenized."""
    found: set[tuple] = set()
    with path.open("rb") as file:
        for line in file:
            try:
                sample = json.loads(line)
                key = str(sample["task"]), int(sample["doc_id"])
                found |= {(*key, str(sample["fingerprint"])), (*key, int(sample.get("draw", 0)), None)}
            except (ValueError, KeyError, TypeError):  # a damaged line: its sample is computed again
                continue
    return found
