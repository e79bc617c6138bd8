"""Cells: one configuration and one folder each, and the checked plan of all the cells that a command runs.

<out>/<model>__<method>__<budget>__<task>__seed<seed>[__<key>=<value>...]__<8 hex digits of the identity>/
    config.yaml     the resolved configuration, without out, wandb and limit
    samples.jsonl   one line per finished sample, appended at once; workers write samples-<unit>-<attempt>.jsonl beside it
    owner.json      the process that runs the cell, or ran it last; .lock beside it (run/samples.py)
    row.json        the result (report.rows.Row)
    status.json     running | ok | failed (with traceback) | interrupted | not applicable
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pqcache.atomic import sweep, write_text
from pqcache.harness.config.check import Checked, Draft, finish, read
from pqcache.harness.config.compose import Composed, Request
from pqcache.harness.config.identity import Identity, Options, budget_name, short
from pqcache.harness.config.options import NOT_HASHED, Refused, masked, one_line, say_once, without_secrets
from pqcache.harness.config.smoke import reduced
from pqcache.harness.tasks import Task, task_of
from pqcache.outside import lines, read_json, read_yaml

CONFIG = "config.yaml"


@dataclass
class Cell(Checked):
    """One configuration to run."""

    experiment: str | None = None
    budgets: list[float | int] = field(default_factory=list)  # the command's budgets; several: the method ignores them
    names: list[str] = field(default_factory=list)  # the experiment's cells with this configuration
    typed: tuple[str, ...] = ()  # what to type to run this cell alone
    older: Path | None = None  # the folder in which an older version of this project stored the same configuration

    def __post_init__(self) -> None:
        # every option that decides what is computed: top-level keys, and one dictionary for each group
        self.identity: Options = self.about.options
        self.changed, self.name = self.about.changed, self.about.name

    @cached_property
    def task(self) -> Task[Any]:
        """Its task with its options."""
        name, options = self.identity["task"]["name"], {**self.identity["task"], **self.unhashed["task"]}
        return task_of(name, {key: value for key, value in options.items() if key != "name"})

    @property
    def spread(self) -> bool:
        """Whether the model's weights may be on several devices. A smoke run's small model never is."""
        return self.unhashed["model"]["device_map"] is not None and not self.run.smoke

    @property
    def folder(self) -> Path:
        return self.older or Path(self.run.out).expanduser() / self.name

    def yaml(self) -> str:
        """The configuration as --cfg job shows it. It includes the keys that are not part of the cell's identity."""
        extra = {key: getattr(self.run, key) for key in NOT_HASHED}
        extra["launch"] = {"name": self.launch.name, **asdict(self.launch)}
        shown = self.about.shown
        groups = {group: {**shown[group], **options} for group, options in self.unhashed.items()}
        return yaml.safe_dump(without_secrets({**shown, **groups, **extra}), sort_keys=False)

    @property
    def label(self) -> str:
        """For progress bars and messages."""
        parts = [self.identity["method"]["name"], budget_name(self.identity), self.identity["task"]["name"]]
        parts += [f"seed {self.identity['seed']}"] + [f"{k}={short(v)}" for k, v in self.changed.items()]
        return " ".join(parts)

    @property
    def labels(self) -> list[str]:
        """Names of this cell's line in results/published: the experiment's, or the method where it has none."""
        return self.names or [self.identity["method"]["name"]]

    @property
    def line(self) -> str:
        """What a line of this cell is called: its labels."""
        return ", ".join(self.labels)

    @property
    def ignores_budget(self) -> bool:
        return bool(getattr(self.method, "ignores_budget", False))


@dataclass(kw_only=True)
class RunPlan(Request):
    """Everything a command will run, checked."""

    cells: list[Cell]

    @property
    def budgets(self) -> list[float | int]:
        """The budgets of a table; a method that ignores the budget adds none of its own."""
        own = [cell for cell in self.cells if not cell.ignores_budget] or self.cells
        return list(dict.fromkeys(budget for cell in own for budget in cell.budgets))


def make_plan(request: Request) -> RunPlan:
    """Check every configuration of a command before any of them runs; one bad value refuses them all."""
    small = reduced(request.composed)
    found = _Found(small)
    drafts: list[tuple[Composed, Draft]] = []
    for composed in small:
        with found.of(composed):
            drafts.append((composed, draft := read(composed)))
            found.add(draft.errors, composed)
    errors = list(request.errors)
    if len({json.dumps(composed.config.get("launch"), sort_keys=True) for composed in request.composed}) > 1:
        errors.append("launch: one command runs in one place")
    if len({draft.run.out for _, draft in drafts}) > 1:
        errors.append("out: one command writes into one folder")
    wrong = [*errors, *found.lines]
    if wrong and not any(draft.is_open(composed.typed, wrong) for composed, draft in drafts):
        raise Refused([*errors, *found.text()])  # before torch is imported
    cells: dict[str, Cell] = {}
    for composed, draft in drafts:
        with found.of(composed):
            checked = finish(draft)
            if checked.skip is not None and request.experiment is None and not request.sweep:
                found.add([checked.skip], composed)  # in a table, a method that does not apply is a line that says why
            found.add(_add(cells, checked, composed, request.experiment), composed)
    out = Path(next(iter(cells.values())).run.out).expanduser() if cells else Path()
    if not (lines := [*errors, *found.text()]):
        found_older = older(out, [cell.about for cell in cells.values()]) if out.is_dir() else {}
        for cell in cells.values():
            if cell.folder.exists():
                lines += filter(None, [foreign(cell.folder, cell.about)])
            else:
                cell.older = found_older.get(cell.name)
    if lines:
        raise Refused(lines)
    return RunPlan(**{**vars(request), "composed": [], "cells": list(cells.values())})


