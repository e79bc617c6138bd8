"""Runs functions that a model wrote, and judges them without executing them.

    judged("def f(x):\\n    return x + 1\\n", "f", "def check(f):\\n    assert f(1) == 2\\n", "", timeout=3.0)    # None: passed

Two processes, isolated alike: the candidate executes the program and answers calls of its function; the judge runs the tests
and calls the candidate through pipes that carry plain data. `process/isolate.py` says what neither of them can reach. The
verdict comes from the judge, which never executes the program. Where the machine cannot isolate a process, NotReady
says what is missing, and nothing is run.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from pqcache.harness.tasks import process
from pqcache.harness.tasks.process import CallFailed, NotReady, Process

HERE = Path(process.__file__).resolve().parent
PYTHON = os.path.realpath(sys.executable)
PLACE = "/sandbox"  # where the processes see that folder
MEMORY = 1024  # MiB of address space
DISK = 16  # MiB of files
LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")  # start programs; their names are fixed
LINE = 1 << 20  # bytes of what a process says, at most
START = 20.0  # seconds until a process is ready, at most
WAYS = ("bubblewrap", "unshare")  # the first that works is taken
TRIAL = ("def f():\n    return 1\n", "f", "def check(f):\n    assert f() == 1\n", "")

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


def judged(
    program: str, entry_point: str, tests: str, helpers: str, timeout: float = 3.0, *, how: str | None = None
) -> str | None:
    """None if the program's function passes the tests within `timeout` seconds, else one line with the reason.

    program: the text that defines `entry_point`. tests: text that defines `check(candidate)`. helpers: text executed before
    the tests, for functions that they use. how: bubblewrap or unshare; None: as `protections` found.
    """
    command = _command(how or protections(), int(timeout) + 2)
    with contextlib.ExitStack() as stack:
        candidate = _start(stack, command)
        pipes = candidate.stdout.fileno(), candidate.stdin.fileno()
        judge = _start(stack, command, *pipes)
        candidate.send({"text": program})
        judge.send({"file": f"{PLACE}/judge.py"})
        try:
            return judge.call("verdict", entry_point, tests, helpers, *pipes, seconds=timeout)
        except CallFailed as failed:
            return str(failed)


def _start(stack: contextlib.ExitStack, command: list[str], *inherits: int) -> Process:
    """An isolated process, killed when the stack is left. It inherits nothing but its streams and the ends of pipes."""
    process = Process(command, LINE, cwd="/", env={}, pass_fds=inherits)
    stack.callback(process.end)
    process.ready(START)
    return process


@lru_cache(maxsize=1)
def protections() -> str:
    """How programs are isolated on this machine: bubblewrap or unshare. Raises NotReady with what is missing."""
    missing = []
    for how in WAYS:
        if how == "bubblewrap" and shutil.which("bwrap") is None:
            continue
        try:
            if (reason := judged(*TRIAL, timeout=10.0, how=how)) is None:
                return how
        except OSError as error:
            reason = str(error)
        missing.append(f"{how}: {reason}")
    raise NotReady("; ".join(missing))


@lru_cache(maxsize=1)
def _shown() -> tuple[list[tuple[str, str]], list[str]]:
    """The interpreter: (source, place) of its standard library and shared libraries; and folders to hide in it."""
    done = subprocess.run([PYTHON, "-I", "-S", "-c", _LOADED], capture_output=True, text=True, check=True)
    library, *shared = done.stdout.split()
    files = {library: library, PLACE: str(HERE)}
    for file in shared:
        # a library is looked for by the name it was linked with, <name>.so.<number>, which may be a link to the file
        stem = file.partition(".so")[0]
        places = [file, *(str(link) for link in Path(file).parent.glob(f"{Path(stem).name}.so*") if link.is_symlink())]
        files |= {place: file for place in places if os.path.realpath(place) == os.path.realpath(file)}
    hidden = [folder for name in ("site-packages", "dist-packages") if os.path.isdir(folder := f"{library}/{name}")]
    return [(os.path.realpath(source), place) for place, source in files.items()], hidden


def _command(how: str, seconds: int) -> list[str]:
    files, hidden = _shown()
    limits = {"memory": MEMORY, "disk": DISK, "seconds": seconds}
    text = json.dumps({"how": how, "files": files, "hidden": hidden, **limits})
    place = str(HERE) if how == "unshare" else PLACE
    inner = [PYTHON, "-I", "-S", "-B", f"{place}/child.py", text]
    if how == "unshare":
        return inner
    program = [(PYTHON, PYTHON), *((os.path.realpath(name), name) for name in LOADERS if os.path.exists(name))]
    shown = [word for source, place in (*files, *program) for word in ("--ro-bind", source, place)]
    shown += [word for folder in hidden for word in ("--tmpfs", folder, "--remount-ro", folder)]
    outer = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    outer += ["--die-with-parent", "--new-session", "--clearenv", *shown]
    outer += ["--dev-bind", "/dev/null", "/dev/null", "--dir", "/work", "--remount-ro", "/"]
    return [*outer, "--cap-add", "CAP_SYS_ADMIN", "--", *inner]  # to mount /work; given up before the program
