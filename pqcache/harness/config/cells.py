"""Cells: one configuration each, its folder's name, and what the folder remembers (config.yaml, status.json).

<out>/<model>__<method>__<budget>__<task>__seed<seed>[__<key>=<value>...]__<8 hex digits of the configuration>/
    config.yaml     the resolved configuration, without out, wandb and limit
    samples.jsonl   one line per finished sample, appended at once
    row.json        the result (results.Row)
    status.json     running | ok | failed (with traceback) | interrupted | not applicable
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pqcache.atomic import write_text
from pqcache.harness.config.check import NOT_HASHED, Checked, Refused, RunOptions, check, show, smoke
from pqcache.harness.config.compose import Composed, Request
from pqcache.harness.report import published

MAX_NAME = 200  # bytes of a folder's name; the hash tells apart what is cut


@dataclass
class Cell:
    """One configuration to run."""

    identity: dict[str, Any]  # what is run: the content of config.yaml
    changed: dict[str, Any]  # its non-default keys
    run: RunOptions
    method: Any  # a pqcache.selective.Method, or None where `skip` says why
    skip: str | None  # why the method does not apply
    budgets: list[float | int] = field(default_factory=list)  # the budgets it stands for (several: it ignores them)
    names: list[str] = field(default_factory=list)  # the experiment's cells it stands for
    typed: tuple[str, ...] = ()  # what to type to run this cell alone
    published: float | None = None  # the paper's number, where an experiment repeats a printed table

    @property
    def name(self) -> str:
        return folder_name(self.identity, self.changed)

    @property
    def folder(self) -> Path:
        return Path(self.run.out).expanduser() / self.name

    def yaml(self) -> str:
        """The whole configuration, with the keys that are no part of the cell's identity."""
        extra = {key: getattr(self.run, key) for key in NOT_HASHED}
        return yaml.safe_dump({**self.identity, **extra}, sort_keys=False)

    @property
    def label(self) -> str:
        """For progress bars and messages."""
        parts = [self.identity["method"]["name"], budget_name(self.identity), self.identity["task"]["name"]]
        parts += [f"seed {self.identity['seed']}"] + [f"{k}={_short(v)}" for k, v in self.changed.items()]
        return " ".join(parts)

    @property
    def labels(self) -> list[str]:
        """What a paper's line of this cell may be called in results/published."""
        return [*self.names, self.identity["method"]["name"]]

    @property
    def ignores_budget(self) -> bool:
        return bool(getattr(self.method, "ignores_budget", False))


@dataclass
class RunPlan:
    """Everything a command will run, checked."""

    cells: list[Cell]
    sweep: bool
    experiment: str | None
    best_of: dict[str, list[str]] = field(default_factory=dict)  # see compose.Request
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def budgets(self) -> list[float | int]:
        """The budgets of a table; a method that ignores the budget adds none of its own."""
        own = [cell for cell in self.cells if not cell.ignores_budget] or self.cells
        return list(dict.fromkeys(budget for cell in own for budget in cell.budgets))


def make_plan(request: Request) -> RunPlan:
    """Check every configuration of a command before any of them runs; one bad value refuses them all."""
    errors = list(request.errors)
    found: dict[str, list[str | None]] = {}  # line -> the experiment's cells it was found in
    cells: dict[str, Cell] = {}
    for composed in smoke.reduced(request.composed):
        try:
            checked = check(composed.config, composed.group_defaults)
        except Refused as refused:
            for line in refused.lines:
                found.setdefault(line, []).append(composed.cell)
            continue
        if checked.skip is not None and request.experiment is None and not request.sweep:
            found.setdefault(checked.skip, []).append(composed.cell)
        errors += _add(cells, checked, composed)
    every = {composed.cell for composed in request.composed}
    errors += [line + _origin(named, every) for line, named in found.items()]
    if len({cell.run.out for cell in cells.values()}) > 1:
        errors.append("out: one command writes into one folder")
    for cell in cells.values():
        cell.published = published_score(request.experiment, cell)
        if not errors:
            errors += [line for line in [foreign_folder(cell)] if line]
    if errors:
        raise Refused(errors)
    return RunPlan(list(cells.values()), request.sweep, request.experiment, request.best_of, request.report)


