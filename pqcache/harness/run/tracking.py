"""Weights & Biases: one run per finished cell, with its scores, timings and samples. A failure here never loses a result.

A cell has the same run whenever it is logged: its id is the digest of the configuration.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import without_secrets
from pqcache.harness.report.rows import Row

NOT_LOGGED = ("sample_scores", "versions", "model_options", "task_options", "hyper_parameters")


SAMPLE_COLUMNS = ("task", "doc_id", "score", "prompt_end", "target", "response", "new_tokens", "tt2t_s")


def track(cell: Cell, row: Row, samples: list[dict[str, Any]], mode: str) -> None:
    """Log a cell; wandb's files go under `out`/wandb. Prints one line if that did not work."""
    if mode == "disabled":
        return
    try:
        _track(cell, row, samples, mode)
    except Exception as error:  # wandb raises many kinds; the row is already on disk
        first = (str(error).splitlines() or [""])[0]
        print(f"wandb: not logged ({type(error).__name__}: {first}); the row is kept", file=sys.stderr)


def track_report(plan: RunPlan, files: Sequence[Path]) -> None:
    """Log an experiment's table (its CSV) and figures (PNG) as one run. Prints one line if that did not work."""
    cell = plan.cells[0]
    if cell.run.wandb == "disabled":
        return
    try:
        _track_report(plan, files, cell.run.wandb)
    except Exception as error:  # as in `track`
        first = (str(error).splitlines() or [""])[0]
        print(f"wandb: table not logged ({type(error).__name__}: {first}); its files are kept", file=sys.stderr)


def _track_report(plan: RunPlan, files: Sequence[Path], mode: str) -> None:
    import pandas as pd
    import wandb

    run = _start(plan.cells[0], f"table-{plan.experiment}", str(plan.experiment), {"experiment": plan.experiment}, mode)
    try:
        for path in files:
            if path.suffix == ".csv":
                run.log({path.stem: wandb.Table(dataframe=pd.read_csv(path))})
            elif path.suffix == ".png":
                run.log({f"{path.stem} figure": wandb.Image(str(path))})
    finally:
        run.finish(exit_code=0)


def _track(cell: Cell, row: Row, samples: list[dict[str, Any]], mode: str) -> None:
    import wandb

    run = _start(cell, cell.name, f"{row['model']}/{row['task']}", without_secrets(cell.identity), mode)
    try:
        for index, sample in enumerate(samples):
            times = ("tt2t_s", "prefill_s") if row["diagnostics"] is None else ()
            point = {key: sample[key] for key in ("score", *times, "new_tokens", "prompt_tokens")}
            run.log({f"sample/{k}": v for k, v in point.items() if v is not None}, step=index)
        if samples:
            lines = [[sample.get(key) for key in SAMPLE_COLUMNS] for sample in samples]
            lines = [[", ".join(value) if isinstance(value, list) else value for value in line] for line in lines]
            run.log({"samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=lines)})
        run.summary.update({k: v for k, v in row.items() if k not in NOT_LOGGED and v is not None})
    finally:
        run.finish(exit_code=0)


def _start(cell: Cell, name: str, group: str, config: dict[str, Any], mode: str) -> Any:
    import wandb

    folder = (Path(cell.run.out).expanduser() / "wandb").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _keep_files_under(folder)
    settings = wandb.Settings(
        console="off",
        silent=True,
        x_disable_stats=True,
        x_disable_meta=True,
        disable_git=True,
        disable_code=True,
        init_timeout=20,
    )
    typed, environment = cell.run, os.environ
    return wandb.init(
        project=typed.wandb_project or environment.get("WANDB_PROJECT") or "pqcache-lab",
        entity=typed.wandb_entity or environment.get("WANDB_ENTITY"),
        id=hashlib.sha256(name.encode()).hexdigest()[:16],
        resume="allow",
        name=name,
        group=typed.wandb_group or environment.get("WANDB_RUN_GROUP") or group,
        tags=typed.wandb_tags,
        config=config,
        dir=str(folder.parent),
        mode=mode,  # type: ignore[arg-type]
        settings=settings,
        reinit="finish_previous",
    )


def _keep_files_under(folder: Path) -> None:
    """Move wandb's cache, configuration and staging folders. Environment variables are its only switch."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        os.environ[name] = str(folder / name.removeprefix("WANDB_").removesuffix("_DIR").lower())