@dataclass
class _Found:
    """The errors of configurations: line -> the configurations that have it."""

    every: list[Composed]
    lines: dict[str, list[Composed]] = field(default_factory=dict)

    def add(self, lines: Iterable[str], composed: Composed) -> None:
        for line in lines:
            if composed not in (having := self.lines.setdefault(line, [])):
                having.append(composed)

    @contextmanager
    def of(self, composed: Composed) -> Iterator[None]:
        """What is refused here is this configuration's."""
        try:
            yield
        except Refused as refused:
            self.add(refused.lines, composed)

    def text(self) -> list[str]:
        """Each line, with what only the configurations that have it have in common: the command may be right for others."""
        return [line + self._origin(having) for line, having in self.lines.items()]

    def _origin(self, having: list[Composed]) -> str:
        """The cells, methods, tasks or models that have an error. Empty if all have it: then it was typed for all of them."""
        cells = [one.cell for one in having if one.cell is not None]
        if cells and {one.cell for one in having} != {one.cell for one in self.every}:
            return f" (in cell {', '.join(dict.fromkeys(cells))})"
        for group in ("method", "task", "model"):
            named, others = ({str(one.files[group].get("name")): 0 for one in some} for some in (having, self.every))
            if len(named) < len(others):
                return f" (with {group}={', '.join(named)})"
        return ""


def _add(cells: dict[str, Cell], checked: Checked, composed: Composed, experiment: str | None) -> list[str]:
    """Add a configuration to `cells` and return its errors.

    Equal configurations are one cell: a method that ignores the budget runs once for all budgets.
    """
    new = Cell(**vars(checked), experiment=experiment, typed=composed.typed)
    cell = cells.setdefault(new.name, new)
    cell.budgets = list(dict.fromkeys([*cell.budgets, composed.config["budget"]]))
    if composed.cell is not None:
        cell.names = list(dict.fromkeys([*cell.names, composed.cell]))
    two = [key for key in NOT_HASHED if getattr(cell.run, key) != getattr(new.run, key)]
    for group, options in cell.unhashed.items():
        two += [f"{group}.{key}" for key, value in options.items() if new.unhashed[group].get(key) != value]
    return [f"{key}: one command cannot run the same cell with two values of {key}" for key in two]


# -- what a cell's folder remembers of its configuration ----------------------------------------------------------------


def older(out: Path, wanted: Iterable[Identity]) -> dict[str, Path]:
    """Cell name -> the folder in which an older version of this project stored the same configuration, under another digest."""
    cells = {about.name: about for about in wanted}
    names = sorted(path.name for path in out.iterdir() if path.is_dir())
    found: dict[str, Path] = {}
    for name in names:
        if name not in cells and (of := [a for a in cells.values() if name.startswith(f"{a.prefix}__")]):
            stored = read_config(out / name)
            found |= {a.name: out / name for a in of if a.name not in found and a.matches(stored)}
    return found


def read_config(folder: Path) -> Any:
    """The configuration that a folder was made for; None if it is missing or unreadable."""
    try:
        return read_yaml(folder / CONFIG)
    except (OSError, ValueError):
        return None


OPTIONS = {"model": "model_options", "method": "hyper_parameters", "task": "task_options"}  # of a group -> in a row


def contradicted(folder: Path, row: Mapping[str, Any]) -> list[str]:
    """What a row says of its cell that its folder's configuration, if there is one, does not."""
    try:
        stored = read_config(folder)
        wrong = [key for key in ("seed", "protocol") if stored[key] != row[key]]
        for group, options in OPTIONS.items():
            said = {**stored[group], "name": stored[group]["path" if stored[group]["name"] == "hf" else "name"]}
            known = {**row[options], "name": row[group], **({"device": said.get("device")} if group == "model" else {})}
            wrong += [f"{group}.{key}" for key, value in said.items() if key in known and known[key] != value]
        return wrong
    except (KeyError, TypeError):  # there is none, or none that is known
        return []


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


def open_folder(cell: Cell) -> Path:
    """Make the cell's folder and its config.yaml.

    A configuration that cannot be read is kept aside, with samples that do not say themselves which configuration is theirs.
    """
    folder = cell.folder
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    if not isinstance(read_config(folder), dict):
        damaged = [path for path in [folder / CONFIG] if path.exists()]
        for path in folder.glob("samples*.jsonl"):
            damaged += [path] if any(b'"cell": "' not in line for _, _, line in lines(path) if line.strip()) else []
        for path in damaged:
            path.replace(path.with_name(f"{path.name}.set-aside"))
            why = f"its configuration cannot be read; kept as {path.name}.set-aside, not used"
            print(f"{path}: {why}", file=sys.stderr)
        write_text(folder / CONFIG, yaml.safe_dump(cell.about.shown, sort_keys=False))
    return folder


def write_status(folder: Path, status: str, **facts: Any) -> None:
    """Replace status.json; a full disk, of which more is said elsewhere, leaves it. Secrets in its texts are masked."""
    facts = {key: masked(value) if isinstance(value, str) else value for key, value in facts.items()}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    try:
        write_text(folder / "status.json", json.dumps({"status": status, "time": stamp, **facts}, indent=2) + "\n")
    except OSError as error:
        say_once(f"{folder}: status.json cannot be written ({one_line(error)})")


def read_status(folder: Path) -> tuple[str, str]:
    """(status, reason) as a cell's folder has them; empty texts where there are none."""
    try:
        known = read_json(folder / "status.json")
        return str(known["status"]), str(known.get("reason") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", ""