def published_score(experiment: str | None, cell: Cell) -> float | None:
    """The paper's score of a cell; None outside an experiment whose paper prints one, and for a smoke run."""
    if experiment is None or cell.run.smoke:
        return None
    budget = None if cell.ignores_budget else cell.identity["budget"]
    model = cell.identity["model"]["name"]
    found = [published.score(experiment, model=model, method=label, budget=budget) for label in cell.labels]
    return next((value for value in found if value is not None), None)


def _origin(named: list[str | None], every: set[str | None]) -> str:
    """The experiment's cells an error was found in; nothing if it is in all of them (typed on the command line)."""
    names = [name for name in dict.fromkeys(named) if name is not None]
    return f" (in cell {', '.join(names)})" if names and set(named) != every else ""


def _add(cells: dict[str, Cell], checked: Checked, composed: Composed) -> list[str]:
    """Equal configurations are one cell: a method that ignores the budget runs once and stands for every budget."""
    new = Cell(checked.identity, checked.changed, checked.run, checked.method, checked.skip, typed=composed.typed)
    cell = cells.setdefault(new.name, new)
    cell.budgets = list(dict.fromkeys([*cell.budgets, composed.config["budget"]]))
    if composed.cell is not None:
        cell.names = list(dict.fromkeys([*cell.names, composed.cell]))
    two = [key for key in NOT_HASHED if getattr(cell.run, key) != getattr(new.run, key)]
    return [f"{key}: one command cannot run the same cell with two values of {key}" for key in two]


# -- names -------------------------------------------------------------------------------------------------------------


def digest(identity: dict[str, Any]) -> str:
    """8 hex digits of a resolved configuration."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def folder_name(identity: dict[str, Any], changed: dict[str, Any]) -> str:
    """model / method / budget / task / seed, every non-default key, and the digest."""
    model = identity["model"]
    model_name = model["name"] if model["name"] != "hf" else str(model["path"]).rstrip("/").split("/")[-1]
    parts = [model_name, identity["method"]["name"], budget_name(identity)]
    parts += [identity["task"]["name"], f"seed{identity['seed']}"]
    named = "model.path" if model["name"] == "hf" else ""  # is the name already
    parts += [f"{key}={_short(value)}" for key, value in changed.items() if key != named]
    name = "__".join(_clean(part) for part in parts)
    return f"{name[:MAX_NAME]}__{digest(identity)}"


def budget_name(identity: dict[str, Any]) -> str:
    """0.2, or 512tok."""
    budget = identity["budget"]
    return f"{budget}tok" if isinstance(budget, int) else str(budget)


def _short(value: Any) -> str:
    """A value for a name: of a path only its last part."""
    text = show(value)
    return Path(text).name if "/" in text else text


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=,-]+", "-", text)


# -- the folder --------------------------------------------------------------------------------------------------------


def foreign_folder(cell: Cell) -> str | None:
    """One line if the cell's folder holds another configuration."""
    path = cell.folder / "config.yaml"
    if not path.exists():
        return None
    try:
        found = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        found = None
    if found == cell.identity:
        return None
    keys = _differing(found, cell.identity) if isinstance(found, dict) else ["unreadable"]
    return f"{cell.folder}: holds another configuration ({', '.join(keys[:5])}); move it away or choose another out="


def _differing(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [line for k in sorted({*a, *b}) for line in _differing(a.get(k), b.get(k), f"{prefix}{k}.")]
    return [] if a == b else [prefix.rstrip(".")]


def open_folder(cell: Cell) -> Path:
    """Make the cell's folder and its config.yaml."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    path = cell.folder / "config.yaml"
    if not path.exists():
        write_text(path, yaml.safe_dump(cell.identity, sort_keys=False))
    return cell.folder


def write_status(folder: Path, status: str, **facts: Any) -> None:
    """Replace status.json."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_text(folder / "status.json", json.dumps({"status": status, "time": stamp, **facts}, indent=2) + "\n")
