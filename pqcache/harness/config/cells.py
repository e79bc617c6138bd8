"""Cells: one configuration each, and the checked plan of all the cells that a command runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pqcache.harness.config import folders, machine
from pqcache.harness.config.compose import Composed, Request
from pqcache.harness.config.identity import Identity, Options
from pqcache.harness.config.launch import Launch, LocalLaunch
from pqcache.harness.config.options import NOT_HASHED, DecodeOptions, Refused, RunOptions, without_secrets
from pqcache.harness.config.smoke import reduced
from pqcache.harness.config.validation import Checked, Values, check, read


@dataclass
class Cell:
    """One configuration to run."""

    about: Identity
    run: RunOptions
    method: Any  # a pqcache.selective.Method, or None where it cannot be made
    skip: str | None  # why the method does not apply
    experiment: str | None = None
    budgets: list[float | int] = field(default_factory=list)  # the command's budgets; several: the method ignores them
    names: list[str] = field(default_factory=list)  # the experiment's cells with this configuration
    typed: tuple[str, ...] = ()  # what to type to run this cell alone
    launch: Launch = field(default_factory=LocalLaunch)  # where it runs
    device: str = "auto"  # model.device as it was typed, with its index
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    unhashed: dict[str, Options] = field(default_factory=dict)  # group -> its options that are no part of the identity
    older: Path | None = None  # the folder in which an older version of this project stored the same configuration

    @property
    def identity(self) -> Options:
        """Every option that decides what is computed: top-level keys, and one dictionary for each group."""
        return self.about.options

    @property
    def spread(self) -> bool:
        """Whether the model's weights may be on several devices. A smoke run's small model never is."""
        return self.unhashed.get("model", {}).get("device_map") is not None and not self.run.smoke

    @property
    def changed(self) -> Options:
        """The identity's keys that are not at their default, groups with a dot."""
        return self.about.changed

    @property
    def name(self) -> str:
        return folders.folder_name(self.about)

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
        parts = [self.identity["method"]["name"], folders.budget_name(self.identity), self.identity["task"]["name"]]
        parts += [f"seed {self.identity['seed']}"] + [f"{k}={folders.short(v)}" for k, v in self.changed.items()]
        return " ".join(parts)

    @property
    def labels(self) -> list[str]:
        """Names of this cell's line in results/published: the experiment's, or the method where it has none."""
        return self.names or [self.identity["method"]["name"]]

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
    report: Options = field(default_factory=dict)
    words: tuple[str, ...] = ()  # the command line
    summary: str | None = None  # see compose.Request

    @property
    def launch(self) -> Launch:
        """Where the cells run."""
        return self.cells[0].launch

    @property
    def budgets(self) -> list[float | int]:
        """The budgets of a table; a method that ignores the budget adds none of its own."""
        own = [cell for cell in self.cells if not cell.ignores_budget] or self.cells
        return list(dict.fromkeys(budget for cell in own for budget in cell.budgets))


def make_plan(request: Request, *, runs: bool = False) -> RunPlan:
    """Check every configuration of a command before any of them runs; one bad value refuses them all.

    runs: unless it asks for its plan alone, the command will run on this machine, which must have what it needs.
    """
    errors = list(request.errors)
    found = _Found()
    cells: dict[str, Cell] = {}
    values: list[tuple[Composed, Values]] = []
    small = reduced(request.composed)
    for composed in small:
        try:
            one = read(composed.config, composed.group_defaults)
            if (one.errors or errors) and one.skip is None and _undecided(composed, one.errors):
                check(one)  # all errors at once, though torch has to be imported for some of them
            found.add(one.errors, composed)
            if one.skip and _is_alone(request):
                found.add([one.skip], composed)
            values.append((composed, one))
        except Refused as refused:
            found.add(refused.lines, composed)
    if len({json.dumps(composed.config.get("launch"), sort_keys=True) for composed in request.composed}) > 1:
        errors.append("launch: one command runs in one place")
    if len({one.run.out for _, one in values}) > 1:
        errors.append("out: one command writes into one folder")
    if runs and not errors and not found.lines:
        _find_lacking(values, found, alone=not request.sweep)
    if errors or found.lines:  # before torch is imported
        raise Refused([*errors, *found.text(small)])
    for composed, one in values:
        try:
            checked = check(one)
        except Refused as refused:
            found.add(refused.lines, composed)
            continue
        if checked.skip is not None and _is_alone(request):
            found.add([checked.skip], composed)
        errors += _add(cells, checked, composed, request.experiment)
    errors += found.text(small)
    if not errors:
        errors += _find_folders(list(cells.values()))
    if errors:
        raise Refused(errors)
    return RunPlan(
        list(cells.values()),
        request.sweep,
        request.experiment,
        request.best_of,
        request.report,
        request.words,
        request.summary,
    )


