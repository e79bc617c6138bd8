"""Starts the process that runs a file's functions, and calls them.

functions = Functions(file, packages.folder())
functions.call("process_results", doc, ["It is 4."], seconds=30)        # what the function returns, as JSON holds it
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pqcache.harness.tasks.pipes import Lines, end

CHILD = Path(__file__).resolve().with_name("child.py")
MEMORY = 4096  # MiB of address space
START = 120.0  # seconds until sympy is loaded, at most
LINE = 1 << 30  # bytes of an answer: a data set is one line
# its libraries reserve address space for each thread
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
DISTRIBUTIONS = ("antlr4-python3-runtime", "sympy", "math-verify")


class CallFailed(RuntimeError):
    """A function gave no value; the message is one line with the reason."""


class ImportFailed(CallFailed):
    """A function lacks a package, so that no call of it has a value."""


class Functions:
    """The functions of one file, run by a process of their own, which is started at the first call and used for all of them."""

    def __init__(self, file: Path, folder: Path, distributions: Iterable[str] = DISTRIBUTIONS) -> None:
        """folder: searched for packages before this environment. distributions: packages whose versions are told."""
        self.file, self.folder, self.distributions = file, folder, tuple(distributions)
        self.versions: dict[str, str] = {}  # of the distributions, once the process was started
        self.process: subprocess.Popen[bytes] | None = None
        self._lines: Lines | None = None

    def start(self) -> None:
        """Start the process unless it runs. Raises CallFailed if it cannot load the file."""
        if self.process is not None and self.process.poll() is None:
            return
        self.stop()
        settings = {
            "file": str(self.file),
            "path": [str(self.folder), *(path for path in sys.path if path)],
            "parent": os.getpid(),
            "memory": MEMORY,
            "distributions": self.distributions,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-B", str(CHILD), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        assert self.process.stdout is not None
        self._lines = Lines(self.process.stdout.fileno(), LINE)
        atexit.register(self.stop)
        try:
            self.versions = self._answer(START)["ready"]
        except CallFailed:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process. The next call starts another one."""
        if self.process is not None:
            end(self.process)
        self.process = self._lines = None
        atexit.unregister(self.stop)

    def call(self, name: str, *arguments: Any, seconds: float) -> Any:
        """What a function returns. Raises CallFailed: it raised, it took longer, or the process ended (a crash). It is
        ImportFailed where a package is missing.

        arguments: plain data; a data set is {"rows": [...]}, also where it is the value.
        """
        self.start()
        assert self.process is not None and self.process.stdin is not None
        line = json.dumps({"call": name, "arguments": arguments}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # `_answer` says that it ended
            self.process.stdin.write(line)
            self.process.stdin.flush()
        return self._answer(seconds)["value"]

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next line of the process. After one that came too late, or none, another process is needed."""
        assert self._lines is not None
        line = self._lines.next(seconds)
        try:
            answer: dict[str, Any] = json.loads(line or b"")
        except ValueError:  # no line, or the beginning of one
            self.stop()
            raise CallFailed(f"not done after {seconds:g} seconds" if line is None else "its process ended") from None
        if "error" in answer:
            raise (ImportFailed if answer.get("import") else CallFailed)(answer["error"])
        return answer
