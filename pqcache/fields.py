"""Options are the fields of dataclasses: their types and defaults, their comments, how they enter a cell's identity,
and how a typed value becomes one of theirs.

The options of a method, of a task, of a model and of the command are fields of one dataclass each. A comment above a field,
or behind it on its line, describes the option; `make configs` writes it into configs/.
"""

import ast
import contextlib
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pqcache.naming import near


def added(default: Any, *, absent: Any) -> Any:
    """A field for an option that was added after results were stored. Folders that do not name it have the value `absent`.

    The option enters the hash of a cell's folder only where its value is not `absent`. Pass the old behaviour; it stays what it
    is when the default changes later.
    """
    return field(default=default, metadata={"absent": absent})


def added_options(cls: type) -> dict[str, Any]:
    """Options made by `added` -> their value in folders that do not name them."""
    return {f.name: f.metadata["absent"] for f in fields(cls) if "absent" in f.metadata}


def option_fields(cls: type, skip: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Field name -> (type, default; None where it has none) of a dataclass."""
    hints, left_out, found = hints_of(cls), set(skip), {}
    for f in fields(cls):
        if f.name not in left_out:
            default = f.default if f.default_factory is MISSING else f.default_factory()
            found[f.name] = hints[f.name], None if default is MISSING else default
    return found


hints_of = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))  # some annotations are text


# -- values ------------------------------------------------------------------------------------------------------------

LARGEST = 2**63  # numbers below it have an exact place in every file and tensor
MOST = 1 << 24  # of tokens, samples and so on: no model reads as many, and making them would take hours
# a type, its smallest and its largest value
Positive = Annotated[int, 1, MOST]
Whole = Annotated[int, 0, MOST]
Share = Annotated[float, 0, 1]
Part = Annotated[float, 1e-6, 1]
Bits = Annotated[int, 1, 8] | Literal[16]  # of a code; 16: exact
NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    dict: "a mapping",
}


@functools.cache  # coerce is asked of each of thousands of step times
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def coerce(value: Any, kind: Any) -> Any:
    """`value` as type `kind`. Raises TypeError that says what is expected, or for a value out of its range ValueError.

    An int passes as a float and as a string (out=2024), a bool never as a number.
    """
    origin, args = _parts(kind)
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = abs(value) < LARGEST if whole else isinstance(value, float) and math.isfinite(value)
    if kind is Any:
        return value
    if origin is Annotated:
        amount, (least, most) = coerce(value, args[0]), args[1:]
        if least <= amount <= most:
            return amount
        both = f"must be from {least:g} to {most:.6g}" if most < MOST else ""
        raise ValueError(both or (f"must be at least {least:g}" if amount < least else f"must be at most {most}"))
    if origin is Literal:
        for allowed in args:
            if value == allowed and type(value) is type(allowed):
                return value
        if type(value) is int and int in map(type, args):
            raise ValueError(f"must be {describe(kind)}")
    elif origin in (typing.Union, types.UnionType):
        wrong: list[ValueError] = []
        for option in sorted(args, key=lambda option: type(value) is not option):  # an exact type match wins
            try:
                return coerce(value, option)
            except TypeError:
                continue
            except ValueError as out_of_range:
                wrong.append(out_of_range)
        if wrong:
            raise ValueError(" or ".join(map(str, wrong)).replace("or must be", "or"))
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        with contextlib.suppress(TypeError):
            items = [coerce(v, args[0] if args else Any) for v in value]
            return tuple(items) if origin is tuple else items
    elif origin is dict and isinstance(value, dict):
        return {key: coerce(item, args[1]) for key, item in value.items()}
    elif kind is float and number:
        return float(value)
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind is str and whole:
        return str(value)
    elif kind is int:
        if whole and number:
            return value
    elif kind is not float and origin is None and isinstance(value, kind or types.NoneType):
        return value
    raise TypeError(describe(kind))


def describe(kind: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return describe(args[0])
    if origin is Literal:
        return " or ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin in (list, tuple):
        return f"a list of {describe(args[0]).split(' ', 1)[-1]}s" if args else "a list"
    if kind is types.NoneType or kind is None:
        return "null"
    return NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def literals(kind: Any) -> list[Any]:
    """The values of a Literal type, or of the Literal parts of a union."""
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    return [word for arg in typing.get_args(kind) for word in literals(arg)]


def hint(value: Any, kind: Any) -> str:
    """The nearest word of a type, for the end of a line that refuses a value; empty if none is near."""
    return near(value, map(str, literals(kind))) if isinstance(value, str) else ""


@functools.cache
def _limited(cls: type) -> list[tuple[str, Any]]:
    """(name, type) of each field that a dataclass or a base of it limits: by words, or by a range."""
    every = [(f.name, hints_of(base)[f.name]) for base in cls.__mro__ if is_dataclass(base) for f in fields(base)]
    ranged = [any(typing.get_origin(one) is Annotated for one in (kind, *typing.get_args(kind))) for _, kind in every]
    return [pair for pair, ranges in zip(every, ranged, strict=True) if ranges or literals(pair[1])]


def check_ranges(options: Any) -> None:
    """Raise the one-line ValueError of the first field of a dataclass whose number or word is none of its type's.

    A subclass that gives a field another default does not widen it.
    """
    cls: type = type(options)
    for name, kind in _limited(cls):
        if (value := getattr(options, name, None)) is not None:
            try:
                coerce(value, kind)
            except TypeError as expected:
                raise ValueError(f"{name}={value}: allowed is {expected}{hint(value, kind)}") from None
            except ValueError as out_of_range:
                raise ValueError(f"{name}={value}: {out_of_range}".replace("must be", "allowed is")) from None


# -- comments ----------------------------------------------------------------------------------------------------------


class Documented(NamedTuple):
    """An annotated name of a class, as its source has it."""

    name: str
    kind: str  # its annotation
    above: str  # the comment lines above it
    behind: str  # the comment at the end of its last line
    heads: bool  # an empty line is above the comment: it is of the names below, too

    @property
    def heading(self) -> str:
        """The heading of this name and those below it."""
        return self.above if self.heads else ""

    @property
    def meaning(self) -> str:
        """The comments that are of this name alone."""
        return "; ".join(filter(None, ["" if self.heads else self.above, self.behind]))


def comments(cls: type) -> dict[str, str]:
    """Option -> its comment, behind the field or above it.

    A subclass that gives a field another default keeps the comment of its base class, unless it has one of its own.
    """
    every = [one for base in reversed(cls.__mro__) for one in documented(base)]
    found = {one.name: text for one in every if (text := one.behind or one.above)}
    return {f.name: found[f.name] for f in fields(cls) if f.name in found}


@functools.cache
def documented(cls: type) -> tuple[Documented, ...]:
    """The annotated names of a class with their comments; none where it has no source."""
    try:
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    except (OSError, TypeError):  # a class made at run time
        return ()
    node = ast.parse("\n".join(lines)).body[0]
    return tuple(
        _documented(one, one.target.id, lines)
        for one in getattr(node, "body", ())
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    )


def _documented(node: ast.AnnAssign, name: str, lines: list[str]) -> Documented:
    first = last = node.lineno - 1
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    above = " ".join(line.strip().lstrip("#").strip() for line in lines[first:last])
    line = lines[(node.end_lineno or node.lineno) - 1]
    behind = line.encode()[node.end_col_offset :].decode().strip().removeprefix("#").strip()
    if behind.startswith(("type:", "fmt:", "noqa")):  # for tools
        behind = ""
    return Documented(name, ast.unparse(node.annotation), above, behind, not lines[first - 1].strip())
