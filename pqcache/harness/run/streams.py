"""Standard output and error that may be closed or full: what a run computed does not depend on them."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pqcache.harness.config.options import masked
from pqcache.harness.report.table import printable


@dataclass(eq=False)
class Stream:
    """A text stream that goes silent when it can no longer be written."""

    stream: Any
    escape: bool = False  # control characters are shown as escapes
    error: OSError | None = None

    def write(self, text: str) -> int:
        """Write, escaping what the encoding lacks. Returns the length of the text, written or not."""
        if self.error is None:
            try:
                encoding = getattr(self.stream, "encoding", None) or "utf-8"
                shown = masked(printable(text) if self.escape else text)
                self.stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
            except (OSError, ValueError) as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush; a failure is kept in `error`."""
        if self.error is None:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.error = error if isinstance(error, OSError) else OSError(errno.EBADF, str(error))
        with suppress(OSError, ValueError, AttributeError):  # what is still buffered must not fail at the end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded() -> Iterator[Stream]:
    """Inside it printing never raises. Yields standard output; its `error` says whether something was lost."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        # progress bars on standard error move the cursor
        out, err = (Stream(stream if stream is not None else nowhere, escape=stream is before[0]) for stream in before)
        sys.stdout, sys.stderr = out, err
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = before
