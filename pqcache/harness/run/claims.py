"""Who runs a cell: a lock on a file in its folder, which ends with its process however that ends.

    with claim(folder):        raises Busy, which names the owner, if another process has the cell
        ...

owner.json says which process has or had the cell. Where the file system has no locks, filelock's own files stand for them: of
a process that was killed on another machine such a file stays, and is deleted by hand.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from pqcache.atomic import write_text

LOCK, OWNER = ".lock", "owner.json"


class Busy(RuntimeError):
    """Another process has this cell."""


class Claim:
    """A cell's folder that this process owns until `release`."""

    def __init__(self, lock: BaseFileLock) -> None:
        self._lock = lock

    def release(self) -> None:
        """Give the cell back."""
        self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim(folder: Path) -> Claim:
    """Own a cell's folder. Raises Busy if another process has it."""
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise Busy(f"{folder}: another process is running this cell: {_owner(folder)}") from None
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_text(folder / OWNER, json.dumps(owner) + "\n")
    return Claim(lock)


def _owner(folder: Path) -> str:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "its owner is not known yet"
