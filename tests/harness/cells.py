"""What tests of whole runs share: the command as a fixture gives it, and the rows and states that lie on disk after."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from pqcache.harness.report.rows import Row, read_row

REPO = Path(__file__).resolve().parents[2]
Command = Callable[..., int]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def on_model(model: Path, out: Path) -> list[str]:
    """The words of a command on a local model that writes into `out`, and beside it what is prepared."""
    return ["model=hf", f"model.path={model}", f"out={out}", "wandb=disabled", f"cache_dir={out.parent / 'cache'}"]


def rows(out: Path) -> dict[str, Row]:
    """Method and budget -> row, for folders without other overrides."""
    result = [read_row(path) for path in out.glob("*/row.json")]
    return {f"{r['method']} {r['budget_ratio']}": r for r in result if r is not None}


def status(out: Path) -> dict[str, dict]:
    return {path.parent.name.split("__")[1]: json.loads(path.read_text()) for path in out.glob("*/status.json")}
