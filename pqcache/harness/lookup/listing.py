"""list=methods|tasks|models|experiments: a name and one line each, from the code and the files of configs/."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pqcache import places
from pqcache.embedded import WEIGHTS
from pqcache.harness.config.overrides import options_of
from pqcache.harness.lookup.layout import pairs
from pqcache.registry import METHODS
from pqcache.sources import docstring


def methods() -> dict[str, str]:
    """Method -> what it does, with its paper: the first line of its module."""
    return {name: about_method(name) for name in METHODS}


def tasks() -> dict[str, str]:
    """Task -> what it asks."""
    from pqcache.harness.config.options import LM_EVAL
    from pqcache.harness.tasks import TASKS

    return {**{name: about_task(name) for name in TASKS}, LM_EVAL: _head("task", LM_EVAL)}


def models() -> dict[str, str]:
    """Model -> where its weights are from and what to know of it: the head of its file."""
    return {name: about_model(name) for name in options_of("model", places.CONFIGS)}


def experiments() -> dict[str, str]:
    """Experiment -> the first sentence of its file, after the command that runs it."""
    return {name: about_experiment(name) for name in options_of("experiment", places.CONFIGS)}


def about_method(name: str) -> str:
    module, own = docstring(METHODS[name])
    first, _, rest = (module or own).partition("\n")[0].partition(": ")
    # "PQCache: retrieve ..." says the name twice; "KVCrush with ...: ..." is a sentence of its own
    return rest if rest and " " not in first else first + (f": {rest}" if rest else "")


def about_task(name: str) -> str:
    from pqcache.embedded.families import FAMILIES
    from pqcache.harness.tasks import TASKS

    family = name.removeprefix("pocket_")
    if family != name:
        return f"PocketBench, one family. {FAMILIES[family].about}"
    if name.startswith("longbench_"):
        return _longbench(name.removeprefix("longbench_"))
    line = _first(sys.modules[TASKS[name].__module__].__doc__)
    return line.removeprefix(f"`{name}`: ")


def _longbench(name: str) -> str:
    from pqcache.harness.tasks.longbench.data_sets import DATASETS

    if name not in DATASETS:
        return "LongBench-E: the data sets of LongBench in three buckets of length."
    return f"LongBench's {name}, scored by {DATASETS[name].metric.replace('_', ' ')}."


def about_model(name: str) -> str:
    if name == "embedded":
        return "the small trained model inside the package; nothing is downloaded"
    if name in WEIGHTS:
        return "the same with weights of their own for task=long_chain, which takes them where no model is typed"
    head, path = _head("model", name), _value(_file("model", name), "path")
    return "; ".join(filter(None, [path, head]))


def about_experiment(name: str) -> str:
    text = " ".join(line.lstrip("# ") for line in comments(_file("experiment", name))[1:])
    first, end, _ = text.partition(". ")
    return first + ("." if end else "")


def comments(file: Path) -> list[str]:
    """The comment lines at the top of a file of configs/."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        found.append(line)
    return found


def _file(group: str, name: str) -> Path:
    return places.CONFIGS / group / f"{name}.yaml"


def _head(group: str, name: str) -> str:
    return " ".join(line.lstrip("# ") for line in comments(_file(group, name)))


def _value(file: Path, key: str) -> str:
    """A key's value in a model's file, without its comment."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}: "):
            return line.partition(": ")[2].partition(" #")[0]
    return ""


def _first(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "methods": methods,
    "tasks": tasks,
    "models": models,
    "experiments": experiments,
}


def text(kind: str) -> str:
    """The list, a line each where no terminal folds it."""
    write: Callable[[dict[str, str]], str] = partial(pairs, indent="")
    one = kind.removesuffix("s")
    command = f"{places.COMMAND} {one}=<name>"
    more = f"{places.COMMAND} explain=<name>"
    return f"{write(KINDS[kind]())}\n\nuse one: {command}   options and defaults: {more}"
