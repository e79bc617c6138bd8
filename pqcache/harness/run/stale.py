"""Samples that other code computed: a cell whose method was edited is done again, and its old files are kept aside.

    set_aside(plan)        before anything of the plan runs; also what `fresh=true` asks for

The old files stay in the cell's folder as <name>.replaced-<n>. No reader takes them for results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.source import differs, own_source
from pqcache.harness.run.claims import Busy, claim

REPLACED = re.compile(r".+\.replaced-(\d+)")


def set_aside(plan: RunPlan) -> None:
    """Keep aside the samples and the row of each cell that is to be done again. Prints one line for each."""
    for cell in plan.cells:
        if cell.skip is not None or cell.method is None or not (why := _why(cell)):
            continue
        try:
            with claim(cell.folder):
                number = keep_aside(cell.folder)
        except (Busy, OSError):  # the cell's own run says so
            continue
        print(f"{cell.label}: {why}; done again, the old files are kept as *.replaced-{number}", flush=True)


def _why(cell: Cell) -> str:
    """Why a cell is to be done again; empty if its samples count."""
    files = [path for path in cell.folder.glob("samples*.jsonl") if path.is_file()]
    if cell.run.fresh:
        return "fresh=true" if files or (cell.folder / "row.json").exists() else ""
    own = own_source(cell.method) if files else ""
    changed = sum(_is_of_other_source(line, own, cell) for path in files for line in path.read_bytes().split(b"\n"))
    return f"{changed} samples are of other source of {cell.identity['method']['name']}" if changed else ""


def _is_of_other_source(line: bytes, own: str, cell: Cell) -> bool:
    """Whether a line is a sample of this cell that other code computed. Lines of another configuration are not used anyway."""
    if b'"source": "' not in line or f'"source": "{own}"'.encode() in line:  # most lines need not be parsed
        return False
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(sample, dict) or sample.get("cell", cell.about.mark) != cell.about.mark:
        return False
    return differs(str(sample.get("source", own)), own)


def keep_aside(folder: Path) -> int:
    """Rename a cell's samples, row, status and diagnostics. Returns the number that their new names end with."""
    numbers = [int(match[1]) for path in folder.iterdir() if (match := REPLACED.fullmatch(path.name))]
    number = max(numbers, default=0) + 1
    kept = [*folder.glob("samples*.jsonl"), *(folder / name for name in ("row.json", "status.json", "diagnostics"))]
    for path in kept:
        if path.exists():
            path.replace(path.with_name(f"{path.name}.replaced-{number}"))
    return number
