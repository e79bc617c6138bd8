"""The names of lm-eval's tasks, groups and tags, from the text of its definitions: a mistyped one is refused at once.

lm-eval itself takes ten seconds and more to be imported and to parse its 14,000 files.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

# A definition's name, or a list of its tags. Definitions include files without a suffix, whose tags they share.
NAMED = re.compile(rb"""^["']?(?:task|group|tag)["']?[ \t]*:[ \t]*([^\n]*)((?:\n[ \t]*-[ \t][^\n]*)*)""", re.MULTILINE)
WORD = re.compile(rb"""[^\s,\[\]"'#-][^\s,\[\]"'#]*""")
CLOSE = 60  # names that are compared with care


def names(folder: Path | None = None) -> set[str]:
    """The names in a folder of definitions, and a few words that are none. None: all that lm-eval knows.

    Empty where lm-eval keeps its definitions elsewhere.
    """
    found: set[bytes] = set()
    for text in _texts(_folder() if folder is None else folder):
        for one, more in NAMED.findall(text):
            found.update(WORD.findall(one.partition(b" #")[0]), WORD.findall(more))
    return {name.decode(errors="replace") for name in found}


def closest_names(wrong: str, known: set[str]) -> list[str]:
    """The names that are closest to a mistyped one, of thousands."""
    from rapidfuzz.fuzz import ratio
    from rapidfuzz.process import extract

    return [name for name, *_ in extract(wrong, sorted(known), scorer=ratio, limit=CLOSE)]


def is_written_in(folder: Path, name: str) -> bool:
    """Whether a definition in a folder holds the name, as a name or in any other way."""
    return any(name.encode() in text for text in _texts(folder))


def _folder() -> Path | None:
    spec = importlib.util.find_spec("lm_eval")
    return Path(spec.origin).parent / "tasks" if spec is not None and spec.origin is not None else None


def _texts(folder: Path | str | None) -> Iterator[bytes]:
    """The text of every definition in a folder, and of every file that one may include."""
    try:
        entries = list(os.scandir(folder)) if folder is not None else []
    except OSError:
        return
    for entry in entries:
        if entry.is_dir():
            yield from _texts(entry.path)
        elif entry.name.endswith(".yaml") or "." not in entry.name:
            try:
                with open(entry.path, "rb", buffering=0) as file:
                    yield file.read()
            except OSError:
                continue
