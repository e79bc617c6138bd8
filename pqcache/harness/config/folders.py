"""Folders of cells: their names, and what each remembers of its configuration.

<out>/<model>__<method>__<budget>__<task>__seed<seed>[__<key>=<value>...]__<8 hex digits of the identity>/
    config.yaml     the resolved configuration, without out, wandb and limit
    samples.jsonl   one line per finished sample, appended at once; workers write samples-<unit>-<attempt>.jsonl beside it
    owner.json      the process that runs the cell, or ran it last; .lock beside it (run/claims.py)
    row.json        the result (report.rows.Row)
    status.json     running | ok | failed (with traceback) | interrupted | not applicable
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pqcache.atomic import sweep, write_text
from pqcache.harness.config.identity import Identity, Options
from pqcache.harness.config.options import masked, without_secrets
from pqcache.harness.config.values import show

MAX_NAME = 200  # characters of a folder's name before the hash, which tells apart names that are cut
CONFIG = "config.yaml"


def folder_name(about: Identity) -> str:
    """model / method / budget / task / seed, every key that is not at its default, and the digest."""
    named = "model.path" if about.options["model"]["name"] == "hf" else ""  # already in the prefix
    changed = [f"{key}={short(value)}" for key, value in about.changed.items() if key != named]
    name = "__".join([_prefix(about), *map(_clean, changed)])
    return f"{name[:MAX_NAME]}__{about.digest}"


def _prefix(about: Identity) -> str:
    """The beginning of every folder name for this configuration, whatever version made the folder."""
    options = about.options
    model = options["model"]
    model_name = model["name"] if model["name"] != "hf" else masked(str(model["path"])).rstrip("/").split("/")[-1]
    parts = [model_name, options["method"]["name"], budget_name(options)]
    return "__".join(map(_clean, [*parts, options["task"]["name"], f"seed{options['seed']}"]))


def budget_name(options: Options) -> str:
    """0.2, or 512tok."""
    budget = options["budget"]
    return f"{budget}tok" if isinstance(budget, int) else str(budget)


def short(value: Any) -> str:
    """A value as part of a name; a path is cut to its last part."""
    text = show(value)
    return Path(text).name if "/" in text else text


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=,-]+", "-", text)


# -- what a folder holds -----------------------------------------------------------------------------------------------


class Stored:
    """The folders under `out` that belong to no cell of this command. Each config.yaml is read once, when first needed."""

    def __init__(self, out: Path, own: Collection[str]) -> None:
        self.out, self.own = out, own
        self._configs: dict[str, Any] = {}

    @cached_property
    def names(self) -> list[str]:
        if not self.out.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.out) if entry.is_dir() and entry.name not in self.own)

    def find(self, about: Identity) -> Path | None:
        """A folder of an older version: it holds this configuration, and its name ends with another digest."""
        prefix = f"{_prefix(about)}__"
        for name in self.names:
            if name.startswith(prefix):
                if name not in self._configs:
                    self._configs[name] = read_config(self.out / name)
                if about.matches(self._configs[name]):
                    return self.out / name
        return None


def read_config(folder: Path) -> Any:
    """The configuration that a folder was made for; None if it is missing or unreadable."""
    try:
        return yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def foreign(folder: Path, about: Identity) -> str | None:
    """One line if a cell's folder holds another configuration."""
    stored = read_config(folder)
    if not isinstance(stored, dict) or about.matches(stored):  # `open_folder` sets what cannot be read aside
        return None
    keys = _differing(without_secrets(about.filled(stored)), without_secrets(about.options))
    return f"{folder}: holds another configuration ({', '.join(keys[:5])}); move it away or choose another out="


def _differing(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [line for k in sorted({*a, *b}, key=str) for line in _differing(a.get(k), b.get(k), f"{prefix}{k}.")]
    return [] if a == b else [prefix.rstrip(".")]


def open_folder(folder: Path, about: Identity) -> Path:
    """Make a cell's folder and its config.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    path = folder / CONFIG
    if not isinstance(read_config(folder), dict):
        _set_aside(folder)
        write_text(path, yaml.safe_dump(about.shown, sort_keys=False))
    return folder


def _set_aside(folder: Path) -> None:
    """Rename a configuration that cannot be read, and samples that do not say themselves which configuration is theirs."""
    damaged = [path for path in [folder / CONFIG] if path.exists()]
    for path in folder.glob("samples*.jsonl"):
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        damaged += [path] if any(b'"cell": "' not in line for line in lines) else []
    for path in damaged:
        path.replace(path.with_name(f"{path.name}.set-aside"))
        print(f"{path}: its configuration cannot be read; kept as {path.name}.set-aside, not used", file=sys.stderr)


def write_status(folder: Path, status: str, **facts: Any) -> None:
    """Replace status.json. Secrets in its texts are masked."""
    facts = {key: masked(value) if isinstance(value, str) else value for key, value in facts.items()}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_text(folder / "status.json", json.dumps({"status": status, "time": stamp, **facts}, indent=2) + "\n")
