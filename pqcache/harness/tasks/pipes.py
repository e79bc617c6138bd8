"""What a child process writes into a pipe, read with a time limit, and its end."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time

CHUNK = 1 << 16  # bytes read at once


class Lines:
    """The lines of a pipe, one after the other. What was read of the next one is kept."""

    def __init__(self, descriptor: int, longest: int) -> None:
        """longest: bytes of a line; what a longer one holds behind them begins the next."""
        self.descriptor, self.longest, self._read = descriptor, longest, b""

    def next(self, seconds: float) -> bytes | None:
        """The next line without its end; what is left, maybe nothing, if the pipe has ended; None if the time is over."""
        end = time.monotonic() + seconds
        while b"\n" not in self._read and len(self._read) < self.longest:
            ready, _, _ = select.select([self.descriptor], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            more = os.read(self.descriptor, CHUNK)
            if not more:
                break
            self._read += more
        line, newline, rest = self._read.partition(b"\n")
        if not newline or len(line) > self.longest:
            line, rest = self._read[: self.longest], self._read[self.longest :]
        self._read = rest
        return line


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, wait for it and close its pipes. Where it is the first of a PID namespace, all of that ends."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
