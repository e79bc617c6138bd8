"""What a command will do: its samples, prefills, tokens, memory and seconds, before any weights are loaded."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.launch import documents, estimate, figures, needs, profile
from pqcache.harness.launch.documents import Counted, Document
from pqcache.harness.launch.profile import Profile
from pqcache.harness.run import models, units
from pqcache.harness.run.session import Session, model_key, task_of_cell
from pqcache.harness.run.timing import WARM_TOKENS

WARM_STEPS = 2  # decode steps of the run that warms a cell up


@dataclass
class CellSurvey:
    """One cell of a command."""

    cell: Cell
    counted: Counted
    done: set[tuple[str, int, int]]  # their keys
    memory: estimate.Memory | None
    device: str
    profile: Profile | None
    # documents whose prefill another cell of the command, or another answer, computes
    served: set[tuple[str, int, int]] = field(default_factory=set)
    records: set[tuple[str, int, int]] = field(default_factory=set)  # documents whose prefill it records for others

    @property
    def missing(self) -> list[Document]:
        return [d for d in self.counted.documents if d.key not in self.done]

    @property
    def prefills(self) -> int:
        """Forward passes over a prompt, warming up apart."""
        return sum(d.key not in self.served for d in self.missing)

    def sample_s(self, document: Document, *, most: bool = False) -> float | None:
        """Seconds of one sample; None without a profile. most: the answer uses all its tokens, else as the reference."""
        if self.profile is None:
            return None
        method = self.cell.identity["method"]["name"]
        prompt, key = document.prompt - document.fed, document.key
        answer = document.new if most or document.answer is None else min(document.answer, document.new)
        seconds = (answer - 1 + document.fed) * self.profile.step_s(method, document.prompt)
        seconds += self.profile.document_s * document.prompt / 1000
        if key in self.served:
            return seconds + self.profile.build_s(method, prompt)
        seconds += self.profile.own_prefill_s(method, prompt)
        return seconds + (self.profile.record_s(prompt) if key in self.records else 0.0)

    def seconds(self, *, most: bool = False) -> float | None:
        """Seconds of the cell's missing samples, warming up included; None without a profile."""
        missing = self.missing
        if self.profile is None:
            return None
        if not missing:
            return 0.0
        total = math.fsum(self.sample_s(document, most=most) or 0.0 for document in missing)
        if self.cell.run.smoke:
            return total
        method, warm = self.cell.identity["method"]["name"], min(WARM_TOKENS, missing[0].prompt)
        return total + self.profile.own_prefill_s(method, warm) + WARM_STEPS * self.profile.step_s(method, warm)


@dataclass
class Survey:
    """All cells of a command."""

    cells: list[CellSurvey]
    skipped: int  # cells whose method does not apply
    shared: bool  # cells share prefills
    notes: list[str]
    downloads: list[needs.Download] = field(default_factory=list)
    tried: bool = True  # whether each method can share was tried

    @property
    def samples(self) -> int:
        return sum(len(one.counted.documents) for one in self.cells)

    @property
    def done(self) -> int:
        return sum(len(one.done) for one in self.cells)

    @property
    def prefills(self) -> int:
        return sum(one.prefills for one in self.cells)

    @property
    def prompt_tokens(self) -> int:
        """Of the missing samples, each cell's."""
        return sum(d.prompt for one in self.cells for d in one.missing)

    @property
    def prefill_tokens(self) -> int:
        """Of the distinct prefills."""
        return sum(d.prompt for one in self.cells for d in one.missing if d.key not in one.served)

    @property
    def new_tokens(self) -> int:
        return sum(d.new for one in self.cells for d in one.missing)

    @property
    def exact(self) -> bool:
        return all(one.counted.exact for one in self.cells)

    def seconds(self, *, most: bool = False) -> float | None:
        """Seconds of the whole command, start-up included; None if a cell has no profile."""
        parts = [one.seconds(most=most) for one in self.cells]
        if not parts or any(part is None for part in parts):
            return None
        start = max((one.profile.start_s for one in self.cells if one.profile is not None), default=0.0)
        return start + math.fsum(part for part in parts if part is not None)


def survey(plan: RunPlan, session: Session, *, measured: bool = True, counting_s: float = math.inf) -> Survey:
    """Count what a checked plan will do. Nothing is downloaded.

    measured: measure every method's cache on a small model, and whether it can share a prefill; else the cache is an upper bound.
    counting_s: seconds after which the documents of further tasks count by published sizes.
    """
    with needs.offline():
        return _survey(plan, session, measured, time.monotonic() + counting_s)


