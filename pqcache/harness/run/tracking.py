"""Weights & Biases: one run per finished cell, with its scores, timings and samples. A failure here never loses a result.

Rows are logged at the end of a command, when their comparison to Full is known. A cell has the same run whenever it is logged:
its id is the digest of the configuration. `logged.json` in a cell's folder says
which row was logged, and whether it was sent; a row that was not is logged by the next run of the command, or by wandb=sync.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pandas as pd

from pqcache.atomic import write_text
from pqcache.harness.config.cells import Cell, RunPlan
from pqcache.harness.config.options import one_line, say_once, without_secrets
from pqcache.harness.report.rows import Row, read_row
from pqcache.harness.report.sample_lines import read_all
from pqcache.outside import read_json

MARK = "logged.json"
SERVER = "https://api.wandb.ai"  # unless WANDB_BASE_URL names another one
PATIENCE_S = 3.0  # for the server's first answer
NOT_LOGGED = ("sample_scores", "answer_scores", "versions", "model_options", "task_options", "hyper_parameters")


SAMPLE_COLUMNS = ("task", "doc_id", "score", "prompt_end", "target", "response", "new_tokens", "tt2t_s")


def track(cell: Cell, row: Row, samples: list[dict[str, Any]], mode: str) -> bool:
    """Log a cell whose row is on disk; wandb's files go under `out`/wandb. False: it did not work."""

    def log() -> None:
        import wandb

        with _run(cell, cell.name, f"{row['model']}/{row['task']}", without_secrets(cell.identity), mode) as run:
            for index, sample in enumerate(samples):
                times = ("tt2t_s", "prefill_s") if row["diagnostics"] is None else ()
                point = {key: sample[key] for key in ("score", *times, "new_tokens", "prompt_tokens")}
                run.log({f"sample/{k}": v for k, v in point.items() if v is not None}, step=index)
            if samples:
                lines = [[sample.get(key) for key in SAMPLE_COLUMNS] for sample in samples]
                lines = [[", ".join(value) if isinstance(value, list) else value for value in line] for line in lines]
                run.log({"samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=lines)})
            run.summary.update({k: v for k, v in row.items() if k not in NOT_LOGGED and v is not None})
        write_text(cell.folder / MARK, json.dumps({"mode": mode, "row": _digest(cell.folder)}) + "\n")

    return _tried(log, mode, "wandb: not logged ({}); the row is kept, and wandb=sync sends it later")


def _tried(log: Callable[[], None], mode: str, otherwise: str) -> bool:
    """Log something. Why it did not work is one line, printed once however many cells there are."""
    try:
        if mode == "online" and (obstacle := _obstacle(os.environ.get("WANDB_BASE_URL") or SERVER)):
            raise ConnectionError(obstacle)
        log()
    except Exception as error:  # wandb raises many kinds; what it logs is on disk
        first = (str(error).splitlines() or [""])[0]
        say_once(one_line(otherwise.format(f"{type(error).__name__}: {first}")))
        return False
    return True


def track_rows(plan: RunPlan, mode: str) -> dict[str, int]:
    """Log the rows of a plan's cells that are on disk, each once. Returns how many there are of each kind."""
    counts = {"sent": 0, "sent before": 0, "not sent": 0, "cells without a row": 0}
    for cell in plan.cells:
        row = read_row(cell.folder / "row.json")
        if row is None:
            counts["cells without a row"] += 1
        elif is_logged(cell.folder, mode):
            counts["sent before"] += 1
        else:
            samples = [dict(sample) for sample in read_all(cell.folder, cell.about.mark)[0].values()]
            counts["sent" if track(cell, row, samples, mode) else "not sent"] += 1
    return counts


def sync(plan: RunPlan) -> int:
    """Send the rows of a plan's cells that are on disk and were not sent. Computes nothing. Returns the exit code."""
    counts = track_rows(plan, "online")
    print(f"wandb: {', '.join(f'{count} {what}' for what, count in counts.items())}")
    return 1 if counts["not sent"] else 0


def is_logged(folder: Path, mode: str) -> bool:
    """Whether the row that is in a cell's folder was logged: sent, or for mode=offline at least written."""
    try:
        known = read_json(folder / MARK)
        return known["mode"] in (mode, "online") and known["row"] == _digest(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "row.json").read_bytes()).hexdigest()[:16]


@cache
def _obstacle(server: str) -> str | None:
    """Why nothing can be sent to a server; None if nothing is known against it. Asked once: wandb itself tries for a minute."""
    address = urlsplit(server)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), PATIENCE_S).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached: {error.strerror or error}"
    import wandb

    return None if wandb.login(prompt=False) else "no key: run `wandb login`, or set WANDB_API_KEY"


def track_report(plan: RunPlan, files: Sequence[Path]) -> None:
    """Log an experiment's table (its CSV) and figures (PNG) as one run. Prints one line if that did not work."""
    mode, name = plan.cells[0].run.wandb, str(plan.experiment)

    def log() -> None:
        import wandb

        with _run(plan.cells[0], f"table-{name}", name, {"experiment": name}, mode) as run:
            artifact = wandb.Artifact(f"{name}-files", type="report")
            for path in files:
                if path.suffix == ".csv":
                    run.log({path.stem: wandb.Table(dataframe=pd.read_csv(path))})
                elif path.suffix == ".png":
                    run.log({f"{path.stem} figure": wandb.Image(str(path))})
                artifact.add_file(str(path))
            run.log_artifact(artifact)

    if mode != "disabled":
        _tried(log, mode, "wandb: table not logged ({}); its files are kept")


@contextmanager
def _run(cell: Cell, name: str, group: str, config: dict[str, Any], mode: str) -> Iterator[Any]:
    """A run of wandb, finished at the end."""
    import wandb

    typed, environment = cell.run, os.environ
    folder = (Path(environment.get("WANDB_DIR") or typed.out).expanduser() / "wandb").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # its cache, configuration and staging folders, of which environment variables are the only switch
    for part in ("cache", "config", "data", "artifact"):
        os.environ[f"WANDB_{part.upper()}_DIR"] = str(folder / part)
    settings = wandb.Settings(
        console="off",
        silent=True,
        x_disable_stats=True,
        x_disable_meta=True,
        disable_git=True,
        disable_code=True,
        init_timeout=20,
    )
    own = hashlib.sha256(name.encode()).hexdigest()[:16]
    run = wandb.init(
        project=typed.wandb_project or environment.get("WANDB_PROJECT") or "pqcache-lab",
        entity=typed.wandb_entity or environment.get("WANDB_ENTITY"),
        # the agent of a `wandb sweep` has made the run already
        id=environment.get("WANDB_RUN_ID") if environment.get("WANDB_SWEEP_ID") else own,
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
    try:
        yield run
    finally:
        run.finish(exit_code=0)
