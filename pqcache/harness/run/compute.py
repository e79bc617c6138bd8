"""The one loop that computes samples, on this machine and in workers: every request of a unit, by every cell that lacks it.

    result = compute(session, unit, members)

Cells of a unit answer a prompt in turn, from one prefill where they can share it. An exception fails its cell with the
traceback; the other cells go on. A prompt that cannot be shared is named once, and the others are shared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pqcache.harness.config.cells import Cell
from pqcache.harness.config.options import one_line
from pqcache.harness.run import batches, latency_rounds
from pqcache.harness.run.one_cell import make_adapter
from pqcache.harness.run.prompts import TooLong
from pqcache.harness.run.samples import SampleLog
from pqcache.harness.run.session import Session
from pqcache.harness.run.sharing import Recordings
from pqcache.harness.run.units import Failure, Unit, UnitResult
from pqcache.selective import NotApplicable, OwnPrefill, Prefill, attach

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pqcache.harness.run.adapter import HarnessLM

BAR_AFTER_S = 0.5  # a cell whose samples are all on disk has no bar
STRIKES = 3  # a cell that fails at so many shared prompts in a row is left to its own unit


@dataclass
class Member:
    """A cell of a unit."""

    cell: Cell
    log: SampleLog
    lm: HarnessLM | None = None  # once it was needed
    strikes: int = 0
    alone: bool = False  # cannot share prefills, or fails where it does

    def adapter(self, session: Session) -> HarnessLM:
        """The cell's method behind lm-eval's interface. Raises what keeps the cell from running."""
        if self.lm is None:
            self.lm = make_adapter(session, self.cell, self.log)
        return self.lm


def compute(session: Session, unit: Unit, members: Sequence[Member]) -> UnitResult:
    """Compute what the members' logs lack of a unit; every finished sample is on disk."""
    run = _Run(session, unit, list(members))
    try:
        run.run()
    finally:
        run.count()
    return run.result


