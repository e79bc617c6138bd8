"""Child processes that answer calls: one program, one protocol, one way to start and end them.

    process = Process([sys.executable, str(CHILD), json.dumps(settings)], longest=1 << 20)
    process.ready(seconds=20)
    process.send({"text": program})                            # what it loads
    process.call("f", 1, 2, seconds=3)                         # what its function returns

    child.py      the program: loads a file or a text, then answers calls of its functions
    wire.py       what crosses the pipes: plain data, one line each
    isolate.py    what a child cannot reach, where it is to be isolated
    judge.py      loaded by the child that judges another child's program

`sandbox` runs programs of a model so, and `math_process` lm-eval's functions that cannot be imported beside Hydra.
"""

import contextlib
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

from pqcache.harness.tasks.process import wire

CHILD = Path(__file__).resolve().with_name("child.py")
CHUNK = 1 << 16  # bytes read at once


class NotReady(OSError):
    """A process could not be isolated; the message is one line that says what is missing."""


class CallFailed(RuntimeError):
    """A function gave no value; the message is one line with the reason."""


class ImportFailed(CallFailed):
    """A function lacks a package, so that no call of it has a value."""


class Process:
    """A child process; its standard streams are pipes. It is lost after an answer that came too late, or none."""

    def __init__(self, command: list[str], longest: int, *, data_sets: bool = False, **options: Any) -> None:
        """longest: bytes of a line. data_sets: whether these may cross. options: those of subprocess.Popen."""
        self.longest, self.data_sets, self._read = longest, data_sets, b""
        pipe = subprocess.PIPE
        # a session of its own: Ctrl-C is for the parent
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, **options)
        assert self.child.stdin is not None and self.child.stdout is not None and self.child.stderr is not None
        self.stdin, self.stdout, self.stderr = self.child.stdin, self.child.stdout, self.child.stderr

    def ready(self, seconds: float) -> None:
        """Wait until it is as isolated as it was told to be. Raises NotReady with the last line that it wrote to stderr."""
        if self._line(seconds) == b"ready":
            return
        self.child.kill()
        said = self.stderr.read(CHUNK).decode(errors="replace").strip().splitlines()
        raise NotReady(said[-1][:300] if said else f"not ready after {seconds:g} seconds")

    def send(self, value: object) -> None:
        """Write one line. `call` says that a process has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(wire.dump(value, self.longest))
            self.stdin.flush()

    def call(self, name: str | None, *arguments: Any, seconds: float) -> Any:
        """What a function returns; None: the versions of the packages that are named. Raises CallFailed: it raised, it
        took longer, or the process ended (a crash). It is ImportFailed where a package is missing.
        """
        self.send((name, arguments, {}))
        line = self._line(seconds)
        try:
            answer = wire.load(line or b"", self.data_sets)
            assert isinstance(answer, dict)
        except (ValueError, AssertionError):  # no line, or the beginning of one
            self.end()
            raise CallFailed(f"not done after {seconds:g} seconds" if line is None else "its process ended") from None
        if "value" in answer:
            return answer["value"]
        raise (ImportFailed if "missing" in answer else CallFailed)(*answer.values())

    def end(self) -> None:
        """Kill it, wait for it and close its pipes. Where it is the first of a PID namespace, all of that ends."""
        self.child.kill()
        self.child.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                stream.close()

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def _line(self, seconds: float) -> bytes | None:
        """The next line without its end; what is left, maybe nothing, if the pipe has ended; None if the time is over.

        What a longer line than `longest` holds behind them begins the next one.
        """
        end = time.monotonic() + seconds
        while b"\n" not in self._read and len(self._read) < self.longest:
            ready, _, _ = select.select([self.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            more = os.read(self.stdout.fileno(), CHUNK)
            if not more:
                break
            self._read += more
        line, newline, rest = self._read.partition(b"\n")
        if not newline or len(line) > self.longest:
            line, rest = self._read[: self.longest], self._read[self.longest :]
        self._read = rest
        return line
