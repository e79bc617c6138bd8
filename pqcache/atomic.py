"""Write a file as a whole: neither a reader nor a crash leaves half of it."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`. What the block writes there replaces `path`; if the block fails, `path` stays.

    Makes the folder. The new file is on disk at the end. Each process has its own temporary path, so that two may write
    the same file: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write or replace a file as a whole."""
    with replacing(path) as partial:
        partial.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file (UTF-8) as a whole; half of a character, which UTF-8 has not, as its escape."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def sweep(folder: Path, older_s: float = 600.0) -> None:
    """Remove what processes that were killed while they wrote have left in a folder: temporary files, `older_s` old."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\..+\.\d+", path.name):
            with contextlib.suppress(OSError):  # another process swept it
                if path.is_file() and time.time() - path.stat().st_mtime > older_s:
                    path.unlink()