class _Run:
    """One unit while it runs."""

    def __init__(self, session: Session, unit: Unit, members: list[Member]) -> None:
        self.session, self.unit, self.members = session, unit, members
        self.result = UnitResult(unit.name)
        run = members[0].cell.run
        self.recordings = Recordings(run.shared_prefill)
        self.batch = run.batch
        self.before = {member.cell.name: member.log.appended for member in members}
        self.served = 0  # samples that were answered from a recording

    def run(self) -> None:
        if self.unit.whole:
            for member in self.members:
                self._guard(member, partial(latency_rounds.write_row, self.session, member.cell, member.log))
            return
        for member in self.members:
            self._guard(member, partial(self._begin, member))
        if not (able := self._able()):
            return
        first = able[0]
        assert first.lm is not None
        loaded = first.lm.loaded
        requests = self.session.requests(first.cell, loaded)
        requests = [request for request in requests if self.unit.has(int(request.doc_id or 0))]
        with (
            attach(loaded.model),
            tqdm(total=len(requests), desc=self.unit.label, unit="prompt", disable=None, delay=BAR_AFTER_S, leave=False)
            as bar,
        ):  # fmt: skip
            for member in able:
                member.lm.within.bar = bar  # type: ignore[union-attr]
            if self.batch > 1:  # all of them are generated: check_task
                self._batches(requests, bar)
                return
            for request in requests:
                self._request(request)
                bar.update()

    def _begin(self, member: Member) -> None:
        lm = member.adapter(self.session)
        lm.timed = self.unit.timed
        lm.warm = lm.warm or not self.unit.timed  # times that are not kept need no warm kernels

    def _able(self) -> list[Member]:
        return [member for member in self.members if member.cell.name not in self.result.failures]

    # -- one prompt, or a batch of them --------------------------------------------------------------------------------

    def _request(self, request: Instance) -> None:
        """Answer one request by every cell that lacks it."""
        try:
            todo = self._lacking([request])
        except TooLong:
            return
        text = request.request_type == "generate_until"
        if text and self.unit.shared != "no" and len(todo) > 1:
            self._share([request], todo)
        if self.unit.shared == "only":
            return
        for member, lm, draw in todo:
            if text:
                self._guard(member, partial(lm.answer, request, draw=draw))
            else:
                self._guard(member, partial(lm.score_all, request))

    def _batches(self, requests: Sequence[Instance], bar: Any) -> None:
        """Answer all requests by every cell, several at a time."""
        if self.unit.shared != "no":
            asks = [(request, 0) for request in requests]
            lm = self._able()[0].lm
            assert lm is not None
            for group in batches.in_batches(lm, asks, lambda ask: bool(self._lacking([ask[0]]))):
                todo = self._lacking([request for request, _ in group])
                if len(todo) > 1:
                    self._share([request for request, _ in group], todo)
        if self.unit.shared == "only":
            return

        def alone(lm: HarnessLM) -> None:
            batches.fill(lm, requests, bar.update)
            batches.check(lm, requests)

        for member in self._able():
            assert member.lm is not None
            self._guard(member, partial(alone, member.lm))

    def _lacking(self, requests: Sequence[Instance]) -> list[tuple[Member, HarnessLM, int]]:
        """The answers, by cell and number, that all of these requests lack. Raises TooLong."""
        first = int(self.batch == 1 and any(int(request.doc_id or 0) < self.unit.own for request in requests))
        todo = []
        for member in self._able():
            assert member.lm is not None
            lacking = [set(member.lm.lacking(request)) for request in requests]
            todo += [(member, member.lm, draw) for draw in sorted(set.intersection(*lacking)) if draw >= first]
        return todo

    def _share(self, requests: Sequence[Instance], todo: Sequence[tuple[Member, HarnessLM, int]]) -> None:
        """Answer prompts from one prefill, by every cell that can use it."""
        prefill: Prefill | None = None
        for member, lm, draw in todo:
            if member.alone:
                continue
            try:
                if prefill is None and (prefill := self._recorded(lm, requests, draw)) is None:
                    return
            except Exception as error:  # of the prompt, not of this cell: out of memory, perhaps
                self._say(requests, "cannot be recorded", error)
                return
            before = lm.computed
            try:
                if self.batch == 1:
                    lm.answer(requests[0], prefill, draw)
                else:
                    batches.answer(lm, batches.read(lm, [(request, draw) for request in requests]), prefill)
                member.strikes = 0
            except (OwnPrefill, NotApplicable):
                member.alone = True
            except Exception as error:  # the cell's own unit meets it again, and reports it
                self._say(requests, f"fails in {member.cell.label}", error)
                member.strikes += 1
                member.alone = member.strikes >= STRIKES
                prefill = None  # it may have been left half used
            self.served += lm.computed - before

    def _recorded(self, lm: HarnessLM, requests: Sequence[Instance], draw: int) -> Prefill | None:
        if self.batch == 1:
            return self.recordings.record(lm, requests[0])
        rows = batches.rows_of(lm, batches.read(lm, [(request, draw) for request in requests]))
        return self.recordings.record_batch(lm, rows)

    def _say(self, requests: Sequence[Instance], what: str, error: Exception) -> None:
        """One line on a prompt that is not shared."""
        first = requests[0]
        line = f"shared prefills: {first.task_name} sample {first.doc_id} {what} ({type(error).__name__}: {error})"
        if line not in self.recordings.said:
            self.recordings.said.add(line)
            print(one_line(line)[:400], file=sys.stderr, flush=True)

    def _guard(self, member: Member, work: Callable[[], object]) -> None:
        """Do a cell's work; an exception fails the cell."""
        if member.cell.name in self.result.failures:
            return
        try:
            work()
        except Exception as error:  # one cell's error, CUDA out of memory included, must not lose the others
            self.result.failures[member.cell.name] = Failure.of(error)

    def count(self) -> None:
        """Say what was computed, also after an interruption."""
        new = {member.cell.name: member.log.appended - self.before[member.cell.name] for member in self.members}
        self.result.computed = [name for name, count in new.items() if count]
        self.result.shared, self.result.own = self.recordings.prompts, sum(new.values()) - self.served
