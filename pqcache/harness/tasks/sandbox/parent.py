"""Starts the sandbox's two processes and reads the judge's verdict.

    judged("def f(x):\\n    return x + 1\\n", "f", "def check(f):\\n    assert f(1) == 2\\n", "", timeout=3.0)    # None: passed

Where the machine cannot isolate a process, MissingSandbox says what is missing, and nothing is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from pqcache.harness.tasks.pipes import Lines, end

HERE = Path(__file__).resolve().parent
MEMORY = 1024  # MiB of address space
DISK = 16  # MiB of files
LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")  # start programs; their names are fixed
LINE = 1000  # bytes of what the judge says, at most
START = 20.0  # seconds until both processes are ready, at most
WAYS = ("bubblewrap", "unshare")  # the first that works is taken

# Prints the standard library's folder, then the shared libraries of a Python process that has loaded the library's modules
# written in C. Those for terminals, windows, databases and the network are left out.
_LOADED = """
import glob, os, re, sys, sysconfig
import ctypes
library = sysconfig.get_path("stdlib")
for name in sorted(glob.glob(os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload", "*.so"))):
    if not re.match("_tkinter|_curses|readline|nis|_ssl|_gdbm|_dbm|_sqlite3|_test|_ctypes_test|xx", os.path.basename(name)):
        ctypes.CDLL(name)
files = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
print(library)
print("\\n".join(sorted(file for file in files if ".so" in os.path.basename(file) and not file.startswith(library + os.sep))))
"""


class MissingSandbox(OSError):
    """This machine cannot isolate a process."""


def judged(
    program: str, entry_point: str, tests: str, helpers: str, timeout: float = 3.0, *, how: str | None = None
) -> str | None:
    """None if the program's function passes the tests within `timeout` seconds, else one line with the reason.

    program: the text that defines `entry_point`. tests: text that defines `check(candidate)`. helpers: text executed before
    the tests, for functions that they use. how: bubblewrap or unshare; None: as `protections` found.
    """
    reason, started = _run(program, entry_point, tests, helpers, timeout, how or protections())
    if not started:
        raise MissingSandbox(reason)
    return reason


@lru_cache(maxsize=1)
def protections() -> str:
    """How programs are isolated on this machine: bubblewrap or unshare. Raises MissingSandbox with what is missing."""
    missing = []
    for how in WAYS:
        if how == "bubblewrap" and shutil.which("bwrap") is None:
            continue
        try:
            reason, started = _run(
                "def f():\n    return 1\n", "f", "def check(f):\n    assert f() == 1\n", "", 10.0, how
            )
        except OSError as error:
            missing.append(f"{how}: {error}")
            continue
        if started and reason is None:
            return how
        missing.append(f"{how}: {reason}")
    raise MissingSandbox("; ".join(missing))


@lru_cache(maxsize=1)
def _shown() -> tuple[list[tuple[str, str]], list[str]]:
    """The interpreter: (source, place) of its standard library and shared libraries; and folders to hide in it."""
    done = subprocess.run([_python(), "-I", "-S", "-c", _LOADED], capture_output=True, text=True, check=True)
    library, *shared = done.stdout.split()
    files = {library: library, str(HERE): str(HERE)}
    for file in shared:
        # a library is looked for by the name it was linked with, <name>.so.<number>, which may be a link to the file
        stem = file.partition(".so")[0]
        places = [file, *(str(link) for link in Path(file).parent.glob(f"{Path(stem).name}.so*") if link.is_symlink())]
        files |= {place: file for place in places if os.path.realpath(place) == os.path.realpath(file)}
    hidden = [folder for name in ("site-packages", "dist-packages") if os.path.isdir(folder := f"{library}/{name}")]
    return [(os.path.realpath(source), place) for place, source in files.items()], hidden


def _python() -> str:
    return os.path.realpath(sys.executable)


def _command(role: str, how: str, settings: dict[str, object]) -> list[str]:
    files, hidden = _shown()
    text = json.dumps({**settings, "how": how, "files": files, "hidden": hidden, "memory": MEMORY, "disk": DISK})
    inner = [_python(), "-I", "-S", "-B", str(HERE / f"{role}.py"), text]
    if how == "unshare":
        return inner
    program = [(_python(), _python()), *((os.path.realpath(name), name) for name in LOADERS if os.path.exists(name))]
    shown = [word for source, place in (*files, *program) for word in ("--ro-bind", source, place)]
    shown += [word for folder in hidden for word in ("--tmpfs", folder, "--remount-ro", folder)]
    outer = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    outer += ["--die-with-parent", "--new-session", "--clearenv", *shown]
    outer += ["--dev-bind", "/dev/null", "/dev/null", "--dir", "/work", "--remount-ro", "/"]
    return [*outer, "--cap-add", "CAP_SYS_ADMIN", "--", *inner]  # to mount /work; given up before the program


def _run(program: str, entry_point: str, tests: str, helpers: str, timeout: float, how: str) -> tuple[str | None, bool]:
    """(None or why not, whether both processes were isolated and ready)."""
    seconds = int(timeout) + 2
    calls, answers = os.pipe(), os.pipe()
    with contextlib.ExitStack() as stack:
        try:
            candidate = _start(stack, "candidate", how, seconds, calls[0], answers[1])
            judge = _start(stack, "judge", how, seconds, answers[0], calls[1])
        finally:
            for end in (*calls, *answers):
                os.close(end)
        _give(candidate, {"program": program, "entry_point": entry_point})
        _give(judge, {"helpers": helpers, "tests": tests, "entry_point": entry_point})
        assert judge.stdout is not None
        lines = Lines(judge.stdout.fileno(), LINE)
        if lines.next(START) != b"ready":
            return _why_not_ready(candidate, judge), False
        said = lines.next(timeout)
    if said is None:
        return f"not done after {timeout:g} seconds", True
    verdict = said.decode(errors="replace").strip()
    return (None if verdict == "passed" else verdict or "the tests ended early"), True


def _start(
    stack: contextlib.ExitStack, role: str, how: str, seconds: int, reads: int, writes: int
) -> subprocess.Popen[bytes]:
    """A process of the sandbox, killed when the stack is left. It inherits two ends of pipes and nothing else."""
    process = subprocess.Popen(
        _command(role, how, {"seconds": seconds, "reads": reads, "writes": writes}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={},
        pass_fds=(reads, writes),
        start_new_session=True,
    )
    stack.callback(end, process)
    return process


def _give(process: subprocess.Popen[bytes], text: dict[str, str]) -> None:
    """Write what the process reads before it is isolated. One that has ended already says why on stderr."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(text).encode())
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def _why_not_ready(*processes: subprocess.Popen[bytes]) -> str:
    """The last line that a process wrote to stderr."""
    for process in processes:
        process.kill()
        assert process.stderr is not None
        if lines := process.stderr.read(1 << 16).decode(errors="replace").strip().splitlines():
            return lines[-1][:300]
    return f"not ready after {START:g} seconds"
