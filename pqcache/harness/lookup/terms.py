"""The words of the field and of the tables, with what they mean here (terms.yaml): what `explain=` says of them."""

import re
from functools import cache
from pathlib import Path

import yaml


@cache
def terms() -> dict[str, str]:
    """Names of one thing, the usual one first, with | between them -> what it is."""
    return yaml.safe_load(Path(__file__).with_name("terms.yaml").read_text(encoding="utf-8"))


def folded_name(text: str) -> str:
    """A name without case, plural, and what joins its words."""
    words = re.sub(r"[\s_-]+", " ", text.casefold()).strip()
    return words.removesuffix("s") if len(words) > 3 and not words.endswith("ss") else words


def find(asked: str) -> tuple[str, str] | None:
    """(the usual name, the meaning) of a term; None if it is none."""
    wanted = folded_name(asked)
    for key, meaning in terms().items():
        names = key.split(" | ")
        if any(folded_name(name) == wanted for name in names):
            return names[0] if len(names[0]) > 2 else asked, meaning
    return None


def every() -> list[str]:
    """All names, for a suggestion."""
    return [name for key in terms() for name in key.split(" | ")]
