"""Values of options: check their types, name a type in a message, and show a value as it is typed or stored."""

from __future__ import annotations

import math
import types
import typing
from pathlib import Path
from typing import Any, Literal

LARGEST = 2**63  # numbers below it have an exact place in every file and tensor
NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    dict: "a mapping",
}


def coerce(value: Any, kind: Any) -> Any:
    """`value` as type `kind`. Raises TypeError that says what is expected. An int passes as a float, a bool never as a number."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        for allowed in args:
            if value == allowed and type(value) is type(allowed):
                return value
    elif origin in (typing.Union, types.UnionType):
        for option in sorted(args, key=lambda option: type(value) is not option):  # an exact type match wins
            try:
                return coerce(value, option)
            except TypeError:
                continue
    elif origin in (list, tuple, typing.Sequence):
        if isinstance(value, list | tuple):
            try:
                items = [coerce(v, args[0] if args else Any) for v in value]
            except TypeError:
                raise TypeError(describe(kind)) from None
            return tuple(items) if origin is tuple else items
    else:
        return _coerce_plain(value, kind)
    raise TypeError(describe(kind))


def _coerce_plain(value: Any, kind: Any) -> Any:
    """`value` as a class without arguments."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is types.NoneType or kind is None:
        if value is None:
            return None
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif kind is int:
        if isinstance(value, int) and number and abs(value) < LARGEST:
            return value
    elif kind is float:
        if number and abs(value) < LARGEST:  # false for NaN and infinity
            return float(value)
    elif kind is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int) and number:  # out=2024, model.revision=123
            return str(value)
    elif kind in (dict, list, tuple) and isinstance(value, kind):
        return value
    elif kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(describe(kind))


def fits(value: Any, kind: Any) -> bool:
    """Whether a value that was read from JSON is of a type: numbers are finite, true is no number."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in args)
    if origin is list:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, args[1]) for item in value.values())
    if kind is types.NoneType or isinstance(value, bool):
        return value is None if kind is types.NoneType else kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin in (list, tuple, typing.Sequence):
        return f"a list of {describe(args[0]).split(' ', 1)[-1]}s" if args else "a list"
    if kind is types.NoneType or kind is None:
        return "null"
    return NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def literals(kind: Any) -> list[Any]:
    """The values of a Literal type, or of the Literal parts of a union."""
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    return [word for arg in typing.get_args(kind) for word in literals(arg)]


def show(value: Any) -> str:
    """A value the way it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(v) for v in value) + "]"
    return str(value)


def plain(value: Any) -> Any:
    """The value in types of YAML and JSON, so that a configuration read back equals the one written."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
