"""Digests of the code that computes samples, so that results of other code are told apart.

own_source(method)     the method's own modules, those of the methods it is built on, and their base classes outside the interface
library_source()       everything that computes: the library without the harness

Comments, docstrings and the layout of lines do not count. A digest begins with Python's version, because it is made of what the
parser says: digests of two versions are not comparable (`differs`).
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pqcache.selective import Method

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = ("pqcache/selective", "pqcache/store", "pqcache/kernels", "pqcache/device", "pqcache/pq", "baselines")
SHARED = "pqcache.selective"  # what all methods share is no method's own
BUILT_IN = ("abc", "builtins", "typing")


def own_source(method: Method) -> str:
    """The digest of a method's own code, as this process loaded it. A folder of modules of one method counts as a whole."""
    parts: list[Method] = [method]
    for part in parts:
        parts += part.parts()
    return _of_modules(frozenset(cls.__module__ for part in parts for cls in type(part).__mro__))


@cache
def _of_modules(names: frozenset[str]) -> str:
    files: set[Path] = set()
    for name in names:
        if name.partition(".")[0] not in BUILT_IN and not f"{name}.".startswith(f"{SHARED}."):
            path = getattr(sys.modules.get(name), "__file__", None)
            files |= _family(Path(path).resolve()) if path is not None else set()
    return _digest(files)


def _family(file: Path) -> set[Path]:
    """A module's file, or the files of the folder that belongs to one method."""
    if file.parent in (ROOT / "baselines", ROOT / "pqcache") or ROOT not in file.parents:
        return {file}
    return set(file.parent.glob("*.py"))


@cache
def library_source() -> str:
    """The digest of everything that computes samples, as this process loaded it."""
    return _digest(file for folder in LIBRARY for file in (ROOT / folder).rglob("*.py"))


def differs(recorded: str, now: str) -> bool:
    """Whether two digests, made by one version of Python, are of different code."""
    return recorded.partition(":")[0] == now.partition(":")[0] and recorded != now


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        name = file.relative_to(ROOT) if ROOT in file.parents else file.name
        digest.update(f"{name} {_content(file)}\n".encode())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{version}:{digest.hexdigest()[:16]}"


@cache
def _content(file: Path) -> str:
    """The digest of a file without comments and docstrings."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
