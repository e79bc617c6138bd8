"""What a program that a model wrote can and cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pqcache.harness.tasks.sandbox.parent import CHILD, protections, run_program

REFUSED = {
    "a wrong answer": ("assert 1 == 2", "AssertionError"),
    "no program": ("def f(:", "SyntaxError"),
    "leaving early": ("import sys; sys.exit(0)", "SystemExit"),
    "leaving at once": ("import os; os._exit(0)", "exit code 0"),
    "memory": ("x = 'a' * (3 << 30)", "MemoryError"),
    "a process": ("import os; os.fork()", "not allowed"),
    "a command": ("import subprocess; subprocess.run(['/bin/true'])", "not allowed"),
    "a thread": ("import threading; threading.Thread(target=print).start()", ""),
    "the network": ("import socket; socket.create_connection(('1.1.1.1', 53))", "not allowed"),
    "its parent": ("import os; os.kill(os.getppid(), 9)", "not allowed"),
    "machine code": ("import ctypes; ctypes.CDLL(None).fork()", "not allowed"),
    "reading input": ("input()", "EOFError"),
    "a large file": ("open('a', 'w').write('x' * (4 << 20))", ""),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    program, expected = REFUSED[what]
    reason = run_program(program)
    assert reason is not None
    assert expected in reason


def test_allowed() -> None:
    program = "import collections, functools, hashlib, heapq, itertools, math, re, typing\nprint('x' * 100_000)\n"
    assert run_program(program + "open('a', 'w').write('x'); assert open('a').read() == 'x'\n") is None
    assert "audit" in protections()


def test_an_endless_program_ends() -> None:
    assert run_program("while True: pass", timeout=0.5) == "not done after 0.5 seconds"


@pytest.mark.parametrize(
    "program", ["open({path!r}, 'w')", "import os; os.rename('a', {path!r})", "import os; os.mkdir({path!r})"]
)
def test_nothing_is_written_outside(program: str, tmp_path: Path) -> None:
    path = tmp_path / "outside"
    assert run_program("open('a', 'w').close()\n" + program.format(path=str(path))) is not None
    assert not path.exists()


@pytest.mark.skipif("seccomp" not in protections() or "landlock" not in protections(), reason="no such kernel")
def test_the_kernel_holds_without_the_interpreters_help(tmp_path: Path) -> None:
    """The audit hooks left out: what is refused now is refused by the kernel."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    program = f"""
import ctypes, os, socket, sys
sys.path.insert(0, {str(CHILD.parent)!r})
import child
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
assert child.landlock(libc, {str(inside)!r}) and child.seccomp(libc)
open({str(inside / "a")!r}, "w").close()
for act in (os.fork, socket.socket, lambda: os.execv("/bin/true", ["true"]), lambda: os.kill(os.getppid(), 0),
            lambda: open({str(outside / "a")!r}, "w"), lambda: os.mkdir({str(outside / "b")!r})):
    try:
        act()
    except PermissionError:
        continue
    sys.exit(1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert list(outside.iterdir()) == []
