"""Plain data as one line of JSON: what crosses the pipes of a child process.

None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict keep their type. A subclass arrives as its
base. An iterator, a range or a view arrives as an iterator over its items. Anything else is refused with TypeError, so that
no object with methods of its own reaches who reads it. Data sets (`datasets.Dataset`) cross only where that is asked for.
"""

import json
import sys
from collections.abc import Iterable, Iterator, KeysView, ValuesView
from typing import Any

LINE = 1 << 20  # bytes; longer lines are refused
ITEMS = 1 << 16  # items taken of one iterator


def dump(value: object, longest: int = LINE) -> bytes:
    """One line of ASCII, its end included. Raises TypeError for what is no plain data and ValueError if it is too long."""
    line = json.dumps(_tagged(value)).encode() + b"\n"
    if len(line) > longest:
        raise ValueError(f"more than {longest} bytes of data")
    return line


def load(line: bytes, data_sets: bool = False) -> object:
    """The value of a line. Raises ValueError for anything that `dump` does not write, and for a data set unless it may be one."""
    try:
        return _plain(json.loads(line), data_sets)
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise ValueError("not plain data") from error


def _tagged(value: object) -> object:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return {"int": hex(int(value))}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[_tagged(k), _tagged(v)] for k, v in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [_tagged(item) for item in value]}
    if isinstance(value, Iterator | range | KeysView | ValuesView):
        return {"iterator": [_tagged(item) for item in _first(value)]}
    if (datasets := sys.modules.get("datasets")) is not None and isinstance(value, datasets.Dataset):
        return {"data_set": [_tagged(row) for row in value]}
    raise TypeError(f"a value of type {type(value).__name__} is no plain data")


def _first(values: Iterable) -> list:
    taken: list = []
    for item in values:
        if len(taken) == ITEMS:
            raise ValueError(f"more than {ITEMS} items")
        taken.append(item)
    return taken


def _plain(value: object, data_sets: bool) -> object:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a bare list")
        return value
    ((kind, inside),) = value.items()
    if kind == "int":
        return int(inside, 16)
    if kind == "complex":
        return complex(*inside)
    if kind == "bytes":
        return bytes.fromhex(inside)
    if kind == "dict":
        return {_plain(k, data_sets): _plain(v, data_sets) for k, v in inside}
    items = [_plain(item, data_sets) for item in inside]
    if kind == "data_set" and data_sets:
        from datasets import Dataset

        return Dataset.from_list(items)
    made: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}[kind]
    return made(items)
