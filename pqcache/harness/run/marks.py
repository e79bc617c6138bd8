"""What identifies the files of a model: their content, hashed once and remembered while a file stays as it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from pqcache.atomic import write_text

REMEMBERED = Path("~/.cache/pqcache/file_hashes.json")  # [device, inode, size, mtime, ctime] -> SHA-256
LARGE = 1 << 24  # bytes; smaller files are hashed each time
CONFIGS = ("config.json", "generation_config.json")
_known: dict[str, str] = {}


def weights_mark(folder: Path) -> str:
    """16 hex digits of the content of a folder's weights and configuration files."""
    digest = hashlib.sha256()
    for path in [*_weights(folder), *(folder / name for name in CONFIGS if (folder / name).exists())]:
        digest.update(f"{path.name} {file_hash(path)}\n".encode())
    return digest.hexdigest()[:16]


def old_mark(folder: Path, *, by_content: bool) -> str:
    """The mark of older samples: over the weight files' names, sizes, and content or time of change."""
    digest = hashlib.sha256()
    for path in _weights(folder):
        facts = path.stat()
        own = file_hash(path) if by_content else facts.st_mtime_ns
        digest.update(f"{path.name} {facts.st_size} {own}\n".encode())
    return digest.hexdigest()[:16]


def _weights(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def file_hash(path: Path) -> str:
    """SHA-256 of a file. That of a large one is remembered on disk until its inode, size or times change."""
    facts = path.stat()
    key = " ".join(map(str, (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)))
    if key not in _known:
        store = REMEMBERED.expanduser()
        remembered = _read(store) if facts.st_size >= LARGE else {}
        if key in remembered:
            _known[key] = remembered[key]
            return _known[key]
        with open(path, "rb") as file:
            _known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        if facts.st_size >= LARGE:
            with contextlib.suppress(OSError):  # no home folder: the next process hashes the file again
                write_text(store, json.dumps({**remembered, key: _known[key]}) + "\n")
    return _known[key]


def _read(store: Path) -> dict[str, str]:
    try:
        value = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}
