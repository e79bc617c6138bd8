"""The job of a run on several machines: what a worker must see and have, to be sure that it does the driver's work."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from pqcache import places
from pqcache.atomic import write_text
from pqcache.harness.config import environment
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.run.units import Job

SOURCES = (places.PACKAGE, places.BASELINES)
FOLDER = ".launch"  # below `out`: the token and what engines write


def make_job(plan: RunPlan) -> Job:
    """The job of a plan. Writes its token below `out`."""
    out = Path(plan.cells[0].run.out).expanduser().resolve()
    typed = Path(_out_of(plan)).expanduser().resolve()
    text = secrets.token_hex(16)
    path = out / FOLDER / "token"
    write_text(path, text)
    words = tuple(w for w in plan.words if not _is_key(w, "launch") and not _is_key(w, "out"))
    return Job(
        words=words,
        cwd=os.getcwd(),
        out=str(typed),
        token=(str(path), text),
        paths={path: digest_of(path) for path in named_paths(plan.cells)},
        source=source_digest(),
        commit=environment.git_commit(),
        versions=environment.versions(),
        folders={cell.name: str(cell.folder.resolve()) for cell in plan.cells},
    )


def _out_of(plan: RunPlan) -> str:
    """`out` as a command gives it: a smoke run goes to a folder below it."""
    run = plan.cells[0].run
    return str(Path(run.out).parent) if run.smoke else run.out


def _is_key(word: str, key: str) -> bool:
    name = word.lstrip("+").partition("=")[0]
    return name == key or name.startswith(f"{key}.")


def named_paths(cells: Iterable[Cell]) -> list[str]:
    """Absolute local paths that options name: models, data, traces."""
    paths = {str(path) for cell in cells for path in _paths(cell)}
    return sorted(paths)


def _paths(cell: Cell) -> Iterator[Path]:
    for group in ("model", "method", "task"):
        for name, value in cell.identity[group].items():
            if name != "name" and isinstance(value, str) and ("/" in value or name == "path"):
                path = Path(value).expanduser()
                if path.exists():
                    yield path.resolve()


def digest_of(path: str) -> str:
    """Of a file's size, or of the names and sizes of a folder's files. Empty if it does not exist."""
    root = Path(path)
    if root.is_file():
        return str(root.stat().st_size)
    if not root.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def source_digest() -> str:
    """Of the Python files of the packages: also where a checkout has changes that are not committed."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted(folder.rglob("*.py")):
            digest.update(places.label(file).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
