"""Words for people: the closest known name to one that was mistyped, bytes with their unit."""

import difflib
from collections.abc import Iterable


def closest(wrong: str, known: Iterable[str]) -> str | None:
    """The known name closest to `wrong`, regardless of case; None if no name is close."""
    folded = {name.casefold(): name for name in known}
    wrong = wrong.casefold()
    close = difflib.get_close_matches(wrong, folded, n=1, cutoff=0.6) or [
        name for name in folded if wrong and name.startswith(wrong)
    ]
    return folded[close[0]] if close else None


def near(wrong: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the closest known name, for the end of a line; empty if none is close."""
    return f"; did you mean {close}?" if (close := closest(wrong, known)) is not None else ""


def suggestion(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """'did you mean <prefix>X?' for the closest known name, else 'known: ' and all of them."""
    known = list(known)
    close = closest(wrong, known)
    return f"did you mean {prefix}{close}?" if close is not None else f"known: {', '.join(known)}"


def size(count: float, least: str = "bytes") -> str:
    """Bytes with a binary unit; least: what a single byte's is called."""
    for unit in (least, "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == least else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
