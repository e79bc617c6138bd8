"""How far a long answer is: while it grows, a line every half minute, or the bar's last words on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

EVERY_S = 30.0  # between two lines
BAR_S = 1.0  # between two changes of the bar


class Within:
    """Told of every new token of the answers that grow now."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """label: of the cell. stream: where lines go."""
        self.label, self.stream, self.clock = label, stream or sys.stderr, clock
        self.bar: Any = None  # a tqdm bar, while there is one
        self._name, self._most, self._start, self._last = "", 0, 0.0, 0.0

    def begin(self, name: str, most: int) -> None:
        """An answer begins, or a batch of them. most: tokens of the longest one."""
        self._name, self._most = name, most
        self._start = self._last = self.clock()

    def watched(self, stop: Callable[[list[int]], bool] | None) -> Callable[[list[int]], bool]:
        """`stop` for an answer that is watched while it grows."""

        def watched(token_ids: list[int]) -> bool:
            self.token(len(token_ids))
            return stop is not None and stop(token_ids)

        return watched

    def token(self, count: int) -> None:
        """An answer has so many tokens now."""
        now = self.clock()
        shown = self.bar is not None and not getattr(self.bar, "disable", True)
        if now - self._last < (BAR_S if shown else EVERY_S):
            return
        self._last = now
        rate = count / max(now - self._start, 1e-9)
        text = f"{self._name}: {count:,} of at most {self._most:,} tokens, {rate:.1f} tokens/s"
        if shown:
            self.bar.set_postfix_str(text)
        else:
            print(f"{self.label}: {text}", file=self.stream, flush=True)
