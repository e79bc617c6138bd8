"""Units: what a worker runs at a time. A model, a task, a range of documents, and all cells that can share its prefills.

Everything here is plain data that pickles: a worker composes the cells from the words of the command line, as the driver did.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pqcache.harness.config.cells import Cell

OWN_PREFILLS = 5  # at least so many samples of a cell are timed with their own prefill


@dataclass(frozen=True)
class Job:
    """What all units of a run share."""

    words: tuple[str, ...]  # of the command line, without `launch`
    cwd: str  # the driver's folder, for relative paths in the words
    out: str  # absolute
    token: tuple[str, str]  # (path, text) of a file that the driver wrote below `out`
    paths: Mapping[str, str]  # local paths that the cells name -> digest of what is there
    source: str  # digest of the packages' source files
    commit: str | None
    versions: Mapping[str, str | None]
    # cell name -> where the driver has its samples: older and smoke cells lie elsewhere than in `out`
    folders: Mapping[str, str]


@dataclass(frozen=True)
class Unit:
    """A range of documents of cells with the same prompts."""

    model: str  # cells with the same value use the same loaded model
    cells: tuple[str, ...]  # folder names, Full first
    label: str  # for messages
    first: int = 0  # documents first <= number < stop of every lm-eval task
    stop: int | None = None
    # Run with nothing else of the run on the host; each cell computes its own prefills, and times are kept.
    timed: bool = False
    # A cell of task=latency: the worker writes its row.
    whole: bool = False

    @property
    def name(self) -> str:
        """10 hex digits. The same command has the same units."""
        text = json.dumps([self.cells, self.first, self.stop, self.timed, self.whole])
        return hashlib.sha256(text.encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Failure:
    """Why a cell failed in a unit."""

    reason: str  # one line
    traceback: str


@dataclass(frozen=True)
class Progress:
    """One sample that a worker has finished."""

    unit: str
    cell: str
    task: str
    doc_id: int
    score: float | None
    draw: int = 0  # the answer's number, where several are drawn


def progress_of(unit: str, cell: str, sample: Mapping[str, Any]) -> Progress:
    """What is told of a line of a sample log. Raises KeyError if it is none."""
    return Progress(unit, cell, sample["task"], sample["doc_id"], sample["score"], sample.get("draw", 0))


@dataclass(frozen=True)
class UnitResult:
    """How a unit ended."""

    unit: str
    status: Literal["done", "lost", "refused"]
    attempt: int = 0
    samples: int = 0  # computed by this attempt
    prefills: int = 0  # distinct forward passes of a prompt
    failures: Mapping[str, Failure] = field(default_factory=dict)  # cell -> why; final, never retried
    host: str = ""
    seconds: float = 0.0
    reason: str = ""  # one line, of lost and refused units

    @classmethod
    def lost(cls, unit: Unit, attempt: int, reason: str) -> UnitResult:
        """A unit whose worker was lost more often than it may be retried."""
        return cls(unit.name, "lost", attempt, reason=reason)

    @classmethod
    def refused(cls, unit: Unit, reason: str) -> UnitResult:
        """A unit that no worker would run."""
        return cls(unit.name, "refused", reason=reason)


# What an engine tells its driver.
Report = Callable[[UnitResult | Progress], None]


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Groups of cells with the same model and prompts; they differ in the method and its budget. Full comes first."""
    by_prompts: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.method is None or cell.skip is not None:
            continue
        same = {key: cell.identity[key] for key in ("model", "task", "seed", "question_as_decode")}
        alone = cell.name if cell.run.diagnostics or cell.identity["task"]["name"] == "latency" else None
        how = [cell.run.attn, cell.run.prefill_chunk, cell.run.batch, cell.run.limit]
        key = json.dumps([same, cell.device, cell.unhashed, *how, alone], sort_keys=True)
        by_prompts.setdefault(key, []).append(cell)
    return [sorted(group, key=lambda cell: cell.identity["method"]["name"] != "full") for group in by_prompts.values()]


def own_documents(tasks: int, batch: int = 1) -> int:
    """First documents of each of a task's lm-eval tasks that every cell computes with a prefill of its own, for its times.

    None where several are computed at once: these have no times.
    """
    return math.ceil(OWN_PREFILLS / tasks) if batch == 1 else 0


def make_units(group: Sequence[Cell], model: str, *, documents: int, tasks: int, workers: int) -> list[Unit]:
    """The units of one group of `groups`. documents: of its largest lm-eval task; tasks: number of lm-eval tasks."""
    names = tuple(cell.name for cell in group)
    task = group[0].identity["task"]["name"]
    label = f"{task}, {len(group)} cells" if len(group) > 1 else group[0].label
    if task == "latency":
        return [Unit(model, names, label, timed=True, whole=True)]
    batch = group[0].run.batch
    own = 0 if group[0].run.diagnostics else min(documents, own_documents(tasks, batch))
    units = [Unit(model, names, label, 0, own, timed=True)] if own else []
    start = own
    for size in range_sizes(documents - own, workers, batch):
        units.append(Unit(model, names, label, start, start + size))
        start += size
    return units


def range_sizes(documents: int, workers: int, batch: int = 1) -> list[int]:
    """Documents of each unit: one unit a worker shares half of what is left, then again half of the rest, down to one batch.

    Large units first, small ones last, so that all workers end at nearly the same time (factoring; Hummel, Schonberg and
    Flynn 1992). All but the last are whole batches.
    """
    sizes: list[int] = []
    left = documents
    while left > 0:
        size = math.ceil(left / (2 * workers * batch)) * batch
        for _ in range(workers):
            if left > 0:
                sizes.append(min(size, left))
                left -= sizes[-1]
    return sizes
