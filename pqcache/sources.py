"""A method's options and its checks of them, from its source text: neither torch nor transformers is imported.

A method's module imports both, which takes seconds. Its fields are enough to refuse a mistyped option or to explain one, and
its checks (`__post_init__`) compute with numbers and names.
`stand_in("baselines.oracle:Oracle")` is a dataclass with the fields, defaults, comments, class variables and functions of Oracle.
A name in a function is looked up when the function runs. One that only an import of torch would know raises NameError: the
caller then imports the class itself. A class whose fields cannot be read has no stand-in.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import sys
import typing
from collections.abc import Callable, Sequence
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
# Modules of this project that import nothing heavy and whose classes meet those of others: an error, a budget.
LIGHT = ("pqcache.fields", "pqcache.naming", "pqcache.selective.budget", "pqcache.selective.shape")
# Decorators of functions that a stand-in has.
DECORATORS = ("classmethod", "property", "staticmethod")


class Unreadable(Exception):
    """What cannot be known from the text of this project alone."""


class _Elsewhere(Exception):
    """A statement does not say what a name is."""


def stand_in(entry: str) -> type[Any] | None:
    """The fields of the class `module:class`, as a dataclass; None if they cannot be read from its text."""
    module, _, name = entry.partition(":")
    try:
        return _class(module, name)
    except Unreadable:
        return None


def constant(module: str, name: str) -> Any:
    """A constant at the top of a module of this project. Raises Unreadable where only an import would know it."""
    try:
        return _names(module)[name]
    except KeyError:
        raise Unreadable(f"{module}: {name}") from None


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
    names = _names(module)
    bases = [_evaluated(base, names) for base in node.bases if ast.unparse(base) not in ("ABC", "Protocol")]
    values: dict[str, Any] = {"__doc__": ast.get_docstring(node), "__module__": module}
    values[COMMENTS] = beside(node, _parsed(module)[1])
    kinds: dict[str, Any] = {}
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            kind, name = _kind(one.annotation, names), one.target.id
            try:
                if one.value is not None:
                    values[name] = _evaluated(one.value, names)
            except Unreadable:
                if not _is_class_variable(kind):
                    raise
                continue
            kinds[name] = kind
    cls = _with_functions(node, tuple(bases), names)
    for name, value in values.items():
        setattr(cls, name, value)
    cls.__annotations__ = kinds
    if not any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        return cls
    decorated: Callable[[type], type] = dataclass(kw_only=True)
    cls = decorated(cls)
    for one in node.body:  # a field's type is text, as in a class whose annotations are postponed
        if isinstance(one, ast.AnnAssign) and (known := vars(cls)["__dataclass_fields__"].get(ast.unparse(one.target))):
            known.type = ast.unparse(one.annotation)
    return cls


def _with_functions(node: ast.ClassDef, bases: tuple[type, ...], names: _Names) -> type[Any]:
    """A class of these bases with the functions of a definition. `super()` needs them to be compiled in its body."""
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef) and _is_readable(one, names)]
    body: list[ast.stmt] = [*functions] or [ast.Pass()]
    base: ast.expr = ast.Starred(ast.Name("__bases__", ast.Load()), ast.Load())
    made = ast.ClassDef(name=node.name, bases=[base], keywords=[], body=body, decorator_list=[])
    tree = ast.fix_missing_locations(ast.Module([ast.copy_location(made, node)], []))
    found: dict[str, Any] = {"__bases__": bases}
    exec(compile(tree, "<options>", "exec"), names, found)
    cls: type[Any] = found[node.name]
    return cls


def _is_readable(function: ast.FunctionDef, names: _Names) -> bool:
    """Whether a function can be made: what its decorators and defaults name is known."""
    try:
        for default in [*function.args.defaults, *filter(None, function.args.kw_defaults)]:
            _evaluated(default, names)
    except Unreadable:
        return False
    return all(isinstance(d, ast.Name) and d.id in DECORATORS for d in function.decorator_list)


def _is_class_variable(kind: Any) -> bool:
    return kind is typing.ClassVar or typing.get_origin(kind) is typing.ClassVar


def _kind(node: ast.expr, names: _Names) -> Any:
    """An annotation's type. Any where it names what only an import would know."""
    try:
        return _evaluated(node, names)
    except Unreadable:
        return typing.ClassVar if ast.unparse(node).startswith("ClassVar") else typing.Any


def _evaluated(node: ast.expr, names: _Names) -> Any:
    try:
        return eval(_compiled(node), names)
    except (NameError, AttributeError, TypeError, ValueError) as error:
        raise Unreadable(ast.unparse(node)) from error


def _compiled(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "<options>", "eval")


@cache
def _names(module: str) -> _Names:
    return _Names(module)


class _Names(dict[str, Any]):
    """The names at the top of a module, each read when it is first used: constants, functions, classes, imports."""

    def __init__(self, module: str) -> None:
        super().__init__(NAMES)
        self._module = module
        self["__builtins__"] = vars(builtins) | {"__import__": _import}
        self["__name__"] = module

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        for node in _parsed(self._module)[0].body:
            try:
                self[name] = self._named(node, name)
            except _Elsewhere:
                continue
            except Unreadable as error:
                raise KeyError(name) from error
            return self[name]
        raise KeyError(name)

    def _named(self, node: ast.stmt, name: str) -> Any:
        """What `name` is by this statement. Raises _Elsewhere if it names something else."""
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _made(self._module, node)
        if isinstance(node, ast.FunctionDef) and node.name == name and _is_readable(node, self):
            made: dict[str, Any] = {}
            exec(compile(ast.Module([node], []), "<options>", "exec"), self, made)
            return made[name]
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _imported(self._module, node, alias)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return _evaluated(value, self)
        raise _Elsewhere


def _imported(module: str, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Any:
    """What an import at the top of a module gives, where it is light."""
    if isinstance(node, ast.Import):
        return _import(alias.name)
    source = absolute(node, module)
    if (source, alias.name) == ("pqcache.registry", "method_class"):
        return _method_class
    if source in LIGHT:
        return getattr(load_alone(source), alias.name)
    if places.file_of(source) is None:
        return getattr(_import(source, fromlist=(alias.name,)), alias.name)
    try:
        return _names(source)[alias.name]
    except KeyError as error:
        raise Unreadable(alias.name) from error


def _import(name: str, _: Any = None, __: Any = None, fromlist: Sequence[str] = (), level: int = 0) -> ModuleType:
    """`import` in a stand-in's function: Python's own modules only. Takes what `__import__` takes."""
    if level or name.partition(".")[0] not in sys.stdlib_module_names:
        raise Unreadable(name)
    module = importlib.import_module(name)
    return module if fromlist else sys.modules[name.partition(".")[0]]


def _method_class(name: str) -> type[Any]:
    """`registry.method_class` in a stand-in's function: a stand-in."""
    from pqcache.registry import METHODS

    cls = stand_in(METHODS[name])
    if cls is None:
        raise Unreadable(name)
    return cls