def _survey(plan: RunPlan, session: Session, measured: bool, until: float) -> Survey:
    cells = [cell for cell in plan.cells if cell.skip is None and cell.method is not None]
    counts: dict[str, Counted] = {}
    notes: list[str] = []
    found = []
    profiles: dict[str, Profile | None] = {}
    for cell in cells:
        same = [cell.identity[key] for key in ("model", "task", "seed", "question_as_decode")]
        key = json.dumps([same, cell.run.limit, cell.run.smoke], sort_keys=True)
        if key not in counts:
            counts[key] = _count(cell, session, until)
            notes += [*([counts[key].why] if counts[key].why else []), *counts[key].notes]
        counted = documents.drawn(cell, counts[key])
        if model_key(cell) not in profiles:
            profiles[model_key(cell)] = profile_of(cell)
        found.append(
            CellSurvey(
                cell,
                counted,
                documents.done(cell, counted.documents),
                needs.memory_of(cell, counted, measured=measured),
                needs.device_of(cell),
                profiles[model_key(cell)],
            )
        )
    shared = _share(plan, found, measured)
    return Survey(
        found, len(plan.cells) - len(cells), shared, list(dict.fromkeys(notes)), needs.downloads(cells), measured
    )


def _count(cell: Cell, session: Session, until: float) -> Counted:
    """The cell's documents, from the data or, after the moment `until`, from published sizes."""
    task, limit, model = task_of_cell(cell), cell.run.limit, cell.identity["model"]["name"]
    if task.name == "latency":
        options = task.options
        rounds = [Document("latency", i, options.length, options.new_tokens) for i in range(options.rounds)]
        return Counted(rounds, True)
    try:
        if time.monotonic() > until:
            raise OSError("it would take too long to read")
        return documents.count(cell, session, until)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        source = figures.figures().get(task.name.partition("_")[0] if "longbench" in task.name else task.name, {})
        origin = source.get("source", "the options of the task")
        why = f"{task.name}: lengths are approximate, by {origin}; data or tokenizer is not at hand ({reason[:80]} ...)"
        room = cell.identity["model"].get("max_length")
        return Counted(figures.documents(task, limit, model, room), False, why)


def profile_of(cell: Cell) -> Profile | None:
    """The stored profile of the cell's model on its device; None for a worker's device, which is not known here."""
    options, device = cell.identity["model"], needs.device_of(cell)
    if device in (estimate.WORKER, estimate.SPREAD):
        return None
    try:
        config = needs.config_of(cell)
        dtype = models.dtype_name(config, options)
        return profile.load(Path(cell.run.cache_dir).expanduser(), config, dtype, device)
    except (OSError, ValueError, RuntimeError, AssertionError):
        return None


def _share(plan: RunPlan, found: Sequence[CellSurvey], measured: bool) -> bool:
    """Mark the documents whose prefill another cell computes. Returns whether any cells share.

    measured: try every method that no profile knows; else it counts as one that can use another's prefill.
    """
    by_name = {one.cell.name: one for one in found}
    any_shared = False
    for group in units.groups([one.cell for one in found]):
        members = [by_name[cell.name] for cell in group]
        if not _wanted(plan, members) or members[0].cell.identity["task"]["name"] == "latency":
            continue
        members = [one for one in members if _shares(one, measured)]
        tasks = {document.task for document in members[0].counted.documents} if members else set()
        own = units.own_documents(max(1, len(tasks)), members[0].cell.run.batch if members else 1)
        if sum(one.cell.decode.samples for one in members) > 1:
            any_shared = True
            _serve(members, own)
    return any_shared


def _serve(members: Sequence[CellSurvey], own: int) -> None:
    recorder: dict[tuple[str, int], CellSurvey] = {}
    for one in members:
        for document in one.missing:
            prompt = document.task, document.doc_id
            if document.doc_id < own and document.draw == 0:
                continue
            if prompt in recorder:
                one.served.add(document.key)
            else:
                recorder[prompt] = one
                one.records.add(document.key)


def _wanted(plan: RunPlan, members: Sequence[CellSurvey]) -> bool:
    """shared_prefill, with auto resolved: in sweeps and for several answers to a prompt, where the recording fits."""
    value = members[0].cell.run.shared_prefill
    if value != "auto":
        return bool(value)
    places = [
        estimate.recording_place(one.memory, one.device) if one.memory is not None else estimate.DEVICE
        for one in members
    ]
    return (plan.sweep or members[0].cell.decode.samples > 1) and None not in places


def _shares(one: CellSurvey, measured: bool) -> bool:
    name = one.cell.identity["method"]["name"]
    if one.profile is not None and name in one.profile.methods:
        return one.profile.shares(name)
    if not measured:
        return True
    try:
        return estimate.shares(needs.config_of(one.cell), one.cell.method)
    except (OSError, ValueError):
        return True


def weights(found: Survey) -> dict[str, float]:
    """Cell name -> the weight of one of its samples: seconds if there is a profile, else tokens."""
    result = {}
    for one in found.cells:
        missing = one.missing
        seconds = one.seconds()
        total = seconds if seconds is not None else float(sum(d.prompt + 4 * d.new for d in missing))
        result[one.cell.name] = total / len(missing) if missing else 0.0
    return result
