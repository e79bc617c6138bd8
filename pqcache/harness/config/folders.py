"""Folders of cells, and what each remembers of its configuration.

<out>/<model>__<method>__<budget>__<task>__seed<seed>[__<key>=<value>...]__<8 hex digits of the identity>/
    config.yaml     the resolved configuration, without out, wandb and limit
    samples.jsonl   one line per finished sample, appended at once; workers write samples-<unit>-<attempt>.jsonl beside it
    owner.json      the process that runs the cell, or ran it last; .lock beside it (run/claims.py)
    row.json        the result (report.rows.Row)
    status.json     running | ok | failed (with traceback) | interrupted | not applicable
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from pqcache.atomic import sweep, write_text
from pqcache.harness.config.identity import Identity
from pqcache.harness.config.options import masked, without_secrets

CONFIG = "config.yaml"


def older(out: Path, wanted: Iterable[Identity]) -> dict[str, Path]:
    """Cell name -> the folder in which an older version of this project stored the same configuration, under another digest."""
    cells = {about.name: about for about in wanted}
    names = sorted(path.name for path in out.iterdir() if path.is_dir()) if out.is_dir() else []
    found: dict[str, Path] = {}
    for name in names:
        if name not in cells and (of := [a for a in cells.values() if name.startswith(f"{a.prefix}__")]):
            stored = read_config(out / name)
            found |= {a.name: out / name for a in of if a.name not in found and a.matches(stored)}
    return found


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
    keys = _differing(without_secrets(about.migrated(stored)), without_secrets(about.options))
    return f"{folder}: holds another configuration ({', '.join(keys[:5])}); move it away or choose another out="


def _differing(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [line for k in sorted({*a, *b}, key=str) for line in _differing(a.get(k), b.get(k), f"{prefix}{k}.")]
    return [] if a == b else [prefix.rstrip(".")]


def open_folder(folder: Path, about: Identity) -> Path:
    """Make a cell's folder and its config.yaml.

    A configuration that cannot be read is kept aside, with samples that do not say themselves which configuration is theirs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    if not isinstance(read_config(folder), dict):
        damaged = [path for path in [folder / CONFIG] if path.exists()]
        for path in folder.glob("samples*.jsonl"):
            lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
            damaged += [path] if any(b'"cell": "' not in line for line in lines) else []
        for path in damaged:
            path.replace(path.with_name(f"{path.name}.set-aside"))
            why = f"its configuration cannot be read; kept as {path.name}.set-aside, not used"
            print(f"{path}: {why}", file=sys.stderr)
        write_text(folder / CONFIG, yaml.safe_dump(about.shown, sort_keys=False))
    return folder


def write_status(folder: Path, status: str, **facts: Any) -> None:
    """Replace status.json. Secrets in its texts are masked."""
    facts = {key: masked(value) if isinstance(value, str) else value for key, value in facts.items()}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_text(folder / "status.json", json.dumps({"status": status, "time": stamp, **facts}, indent=2) + "\n")
