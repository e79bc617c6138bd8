"""The experiments of configs/experiment: tables and figures kept as configurations, many to a file.

    pqcache_table2:               one entry of pqcache.yaml: typed as experiment=pqcache_table2
      defaults: [...]
      cells: {...}

A file holds entries, each an experiment by its key, which is not the file's name; or it is one experiment itself. Entries of
a file share what they have in common by YAML's anchors. The comment above an entry begins with the command that runs it.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = "experiment"
# keys of an experiment; a file whose own keys are such is one experiment
KEYS = {"defaults", "cells", "model", "method", "task", "report", "hydra", "launch", "decode"}


@dataclass(frozen=True)
class Experiment:
    """One experiment. head: the lines of its comment, without `#`. values: what it sets, unchecked."""

    file: Path
    head: tuple[str, ...]
    values: dict[str, Any]

    @property
    def words(self) -> str:
        """What its command has behind `run.py`; empty where its comment begins with none."""
        return self.head[0].partition("run.py ")[2] if self.head else ""


def experiments(config_dir: Path) -> dict[str, Experiment]:
    """Name -> experiment, by file. Raises yaml.YAMLError or ValueError for a file that is none."""
    files = sorted((config_dir / FOLDER).glob("*.yaml"))
    return {name: one for file in files for name, one in _read(file, file.stat().st_mtime_ns).items()}


@lru_cache(maxsize=256)
def _read(file: Path, changed: int) -> dict[str, Experiment]:
    text = file.read_text(encoding="utf-8")
    values = yaml.safe_load(text) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{file}: holds no experiments")
    if KEYS & values.keys() or not all(isinstance(entry, dict) for entry in values.values()):
        return {file.stem: Experiment(file, _comment(text.splitlines(), 0), values)}
    lines = text.splitlines()
    entries = {}
    for name, entry in values.items():
        first = at = next(i for i, line in enumerate(lines) if line.partition(":")[0].strip("\"'") == name)
        while first and lines[first - 1].startswith("#"):
            first -= 1
        entries[str(name)] = Experiment(file, _comment(lines[:at], first), entry)
    return entries


def _comment(lines: list[str], first: int) -> tuple[str, ...]:
    """The lines of the comment that begins at a line."""
    head = []
    for line in lines[first:]:
        if not line.startswith("#"):
            break
        head.append(line.lstrip("# ").rstrip())
    return tuple(head)
