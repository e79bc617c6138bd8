"""`pqcache.methods()`: every method's name, kind and paper, in one line each."""

import re
import sys
from dataclasses import dataclass

from pqcache.registry import METHODS, NotLoaded, method_class


@dataclass(frozen=True)
class MethodInfo:
    """One method, as `pqcache.methods()` lists it."""

    name: str  # what `use` takes
    kind: str  # keep all | retrieve | evict | quantize, or two of them
    paper: str  # authors and arXiv number; empty for compositions and plain baselines
    summary: str

    def __str__(self) -> str:
        return f"{self.name:<16} {self.kind:<17} {self.summary}" + (f" ({self.paper})" if self.paper else "")


class Methods(dict[str, MethodInfo]):
    """Name -> MethodInfo. Prints one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.values()))

    __repr__ = __str__


def methods() -> Methods:
    """All methods by name, in the order of the table of methods: `print(pqcache.methods())`."""
    return Methods({name: _describe(name) for name in METHODS})


def _describe(name: str) -> MethodInfo:
    """A method in words: the first line of its module says what it does and whose it is."""
    try:
        cls = method_class(name)
    except NotLoaded as error:
        return MethodInfo(name, "", "", str(error))
    line = (sys.modules[cls.__module__].__doc__ or "").partition("\n")[0].rstrip(".")
    title, _, rest = line.partition(": ")
    what = rest if rest and len(title.split()) <= 2 else line  # a title longer than a name says something
    cited = re.search(r" \(([^()]*arXiv \d{4}\.\d{4,5})[^()]*\)", what)
    summary = what if cited is None else what.replace(cited.group(), "")
    return MethodInfo(name, cls.kind, "" if cited is None else cited.group(1), summary)
