"""The options of a class, read from its source text: neither torch nor transformers is imported.

A method's module imports both, which takes seconds. Its fields are enough to refuse a mistyped option or to explain one.
`stand_in("baselines.oracle:Oracle")` is a dataclass with the fields, defaults, comments and class variables of Oracle. It has no
methods. A class that cannot be read so has no stand-in; its own module is imported then.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pqcache import places
from pqcache.fields import COMMENTS, added, beside

# What annotations and defaults may use, beside Python's own names and the constants of their module.
NAMES: dict[str, Any] = {
    "Any": typing.Any,
    "ClassVar": typing.ClassVar,
    "Literal": typing.Literal,
    "Path": Path,
    "added": added,
    "field": field,
}


class Unreadable(Exception):
    """A class whose fields cannot be read from its text alone."""


def stand_in(entry: str) -> type[Any] | None:
    """The fields of the class `module:class`, as a dataclass; None if they cannot be read from its text."""
    module, _, name = entry.partition(":")
    try:
        return _class(module, name)
    except Unreadable:
        return None


def docstring(entry: str) -> tuple[str, str]:
    """(the docstring of the module that writes the class `module:class`, the class's own); empty where there is none."""
    module, _, name = entry.partition(":")
    try:
        where, node = _definition(module, name)
    except Unreadable:
        return "", ""
    return ast.get_docstring(_parsed(where)[0]) or "", ast.get_docstring(node) or ""


def load_alone(name: str) -> ModuleType:
    """A module that imports nothing heavy, without its package, whose other modules may.

    The package finds it loaded when it is imported later.
    """
    if name not in sys.modules:
        file = places.file_of(name)
        spec = importlib.util.spec_from_file_location(name, file) if file is not None else None
        if spec is None or spec.loader is None:
            raise ImportError(f"{name}: no such module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@cache
def _parsed(module: str) -> tuple[ast.Module, list[str]]:
    """(the tree, the lines) of a module of this project."""
    file = places.file_of(module)
    if file is None:
        raise Unreadable(module)
    try:
        text = file.read_text(encoding="utf-8")
        return ast.parse(text), text.splitlines()
    except (OSError, ValueError, SyntaxError) as error:
        raise Unreadable(module) from error


@cache
def _definition(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """(the module, the definition) of a class, also where a module only imports it."""
    for node in _parsed(module)[0].body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(absolute(node, module), alias.name)
    raise Unreadable(f"{module}:{name}")


def absolute(node: ast.ImportFrom, module: str) -> str:
    """The module that an import in `module` names."""
    if not node.level:
        return node.module or ""
    file = places.file_of(module)
    parts = module.split(".")
    if file is None or file.stem != "__init__":
        parts = parts[:-1]
    return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])


@cache
def _class(module: str, name: str) -> type[Any]:
    """The stand-in of a class, made of those of its base classes."""
    module, node = _definition(module, name)
    return _made(module, node)


@cache
def _made(module: str, node: ast.ClassDef) -> type[Any]:
    bases = []
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id not in ("ABC", "Protocol"):
            bases.append(_class(module, base.id))
    body: dict[str, Any] = {"__annotations__": {}, "__doc__": ast.get_docstring(node), "__module__": module}
    body[COMMENTS] = beside(node, _parsed(module)[1])
    constants = _Constants(module)
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            kind, name = _kind(one.annotation, constants), one.target.id
            try:
                if one.value is not None:
                    body[name] = _evaluated(one.value, constants)
            except Unreadable:
                if not _is_class_variable(kind):
                    raise
                continue
            body["__annotations__"][name] = kind
    cls = type(node.name, tuple(bases), body)
    decorated: Callable[[type], type] = dataclass(kw_only=True)
    return decorated(cls) if any("dataclass" in ast.unparse(d) for d in node.decorator_list) else cls


def _is_class_variable(kind: Any) -> bool:
    return kind is typing.ClassVar or typing.get_origin(kind) is typing.ClassVar


def _kind(node: ast.expr, constants: _Constants) -> Any:
    """An annotation's type. Any where it names what only an import would know."""
    try:
        return _evaluated(node, constants)
    except Unreadable:
        return typing.ClassVar if ast.unparse(node).startswith("ClassVar") else typing.Any


def _evaluated(node: ast.expr, constants: _Constants) -> Any:
    try:
        return eval(_compiled(node), {"__builtins__": builtins, **NAMES}, constants)
    except (NameError, AttributeError, TypeError, ValueError) as error:
        raise Unreadable(ast.unparse(node)) from error


def _compiled(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "<options>", "eval")


class _Constants(dict[str, Any]):
    """The constants at the top of a module, and those that it imports from others, each read when it is first named."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        if name in NAMES or hasattr(builtins, name):
            raise KeyError(name)
        for node in _parsed(self._module)[0].body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
                self[name] = _evaluated(value, self)
                return self[name]
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                (alias,) = [a for a in node.names if (a.asname or a.name) == name]
                try:
                    self[name] = _Constants(absolute(node, self._module))[alias.name]
                except Unreadable as error:
                    raise KeyError(name) from error
                return self[name]
        raise KeyError(name)
