"""How far a whole command is: the plan first, then samples, cells, time left and score so far, in a bar or in plain lines.

    total = Total()
    run_plan(plan, total)

On a terminal the bar is the lowest line. Elsewhere a line is printed every 30 seconds.
"""

import contextlib
import io
import sys
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from pqcache.harness.config.cells import RunPlan
from pqcache.harness.config.options import LocalLaunch
from pqcache.harness.launch import plan as planning
from pqcache.harness.launch.plan import CellPlan
from pqcache.harness.run.session import Session, Watch
from pqcache.harness.run.units import Progress

EVERY_S = 30.0  # between two plain lines
BAR = "{n_fmt}/{total_fmt} samples |{bar:24}| {elapsed}{postfix}"


class Total(Watch):
    """Counts the new samples of a command, from any number of workers. A cell's samples weigh what the plan expects of them.

    The time left comes from the pace of this run, from its first sample on.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream or sys.stderr, clock
        self._weight: dict[str, float] = {}
        self._left: dict[str, int] = {}  # cell -> samples that are missing
        self._seen: set[tuple[str, str, int, int]] = set()  # cell, task, document, number of the answer
        self._scores: list[float] = []
        self._tpot: float | None = None  # ms, of the newest sample that was timed
        self._bar: Any = None
        self._stack = contextlib.ExitStack()
        self._start = self._last = 0.0
        self._passed = 0.0  # weights of the new samples
        self._first: tuple[float, float] | None = None  # the first sample: time and weight

    def begin(self, plan: RunPlan, session: Session) -> None:
        """Print the short plan and begin to count. A plan that cannot be made is one line, and no reason to stop.

        Cells that will run here and cannot fit its memory are named in `session.misfits`.
        """
        said = io.StringIO()  # notes on the tasks come after the plan
        cells: list[CellPlan] = []
        try:
            with contextlib.redirect_stdout(said):
                found = planning.make(plan, session)
            lines = planning.short(found)
            if isinstance(plan.cells[0].launch, LocalLaunch):  # workers may be on other machines
                session.misfits, warning = found.misfits()
                lines += [warning] if warning else []
            cells = found.cells
        except Exception as error:  # what is wrong, the run itself will say
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            lines = [f"plan: not made ({reason[:200]})"]
        print("\n".join(lines), flush=True)
        print(said.getvalue(), end="", flush=True)
        # of a cell's samples: their seconds, if those of all cells are known
        known = all(one.seconds is not None for one in cells if one.missing)
        self._weight = {one.cell.name: (one.seconds or 1.0) if known else 1.0 for one in cells}
        self._left = {one.cell.name: one.missing for one in cells}
        self._start = self._last = self.clock()
        missing = sum(self._left.values())
        if missing and self.stream.isatty():
            # below that of a cell, if one runs here; what is printed meanwhile stands above both
            position = int(isinstance(plan.cells[0].launch, LocalLaunch))
            self._bar = tqdm(total=missing, file=self.stream, leave=False, position=position, bar_format=BAR)
            self._stack.callback(self._bar.close)
            if sys.stdout.isatty():
                self._stack.enter_context(contextlib.redirect_stdout(DummyTqdmFile(self.stream)))

    def sample(self, one: Progress) -> None:
        """There is a new sample."""
        cell, key = one.cell, (one.cell, one.task, one.doc_id, one.draw)
        if self._left.get(cell, 0) <= 0 or key in self._seen:
            return  # computed again, for its diagnostics
        self._seen.add(key)
        self._left[cell] -= 1
        self._tpot = one.tpot if one.tpot is not None else self._tpot
        if one.score is not None:
            self._scores.append(one.score)
        now = self.clock()
        if self._first is None:
            self._first = now, self._weight[cell]
        self._passed += self._weight[cell]
        if self._bar is not None:
            self._bar.set_postfix_str(self._rest(), refresh=False)
            self._bar.update()
        elif now - self._last >= EVERY_S:
            self._last = now
            tqdm.write(self.line(), file=self.stream)  # above the bar of a cell, if there is one
            self.stream.flush()

    def ended(self, cell: str) -> None:
        """No more samples of a cell: it is complete, or it failed."""
        if cell not in self._left:
            return  # it does not apply, or there is no plan: it was never counted
        missing = self._left[cell]
        self._left[cell] = 0
        if missing and self._bar is not None:
            self._bar.total -= missing
            self._bar.refresh()

    def end(self) -> None:
        """Take the bar away."""
        self._stack.close()
        self._bar = None

    def line(self) -> str:
        """Samples, cells, time left and score so far."""
        return f"{len(self._seen)}/{len(self._seen) + sum(self._left.values())} samples, {self._rest()}"

    def _rest(self) -> str:
        parts = [f"{sum(not count for count in self._left.values())}/{len(self._left)} cells"]
        if (seconds := self._seconds_left()) is not None:
            parts.append(f"{planning.duration(seconds)} left")
        if self._scores:
            parts.append(f"score {fmean(self._scores):.1f}")
        if self._tpot is not None:
            parts.append(f"TPOT {self._tpot:.1f} ms")
        return ", ".join(parts)

    def _seconds_left(self) -> float | None:
        """By the samples after the first, which waits for the model; by the first while there is no other."""
        if self._first is None:
            return None
        since, weight = self._first
        begin, done = (since, self._passed - weight) if len(self._seen) > 1 else (self._start, self._passed)
        left = sum(self._weight[cell] * count for cell, count in self._left.items())
        return (self.clock() - begin) * left / done if done > 0 else None
