"""Names with their meaning beside them, folded to the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping

WIDEST, NARROWEST = 110, 60  # characters of a line
NAMES = 26  # columns of the widest name beside which a meaning begins


def width() -> int | None:
    """Characters of a line; None where no terminal shows them, so that a line can be searched."""
    if not sys.stdout.isatty():
        return None
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns - 1))


def pairs(meanings: Mapping[str, str], indent: str = "  ", columns: int | None = None) -> str:
    """A line for each name, its meaning folded beside it. columns: of a line; None: those of the terminal."""
    beside = min(NAMES, max(map(len, meanings), default=0))
    return "\n".join(_pair(name, meaning, indent, beside, columns or width()) for name, meaning in meanings.items())


def _pair(name: str, meaning: str, indent: str, beside: int, columns: int | None) -> str:
    start = f"{indent}{name.ljust(beside)}  "
    if columns is None:
        return f"{start}{meaning}".rstrip()
    hanging = " " * (len(indent) + beside + 2)
    if len(name) > beside:  # the meaning begins on the next line
        return f"{indent}{name}\n" + folded(meaning, columns, hanging)
    return folded(meaning, columns, hanging, start) if meaning else start.rstrip()


def folded(text: str, columns: int | None, indent: str = "", first: str | None = None) -> str:
    """A text in lines of `columns` characters; one line where that is None."""
    start = indent if first is None else first
    if columns is None:
        return f"{start}{text}"
    return textwrap.fill(
        text, columns, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
