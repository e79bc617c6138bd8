"""Digests of the code that computes samples, so that results of other code are told apart.

own_source(method)     the method's own modules, those of the methods it is built on, and their base classes outside the interface
library_source()       everything that computes: the library without the harness

Comments, docstrings and the layout of lines do not count. A digest begins with Python's version, because it is made of what the
parser says: digests of two versions are not comparable (`differs`).
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache import places, sources

if TYPE_CHECKING:
    from pqcache.selective import Method

LIBRARY = (*(places.PACKAGE / name for name in ("selective", "store", "kernels", "device", "pq")), places.BASELINES)
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
    if file.parent in (places.BASELINES, places.PACKAGE) or places.ROOT not in file.parents:
        return {file}
    return set(file.parent.glob("*.py"))


@cache
def library_source() -> str:
    """The digest of everything that computes samples, as this process loaded it."""
    return _digest(file for folder in LIBRARY for file in folder.rglob("*.py"))


def differs(recorded: str, now: str) -> bool:
    """Whether two digests, made by one version of Python, are of different code."""
    return recorded.partition(":")[0] == now.partition(":")[0] and recorded != now


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: places.label(file).split("/")):
        digest.update(f"{places.label(file)} {_content(file)}\n".encode())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{version}:{digest.hexdigest()[:16]}"


@cache
def _content(file: Path) -> str:
    """The digest of a file without comments and docstrings. An import counts alike however it names its module."""
    tree = ast.parse(file.read_bytes())
    module = places.label(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.module, node.level = sources.absolute(node, module), 0
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = _in_order(body)  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _in_order(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements, with neighbouring imports of this project sorted by module."""
    ordered: list[ast.stmt] = []
    for _, run in itertools.groupby(body, key=lambda node: bool(_own_module(node))):
        ordered += sorted(run, key=_own_module)  # the sort keeps the order of what is no import of this project
    return ordered


def _own_module(node: ast.stmt) -> str:
    """The module of this project that a statement imports from; empty for any other statement."""
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    return module if module.partition(".")[0] in ("baselines", "pqcache") else ""
