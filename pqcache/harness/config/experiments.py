"""The experiments of configs/experiment: tables and figures kept as configurations, many to a file.

    pqcache_table2:               one entry of pqcache.yaml: typed as experiment=pqcache_table2
      defaults: [...]
      cells: {...}

A file holds entries, each an experiment by its key; or it is one experiment itself. A file elsewhere is typed by its path
(docs/commands.md). Entries of a file share what they have in common by YAML's anchors. The comment above an entry begins with
the command that runs it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pqcache.harness.config.options import GROUPS, Refused
from pqcache.naming import suggestion
from pqcache.outside import read_text, read_yaml

FOLDER = "experiment"
MOST_ALIASES = 1000  # of a file, whose experiments share parts
# keys of an experiment; a file whose own keys are such is one experiment
KEYS = {"defaults", "cells", "model", "method", "task", "report", "hydra", "launch", "decode"}


@dataclass(frozen=True)
class Experiment:
    """One experiment. head: the lines of its comment, without `#`. values: what it sets, unchecked."""

    name: str
    file: Path
    head: list[str]
    values: dict[str, Any]

    @property
    def words(self) -> str:
        """What its command has behind `run.py`; empty where its comment begins with none."""
        return self.head[0].partition("run.py ")[2] if self.head else ""


def experiments(config_dir: Path) -> dict[str, Experiment]:
    """Name -> experiment, by file. Raises Refused for a file that is none."""
    files = sorted((config_dir / FOLDER).glob("*.yaml"))
    return {name: one for file in files for name, one in _read(file, file.stat().st_mtime_ns).items()}


def experiment_of(config_dir: Path, typed: str | None) -> Experiment | None:
    """The experiment of this name, of a file (a.yaml) or of an entry of one (a.yaml:first). Raises Refused for a wrong file."""
    if (of_file := re.fullmatch(r"(.+?\.ya?ml)(?::(.*))?", typed or "")) is None:
        return experiments(config_dir).get(typed) if typed else None
    path, entry = of_file.groups(default="")
    file = next((one for one in (Path(path).expanduser(), config_dir / FOLDER / path) if one.is_file()), None)
    if file is None:
        raise Refused([f"experiment={typed}: there is no such file"])
    entries = _read(file, file.stat().st_mtime_ns)
    name = entry or (file.stem if file.stem in entries or len(entries) != 1 else next(iter(entries)))
    if name not in entries:
        raise Refused([f"experiment={typed}: name one entry, as {path}:<entry>; {suggestion(entry, entries)}"])
    return entries[name]


@lru_cache(maxsize=256)
def _read(file: Path, changed: int) -> dict[str, Experiment]:
    try:
        text, values = read_text(file), read_yaml(file, MOST_ALIASES) or {}
    except (OSError, ValueError) as error:
        raise Refused([str(error)]) from error
    if not isinstance(values, dict):
        raise Refused([f"{file}: holds no experiments"])
    if KEYS & values.keys() or not all(isinstance(entry, dict) for entry in values.values()):
        return {file.stem: Experiment(file.stem, file, comment(text), _as_typed(values))}
    return {str(n): Experiment(str(n), file, comment(text, str(n)), _as_typed(one)) for n, one in values.items()}


def _as_typed(values: dict[str, Any]) -> dict[str, Any]:
    """What an experiment sets. What it says as a command line does, it sweeps over: `method: full,snapkv`, `method.m: 4`."""
    typed = {k: v for k, v in values.items() if "." in str(k) or isinstance(v, str) and (k in GROUPS or "," in v)}
    if not typed:
        return values
    hydra = values.get("hydra") or {}
    sweeper = hydra.get("sweeper") or {}
    hydra = {**hydra, "sweeper": {**sweeper, "params": {**(sweeper.get("params") or {}), **typed}}}
    return {**{k: v for k, v in values.items() if k not in typed}, "hydra": hydra}


def comment(text: str, key: str | None = None) -> list[str]:
    """The lines of the comment at the top of a YAML text, or above one of its keys, without `#`."""
    place = r"\A((?:#.*\n)*)" if key is None else rf"^((?:#.*\n)*)[\"']?{re.escape(key)}[\"']?\s*:"
    found = re.search(place, text, re.MULTILINE)
    return [line.lstrip("# ").rstrip() for line in found[1].splitlines()] if found else []
