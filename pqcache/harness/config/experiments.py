"""The experiments of configs/experiment: tables and figures kept as configurations, many to a file.

    pqcache_table2:               one entry of pqcache.yaml: typed as experiment=pqcache_table2
      defaults: [...]
      cells: {...}

A file holds entries, each an experiment by its key, which is not the file's name; or it is one experiment itself. Entries of
a file share what they have in common by YAML's anchors. The comment above an entry begins with the command that runs it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pqcache.outside import read_yaml

FOLDER = "experiment"
MOST_ALIASES = 1000  # of a file, whose experiments share parts
# keys of an experiment; a file whose own keys are such is one experiment
KEYS = {"defaults", "cells", "model", "method", "task", "report", "hydra", "launch", "decode"}


@dataclass(frozen=True)
class Experiment:
    """One experiment. head: the lines of its comment, without `#`. values: what it sets, unchecked."""

    file: Path
    head: list[str]
    values: dict[str, Any]

    @property
    def words(self) -> str:
        """What its command has behind `run.py`; empty where its comment begins with none."""
        return self.head[0].partition("run.py ")[2] if self.head else ""


def experiments(config_dir: Path) -> dict[str, Experiment]:
    """Name -> experiment, by file. Raises ValueError for a file that is none."""
    files = sorted((config_dir / FOLDER).glob("*.yaml"))
    return {name: one for file in files for name, one in _read(file, file.stat().st_mtime_ns).items()}


@lru_cache(maxsize=256)
def _read(file: Path, changed: int) -> dict[str, Experiment]:
    text = file.read_text(encoding="utf-8")
    values = read_yaml(file, MOST_ALIASES) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{file}: holds no experiments")
    if KEYS & values.keys() or not all(isinstance(entry, dict) for entry in values.values()):
        return {file.stem: Experiment(file, comment(text), values)}
    return {str(name): Experiment(file, comment(text, str(name)), entry) for name, entry in values.items()}


def comment(text: str, key: str | None = None) -> list[str]:
    """The lines of the comment at the top of a YAML text, or above one of its keys, without `#`."""
    place = r"\A((?:#.*\n)*)" if key is None else rf"^((?:#.*\n)*)[\"']?{re.escape(key)}[\"']?\s*:"
    found = re.search(place, text, re.MULTILINE)
    return [line.lstrip("# ").rstrip() for line in found[1].splitlines()] if found else []
