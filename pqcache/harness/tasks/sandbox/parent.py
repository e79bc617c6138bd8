"""Run a program that a model wrote: one process, a time limit, little memory, no network, no writes outside its folder.

    reason = run_program("assert 1 + 1 == 2", timeout=3.0)      # None: it ran to its end; else the reason why not

`child.py` is the started process. It limits itself before it runs the program. On Linux the kernel enforces the limits
(seccomp, Landlock). Elsewhere only Python's audit hooks do, which a program made to break out can evade.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
MEMORY = 1024  # MiB of address space


def run_program(program: str, timeout: float = 3.0, memory: int = MEMORY) -> str | None:
    """None if the program ran to its end within `timeout` seconds, else one line with the reason."""
    return _run(program, timeout, memory)[0]


@lru_cache(maxsize=1)
def protections() -> str:
    """The protections of this machine: seccomp, landlock, audit."""
    reason, active = _run("", 10.0, MEMORY)
    if reason is not None:
        raise OSError(f"the sandbox does not start: {reason}")
    return active


def _run(program: str, timeout: float, memory: int) -> tuple[str | None, str]:
    # A program that ends early (sys.exit) cannot print the token.
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(CHILD), folder, str(memory), str(int(timeout) + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "", "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            answer, _ = child.communicate(f"{token}\n{program}".encode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:g} seconds", ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.communicate()
    output = answer.decode(errors="replace").strip()
    if output.startswith(token):
        return None, output.removeprefix(token).strip()
    return output[:300] or f"ended with exit code {child.returncode}", ""
