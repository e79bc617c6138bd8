"""Weights & Biases: one run per finished cell, with its scores and timings. A failure here never costs a result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pqcache.harness.cells import Cell
from pqcache.harness.results import Row

NOT_LOGGED = ("sample_scores", "versions", "model_options", "task_options", "hyper_parameters")


def track(cell: Cell, row: Row, samples: list[dict[str, Any]], mode: str) -> None:
    """Log a cell; wandb's files go under `out`/wandb. Prints one line if that did not work."""
    if mode == "disabled":
        return
    try:
        _track(cell, row, samples, mode)
    except Exception as error:  # wandb raises many kinds; the row is already on disk
        first = (str(error).splitlines() or [""])[0]
        print(f"wandb: not logged ({type(error).__name__}: {first}); the row is kept", file=sys.stderr)


def _track(cell: Cell, row: Row, samples: list[dict[str, Any]], mode: str) -> None:
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
        init_timeout=60,
    )
    run = wandb.init(
        project="pqcache-lab",
        name=cell.name,
        group=f"{row['model']}/{row['task']}",
        config=cell.identity,
        dir=str(folder.parent),
        mode=mode,  # type: ignore[arg-type]
        settings=settings,
        reinit="finish_previous",
    )
    try:
        for index, sample in enumerate(samples):
            times = ("tt2t_s", "prefill_s") if row["diagnostics"] is None else ()
            point = {key: sample[key] for key in ("score", *times, "new_tokens", "prompt_tokens")}
            run.log({f"sample/{k}": v for k, v in point.items() if v is not None}, step=index)
        run.summary.update({k: v for k, v in row.items() if k not in NOT_LOGGED and v is not None})
    finally:
        run.finish(exit_code=0)


def _keep_files_under(folder: Path) -> None:
    """wandb's cache, configuration and staging folders have environment variables and no other switch."""
    import os

    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        os.environ[name] = str(folder / name.removeprefix("WANDB_").removesuffix("_DIR").lower())
