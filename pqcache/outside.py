"""Files that come from outside: only regular ones are read, none further than a bound, and every text can be written again.

value = read_json(folder / "status.json")      # OSError or ValueError, whatever the file is
for number, end, line in lines(folder / "samples.jsonl"): ...
"""

import contextlib
import ctypes
import hashlib
import json
import math
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from pqcache.atomic import write_text

LARGEST, LARGEST_JSON, LARGEST_YAML = 1 << 28, 1 << 26, 1 << 20  # bytes of a file that is read as a whole
LONGEST_LINE, LONGEST_FILE = 1 << 26, 1 << 32  # of a file that is read line by line
REMEMBERED = Path("~/.cache/pqcache/file_hashes.json")  # [device, inode, size, mtime, ctime] -> SHA-256
LARGE = 1 << 24  # bytes; smaller files are hashed by each process
ALIASES, DEEPEST = 20, 100  # of a YAML file: each alias may double what it stands for
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HALF, _ESCAPED = re.compile("[\ud800-\udfff]"), re.compile(r"\\u[dD][89a-fA-F]")

_hashes: dict[str, str] = {}


class Unreadable(OSError, ValueError):
    """A file that is no regular one, or too large."""


def reason(error: BaseException) -> str:
    """What an error says, in one line of some 200 characters; with its kind, where that says more than its text."""
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())[:200]


@contextmanager
def refusing(what: str, *kinds: type[Exception], more: str = "", of: type[ValueError] = ValueError) -> Iterator[None]:
    """Inside it an error of these kinds, or of any where none is named, becomes a one-line ValueError: what (why) more."""
    caught = kinds or (Exception,)
    try:
        yield
    except caught as error:
        raise of(f"{what} ({reason(error)}){more}") from error


def open_regular(path: Path | str, most: int = LONGEST_FILE, flags: int = 0) -> IO[bytes]:
    """A file to be read, or with `flags` to be appended to. Raises OSError; for pipes and devices Unreadable."""
    file = os.fdopen(os.open(path, flags | os.O_NONBLOCK, 0o666), "ab" if flags & os.O_APPEND else "rb")
    facts = os.fstat(file.fileno())
    regular = stat.S_ISREG(facts.st_mode)
    if regular and facts.st_size <= most:
        return file
    file.close()
    raise Unreadable(f"{path}: is larger than {most} bytes" if regular else f"{path}: is no regular file")


def read_text(path: Path | str, most: int = LARGEST, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a file. Raises OSError, or UnicodeDecodeError, which is a ValueError."""
    with open_regular(path, most) as file:
        return file.read(most).decode(encoding, errors)


def lines(path: Path | str, start: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, byte after it, text) of each whole line; of one that is too long only the beginning. Raises OSError."""
    with open_regular(path) as file:
        file.seek(start)
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            end = line
            while not end.endswith(b"\n"):
                if not (end := file.readline(LONGEST_LINE)):
                    return
            yield number, file.tell(), line


def parse_json(text: str | bytes) -> Any:
    """A JSON value. Raises ValueError whatever the text is; half characters in it become question marks."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
        return whole(value) if _ESCAPED.search(text) else value
    except RecursionError as error:
        raise json.JSONDecodeError("too deeply nested", "", 0) from error


def read_json(path: Path | str) -> Any:
    """The JSON value of a file. Raises OSError or ValueError."""
    return parse_json(read_text(path, LARGEST_JSON))


def yaml_text(path: Path | str, most: int = ALIASES) -> str:
    """The text of a YAML file with at most so many aliases and 100 levels. Raises OSError, ValueError or YAMLError."""
    text, depth, aliases = read_text(path, LARGEST_YAML), 0, 0
    for event in yaml.parse(text, YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > DEEPEST or aliases > most:
            raise ValueError(f"{path}: has more than {most} aliases, or {DEEPEST} levels")
    return text


def read_yaml(path: Path | str, most: int = ALIASES) -> Any:
    """The YAML value of such a file. Raises OSError or ValueError."""
    try:
        return whole(yaml.load(yaml_text(path, most), YAML_LOADER))
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: is no YAML ({reason(error)})") from error


def file_hash(path: Path) -> str:
    """SHA-256 of a file. That of a large one is remembered on disk until its inode, size or times change. Raises OSError."""
    facts, store = path.stat(), REMEMBERED.expanduser()
    key = " ".join(map(str, (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)))
    if key in _hashes:
        return _hashes[key]
    remembered: Any = {}
    if facts.st_size >= LARGE:
        with contextlib.suppress(OSError, ValueError):
            remembered = read_json(store)
        remembered = remembered if isinstance(remembered, dict) else {}
    if isinstance(known := remembered.get(key), str):
        return _hashes.setdefault(key, known)
    with open_regular(path, sys.maxsize) as file:
        _hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    if facts.st_size >= LARGE:
        with contextlib.suppress(OSError):  # no home folder: the next process hashes the file again
            write_text(store, json.dumps({**remembered, key: _hashes[key]}) + "\n")
    return _hashes[key]


def each(value: Any, change: Callable[[Any], Any], key: Callable[[Any], Any] = lambda key: key) -> Any:
    """A value with `change` of all in its dictionaries and lists, at any depth, and `key` of keys. Tuples become lists."""
    if isinstance(value, dict):
        return {key(name): each(item, change, key) for name, item in value.items()}
    return [each(item, change, key) for item in value] if isinstance(value, list | tuple) else change(value)


def whole(value: Any) -> Any:
    """A value of JSON whose texts hold no half of a character, which no file and no tokenizer takes."""

    def change(one: Any) -> Any:
        return _HALF.sub("?", one) if isinstance(one, str) and not one.isascii() else one

    return each(value, change, change)


def finite(value: Any) -> Any:
    """A value without NaN and infinity, which JSON does not have: null in their place."""
    return each(value, lambda one: None if isinstance(one, float) and not math.isfinite(one) else one)


DIGEST = "digest"  # of a record: 16 hex digits of its content


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """A record as JSON has it, with a digest of its content; half characters, which no file takes, are question marks."""
    record = parse_json(json.dumps(record))
    return {**record, DIGEST: _digest(record)}


def unsealed(record: dict[str, Any]) -> dict[str, Any]:
    """A record without its digest. Those of older versions have none. Raises ValueError where it is not as it was written."""
    said = record.pop(DIGEST, None)
    if said is not None and said != _digest(record):
        raise ValueError("was changed after it was written")
    return record


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


class _Late(BaseException):
    """The time is over."""


@contextmanager
def little_memory(more: int = 1 << 30) -> Iterator[None]:
    """Let this process have so many bytes more at most, where the system knows such a limit: else MemoryError."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limits = [pages * resource.getpagesize() + more, *(limit for limit in (soft, hard) if limit >= 0)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def rendering(seconds: float, what: str) -> Iterator[None]:
    """End a stranger's template with a ValueError after so many seconds, in any thread; what else it raises becomes one, too."""
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def stop() -> None:
        with lock:
            if not over:  # the next line of Python raises it, as a signal's handler does in the main thread alone
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Late))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        with refusing(f"{what} fails"):  # of Jinja, or of what its expressions do
            try:
                yield
            finally:
                with lock:
                    over = True
                timer.cancel()
    except _Late:
        raise ValueError(f"{what} takes more than {seconds:g} s") from None