def _find_lacking(values: Iterable[tuple[Composed, Values]], found: _Found, *, alone: bool) -> None:
    """Add what this machine lacks for configurations that are about to run."""
    for composed, one in values:
        if not one.skip and not one.run.plan and one.run.wandb != "sync":
            found.add(machine.lacking(one, alone=alone), composed)


def _is_alone(request: Request) -> bool:
    """Whether a command is one cell. In a table, a method that does not apply is a line that says why."""
    return request.experiment is None and not request.sweep


@dataclass
class _Found:
    """The errors of configurations: line -> the configurations that have it."""

    lines: dict[str, list[Composed]] = field(default_factory=dict)

    def add(self, lines: Iterable[str], composed: Composed) -> None:
        for line in lines:
            self.lines.setdefault(line, []).append(composed)

    def text(self, every: list[Composed]) -> list[str]:
        """Each line, with what only the configurations that have it have in common: the command may be right for others."""
        return [line + _origin(having, every) for line, having in self.lines.items()]


def _origin(having: list[Composed], every: list[Composed]) -> str:
    """The cells, methods, tasks or models that have an error. Empty if all have it: then it was typed for all of them."""
    cells = [one.cell for one in having if one.cell is not None]
    if cells and {one.cell for one in having} != {one.cell for one in every}:
        return f" (in cell {', '.join(dict.fromkeys(cells))})"
    for group in ("method", "task", "model"):
        named, others = (list(dict.fromkeys(_choice(one, group) for one in some)) for some in (having, every))
        if len(named) < len(others):
            return f" (with {group}={', '.join(named)})"
    return ""


def _undecided(composed: Composed, errors: list[str]) -> bool:
    """Whether the command sets hyper-parameters that no line is of yet, which only the method's class can judge."""
    wrong = {line.partition("=")[0].partition(":")[0] for line in errors}
    return any((key := text.partition("=")[0]).startswith("method.") and key not in wrong for text in composed.typed)


def _choice(composed: Composed, group: str) -> str:
    return str(composed.group_defaults[group].get("name"))


def _add(cells: dict[str, Cell], checked: Checked, composed: Composed, experiment: str | None) -> list[str]:
    """Add a configuration to `cells` and return its errors.

    Equal configurations are one cell: a method that ignores the budget runs once for all budgets.
    """
    new = Cell(
        checked.identity,
        checked.run,
        checked.method,
        checked.skip,
        experiment,
        typed=composed.typed,
        launch=checked.launch,
        device=checked.device,
        decode=checked.decode,
        unhashed=checked.unhashed,
    )
    cell = cells.setdefault(new.name, new)
    cell.budgets = list(dict.fromkeys([*cell.budgets, composed.config["budget"]]))
    if composed.cell is not None:
        cell.names = list(dict.fromkeys([*cell.names, composed.cell]))
    two = [key for key in NOT_HASHED if getattr(cell.run, key) != getattr(new.run, key)]
    for group, options in cell.unhashed.items():
        two += [f"{group}.{key}" for key, value in options.items() if new.unhashed[group].get(key) != value]
    return [f"{key}: one command cannot run the same cell with two values of {key}" for key in two]


def _find_folders(cells: list[Cell]) -> list[str]:
    """Point cells to the folders that older versions made for them.

    Returns one line for each folder that holds another configuration.
    """
    out = Path(cells[0].run.out).expanduser() if cells else Path()
    others = folders.Stored(out, {cell.name for cell in cells})
    errors = []
    for cell in cells:
        if cell.folder.exists():
            errors += [line for line in [folders.foreign(cell.folder, cell.about)] if line]
        else:
            cell.older = others.find(cell.about)
    return errors


def open_folder(cell: Cell) -> Path:
    """Make the cell's folder and its config.yaml."""
    return folders.open_folder(cell.folder, cell.about)
