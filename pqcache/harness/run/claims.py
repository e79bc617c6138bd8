"""Who runs a cell: an owner file in its folder, made so that it holds on any file system that several machines share.

    with claim(folder):        raises Busy, which names the owner, if a live process has the cell
        ...

<cell>/owner-<n>.json, made by O_EXCL: of several files the highest n is the owner. To take over a released or stale claim is to
make n + 1, which one process alone can do. flock is not used: over NFS it may raise, or always succeed.

A claim is stale when its process is gone (on the machine that made it) or its file was not touched for STALE_S seconds (another
machine). The owner touches it every BEAT_S seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BEAT_S = 15.0
STALE_S = 120.0
OWNER = re.compile(r"owner-(\d+)\.json")


class Busy(RuntimeError):
    """Another process has this cell."""


class Claim:
    """A cell folder that this process owns until `release`."""

    def __init__(self, folder: Path) -> None:
        """Take the claim. Raises Busy if a live process has it."""
        self.folder = folder
        self._mark = secrets.token_hex(8)
        self.path = self._take()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise Busy if another process has taken the claim over: this one did not touch its file for too long."""
        number = _highest(self.folder)
        if number is None or self.folder / f"owner-{number}.json" != self.path:
            raise Busy(f"{self.folder}: another process took this cell over while this one stood still")

    def release(self) -> None:
        """Give the claim back."""
        self._done.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the folder may be gone; the claim then ends with this process
            if _read(self.path).get("mark") == self._mark:
                partial = self.path.with_name(f".{self.path.name}.{self._mark}")
                partial.write_text(json.dumps({"mark": self._mark, "released": True}) + "\n")
                partial.replace(self.path)

    def _take(self) -> Path:
        while True:
            number = _highest(self.folder)
            if number is not None:
                held = self.folder / f"owner-{number}.json"
                if (who := _live(held)) is not None:
                    raise Busy(f"{self.folder}: another process is running this cell: {who}")
            mine = self.folder / f"owner-{(number or 0) + 1}.json"
            if not self._make(mine):
                continue  # another process was faster: look again
            if _highest(self.folder) == _number(mine):
                self._remove_older(mine)
                return mine
            mine.unlink(missing_ok=True)  # the list we saw was old

    def _make(self, path: Path) -> bool:
        """Whether the owner file was made by us."""
        text = json.dumps({**_this_process(), "mark": self._mark, "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(handle, text.encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)
        return True

    def _remove_older(self, mine: Path) -> None:
        for path in self.folder.glob("owner-*.json"):
            if (number := _number(path)) is not None and number < (_number(mine) or 0):
                path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._done.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)


@contextmanager
def claim(folder: Path) -> Iterator[Claim]:
    """Own a cell's folder. Raises Busy if a live process has it."""
    owned = Claim(folder)
    try:
        yield owned
    finally:
        owned.release()


def _number(path: Path) -> int | None:
    match = OWNER.fullmatch(path.name)
    return int(match[1]) if match else None


def _highest(folder: Path) -> int | None:
    numbers = [int(match[1]) for name in os.listdir(folder) if (match := OWNER.fullmatch(name))]
    return max(numbers, default=None)


def _read(path: Path) -> dict[str, Any]:
    """What an owner file says; {} if it is gone or its owner has not written it yet."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _live(path: Path) -> str | None:
    """Who holds a claim, in words; None if it was released or is stale."""
    owner = _read(path)
    if owner.get("released"):
        return None
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} (since {owner.get('since', '?')})"
    here = _this_process()
    if owner and all(owner.get(key) == here[key] for key in ("host", "boot", "space")):
        return who if _started(owner["pid"]) == owner.get("started") else None
    try:
        touched = path.stat().st_mtime
    except FileNotFoundError:
        return None
    return who if _now(path.parent) - touched < STALE_S else None


def _now(folder: Path) -> float:
    """The time by the file system's clock, which may differ from this machine's."""
    handle, name = tempfile.mkstemp(prefix=".clock", dir=folder)
    try:
        return os.fstat(handle).st_mtime
    finally:
        os.close(handle)
        os.unlink(name)


def _this_process() -> dict[str, Any]:
    """What tells this process from all others. A process number alone is used again, on other machines and in time."""
    return {
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "space": _link("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _started(pid: int) -> str | None:
    """When a process of this machine began, in clock ticks; `running` where the system does not say; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return "running"
    return None if fields[0] == "Z" else fields[19]  # a dead process that its parent has not met yet


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
