"""Units: what is run at a time. A task, a range of documents, and all cells that can share its prefills.

On one machine a group of cells is one unit for what they share, then one for each cell. On a cluster it is ranges of documents.
Everything here is plain data that pickles: a worker composes the cells from the words of the command line, as the driver did.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pqcache.atomic import write_text
from pqcache.harness.config import environment
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.selective import NotApplicable

OWN_PREFILLS = 5  # at least so many samples of a cell are timed with their own prefill
FOLDER = ".launch"  # below `out`: the token and what engines write


@dataclass(frozen=True)
class Unit:
    """A range of documents of cells with the same prompts."""

    cells: tuple[str, ...]  # folder names, Full first
    label: str  # for messages
    first: int = 0  # documents first <= number < stop of every lm-eval task
    stop: int | None = None
    # Runs with nothing else of the run on the host, so that times are kept.
    timed: bool = False
    # Prompts are recorded for all cells that lack them. `only`: what needs a prefill of its own is left to other units.
    shared: Literal["no", "yes", "only"] = "no"
    own: int = 0  # the first answers to so many documents are left to other units
    # A cell of task=latency: the worker writes its row.
    whole: bool = False

    @property
    def name(self) -> str:
        """10 hex digits. The same command has the same units."""
        text = json.dumps([self.cells, self.first, self.stop, self.timed, self.whole, self.shared])
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def documents(self) -> str:
        """The range in words."""
        return f"{self.label}, documents {self.first} to {'the last' if self.stop is None else self.stop - 1}"


@dataclass(frozen=True)
class Failure:
    """Why a cell failed in a unit."""

    reason: str  # one line
    traceback: str = ""
    skipped: bool = False  # its method does not apply

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Of an exception, inside the `except`."""
        if isinstance(error, NotApplicable):
            return cls(" ".join(str(error).split()), skipped=True)
        return cls(" ".join(f"{type(error).__name__}: {error}".split()), traceback.format_exc())


@dataclass(frozen=True)
class Progress:
    """One finished sample, which is on disk."""

    cell: str
    task: str
    doc_id: int
    score: float | None
    draw: int = 0  # the answer's number, where several are drawn
    tpot: float | None = None  # ms of a decode step, where this process has timed it


@dataclass
class UnitResult:
    """How a unit ended."""

    unit: str
    status: Literal["done", "lost", "refused"] = "done"
    shared: int = 0  # prompts that were computed for several answers
    own: int = 0  # samples with a prefill of their own
    computed: list[str] = field(default_factory=list)  # cells that have new samples
    failures: dict[str, Failure] = field(default_factory=dict)  # cell -> why; final, never retried
    reason: str = ""  # one line, of lost and refused units


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


def may_share(group: Sequence[Cell]) -> bool:
    """Whether cells with the same prompts (a group) share prefills wherever a recording fits."""
    first = group[0]
    if first.run.shared_prefill is False or first.run.diagnostics or first.identity["task"]["name"] == "latency":
        return False
    return sum(cell.decode.samples for cell in group) > 1


def own_documents(group: Sequence[Cell], tasks: int) -> int:
    """First documents of each of a task's lm-eval tasks that every cell computes with a prefill of its own, for its times.

    None where several are computed at once or shared_prefill=all: these have no times.
    """
    run = group[0].run
    return math.ceil(OWN_PREFILLS / tasks) if run.batch == 1 and run.shared_prefill != "all" else 0


def ranges(group: Sequence[Cell], *, documents: int, tasks: int, workers: int) -> list[Unit]:
    """The units of one group of `groups` for workers. documents: of its largest lm-eval task; tasks: lm-eval tasks.

    Times count of the first documents alone, which run with nothing else on their host.
    """
    names = tuple(cell.name for cell in group)
    task, batch = group[0].identity["task"]["name"], group[0].run.batch
    label = f"{task}, {len(group)} cells" if len(group) > 1 else group[0].label
    own = 0 if group[0].run.diagnostics else min(documents, own_documents(group, tasks))
    units = [Unit(names, label, 0, own, timed=True)] if own else []
    start = own
    for size in range_sizes(documents - own, workers, batch):
        units.append(Unit(names, label, start, start + size, shared="yes" if may_share(group) else "no"))
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


# -- what workers must see and have ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What all units of a run on workers share."""

    words: tuple[str, ...]  # of the command line, without `launch` and `out`
    cwd: str  # the driver's folder, for relative paths in the words
    out: str  # absolute
    token: tuple[str, str]  # (path, text) of a file that the driver wrote below `out`
    commit: str | None
    versions: Mapping[str, str | None]
    # cell name -> where the driver has its samples: older and smoke cells are elsewhere than in `out`
    folders: Mapping[str, str]

    @classmethod
    def of(cls, plan: RunPlan) -> Job:
        """The job of a plan. Writes its token below `out`."""
        run = plan.cells[0].run
        typed = Path(run.out).parent if run.smoke else Path(run.out)  # a smoke run goes to a folder below it
        path, text = Path(run.out).expanduser().resolve() / FOLDER / "token", secrets.token_hex(16)
        write_text(path, text)
        return cls(
            words=tuple(w for w in plan.words if re.split("[=.]", w.lstrip("+"))[0] not in ("launch", "out")),
            cwd=os.getcwd(),
            out=str(typed.expanduser().resolve()),
            token=(str(path), text),
            commit=environment.git_commit(),
            versions=environment.versions(),
            folders={cell.name: str(cell.folder.resolve()) for cell in plan.cells},
        )

    def differences(self) -> list[str]:
        """What keeps this process from working for the job, one line each."""
        problems = []
        path, text = self.token
        try:
            seen = Path(path).read_text(encoding="utf-8")
        except OSError:
            seen = None
        if seen != text:
            problems.append(f"out={self.out}: this machine does not see the driver's folder (no {path})")
        if not Path(self.cwd).is_dir():
            problems.append(f"{self.cwd}: the driver's working folder does not exist here")
        mine = {"commit": environment.git_commit(), **environment.versions()}
        for name, theirs in {"commit": self.commit, **self.versions}.items():
            if mine.get(name) != theirs and not (name == "commit" and None in (mine[name], theirs)):
                problems.append(f"{name} {mine.get(name)}, but the driver has {theirs}")
        return [f"{socket.gethostname()}: {line}" for line in problems]


class Engine(Protocol):
    """Runs units on workers."""

    workers: int  # units that run at once

    def run(self, job: Job, units: Sequence[Unit], report: Report, *, alone: bool) -> None:
        """Run every unit and report each exactly once as a UnitResult. An engine that does not wait may leave units out.

        A unit whose worker was lost runs again, `retries` times. alone: one worker per host at a time, with nothing else of
        the run on it.
        """

    def close(self) -> None:
        """Let the workers go."""
