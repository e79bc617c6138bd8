"""Values of options: check those read from JSON, and show a value as it is typed or stored."""

from __future__ import annotations

import math
import types
import typing
from typing import Any


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
