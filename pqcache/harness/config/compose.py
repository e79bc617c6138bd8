"""From a command line to composed configurations: Hydra's grammar, groups and sweeps, with our own errors.

Hydra composes one configuration at a time. Sweeps are expanded here: Hydra would start one before its last cell is checked,
and would write folders of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pqcache import places
from pqcache.fields import option_fields
from pqcache.harness.config.options import Refused
from pqcache.harness.config.overrides import (
    EXPERIMENT,
    MOST_CELLS,
    VALUE,
    count,
    parse,
    shortened,
    texts,
    valid,
    variable,
    yaml_text,
)
from pqcache.harness.config.values import plain, show
from pqcache.naming import suggestion
from pqcache.registry import METHODS

ALONE = ("model", "method", "task", "launch")  # groups whose files set the keys of one node
WANDB_KEY = re.compile(
    r"^(\+{0,2})wandb\.(?=\w)"
)  # wandb.project=x is typed for wandb_project=x: wandb is a key itself
# WANDB_MODE -> wandb; dryrun is wandb's older word
WANDB_MODES = {"online": "online", "offline": "offline", "disabled": "disabled", "dryrun": "offline"}
CELL = "cell"  # the key that sweeps over an experiment's `cells:`

Files = tuple[tuple[str, int, int], ...]  # path, time of change and size of every configuration file
Composer = Callable[[tuple[str, ...]], tuple[dict[str, Any], dict[str, Any]]]


@dataclass
class Composed:
    """One composed configuration, still unchecked."""

    config: dict[str, Any]
    group_defaults: dict[str, dict[str, Any]]  # group -> what the chosen model's, method's or task's file sets
    cell: str | None = None
    typed: tuple[str, ...] = ()  # what to type to compose exactly this one
    named: frozenset[str] = frozenset()  # keys that the command line or the experiment's file sets


@dataclass
class Request:
    """A whole command line."""

    composed: list[Composed]
    sweep: bool  # -m, or an experiment with hydra.mode MULTIRUN
    experiment: str | None
    show_config: bool = False
    best_of: dict[str, list[str]] = field(default_factory=dict)  # a table's line -> the cells; it shows the best one
    report: dict[str, Any] = field(default_factory=dict)  # an experiment's `report:`, see papers.Report
    words: tuple[str, ...] = ()  # the command line: what composes the same again
    errors: list[str] = field(default_factory=list)  # of the overrides that were left out
    summary: str | None = None  # an experiment's `summary:`, the method of which its last lines speak


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse our own flags. run.py leaves --help, --info and the like to Hydra. Raises Refused for any other flag."""
    parser = _Flags(prog="run.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("overrides", nargs="*")
    known, others = parser.parse_known_intermixed_args(argv)
    if others:
        raise Refused([_no_flag(flag) for flag in others])
    return known


class _Flags(argparse.ArgumentParser):
    """Flags whose errors are one line each, as those of options are."""

    def error(self, message: str) -> NoReturn:
        raise Refused([message])


def _no_flag(text: str) -> str:
    """What to type instead of a flag: `--budget 0.2` is a habit from other programs."""
    key = text[2:].partition("=")[0] if text.startswith("--") else ""
    return f"{shortened(text)}: unknown flag; options are typed as {shortened(key) or '<key>'}=<value>, without dashes"


def compose_all(argv: list[str], config_dir: Path) -> Request:
    """Every configuration that a command line asks for. Raises Refused with one line per error."""
    OmegaConf.register_new_resolver("oc.env", variable, replace=True)  # however the name is put together
    arguments = parse_arguments(argv)
    errors: list[str] = []
    typed_words = [WANDB_KEY.sub(r"\1wandb_", word) for word in arguments.overrides]
    arguments.overrides = [*typed_words, *_wandb_mode(typed_words, errors)]
    overrides = valid(parse(arguments.overrides, errors), config_dir, errors)
    _check_size(overrides)
    compose_once = _composer(config_dir.resolve())
    hydra, head = compose_once(tuple(_first(overrides)))
    params = {str(k): v for k, v in (hydra["sweeper"].get("params") or {}).items()}
    sweep = arguments.multirun or str(hydra["mode"]).endswith("MULTIRUN")
    experiment = hydra["runtime"]["choices"].get(EXPERIMENT)
    typed = {o.get_key_element() for o in overrides}
    params |= _paper_scale(head, errors)
    from_file = parse([f"{k}={yaml_text(v)}" for k, v in params.items() if k not in typed], errors)
    from_file = valid(from_file, config_dir, errors, origin=f" (in experiment={experiment})")
    if not sweep:
        for override in overrides:
            if override.is_sweep_override():
                errors.append(f"{override.input_line}: several values need -m ({places.COMMAND} -m ...)")
    for key in ("experiment", "scale"):
        if any(o.key_or_group == key and o.is_sweep_override() for o in overrides):
            raise Refused([*errors, f"{key}: one at a time"])
    composed = []
    for choice in _product([*from_file, *overrides], config_dir):
        composed += _cells(choice, head, config_dir, sweep, compose_once)
    best_of = _best_of(head, {c.cell for c in composed}, errors)
    report = head.get("report") or {}
    if not isinstance(report, dict):
        errors.append(f"report={shortened(show(report))}: belongs into an experiment file")
        report = {}
    summary = _summary(head, errors)
    words = tuple(argv)
    return Request(composed, sweep, experiment, arguments.cfg is not None, best_of, report, words, errors, summary)


def _wandb_mode(words: list[str], errors: list[str]) -> list[str]:
    """What the environment's WANDB_MODE says of `wandb`, where the command line says nothing."""
    mode = os.environ.get("WANDB_MODE")
    if not mode or any(word.lstrip("+").startswith("wandb=") for word in words):
        return []
    if mode not in WANDB_MODES:
        errors.append(f"WANDB_MODE={mode} (environment): allowed is online, offline, disabled")
        return []
    return [f"wandb={WANDB_MODES[mode]}"]


def _paper_scale(head: dict[str, Any], errors: list[str]) -> dict[str, str]:
    """An experiment's `paper_scale:`, the overrides that scale=paper stands for. A value with commas is swept."""
    if head.get("scale") != "paper":
        return {}
    value = head.get("paper_scale")
    if not isinstance(value, dict):
        errors.append("scale=paper: only an experiment with `paper_scale:` has two sizes")
        return {}
    return {str(key): item for key, item in value.items()}


# -- composing ---------------------------------------------------------------------------------------------------------


def _first(overrides: list[Override]) -> list[str]:
    """The overrides without sweeps (their first value), to read hydra.mode and the experiment's sweep."""
    return [texts(o, Path())[0] for o in overrides if o.key_or_group != CELL and not isinstance(o.value(), Glob)]


def _check_size(overrides: list[Override]) -> None:
    """Refuse a sweep that is too large to be listed, before it is."""
    if (points := count(overrides)) > MOST_CELLS:
        raise Refused([f"this sweep has {points} points: at most {MOST_CELLS} cells are run by one command"])


def _product(overrides: list[Override], config_dir: Path) -> list[list[str]]:
    _check_size(overrides)
    by_key = {o.get_key_element().lstrip("+"): texts(o, config_dir) for o in overrides}  # the last one wins
    return [list(choice) for choice in itertools.product(*by_key.values())]


def _cells(
    choice: list[str], head: dict[str, Any], config_dir: Path, sweep: bool, compose_once: Composer
) -> list[Composed]:
    """One point of the sweep; an experiment with `cells:` has several."""
    cells = head.get("cells") or {}
    if not isinstance(cells, dict):
        raise Refused([f"cells={show(cells)}: expected name: overrides pairs, in an experiment file"])
    picked = [text.partition("=")[2] for text in choice if text.lstrip("+").startswith(f"{CELL}=")]
    rest = [text for text in choice if not text.lstrip("+").startswith(f"{CELL}=")]
    if not cells:
        if picked:
            raise Refused([f"cell={picked[0]}: only an experiment with `cells:` has cells"])
        return [_composed(rest, None, config_dir, compose_once, rest)]
    if picked and picked[0] not in cells:
        raise Refused([f"cell={picked[0]}: unknown cell; {suggestion(picked[0], cells)}"])
    names = picked or list(cells)
    if len(names) > 1 and not sweep:
        raise Refused([f"this experiment has {len(names)} cells: choose one with cell=<name> or sweep with -m"])
    composed = []
    typed = {_key(text) for text in rest}
    for name in names:
        errors: list[str] = []
        own = parse(_cell_overrides(cells[name], name), errors)
        own = valid(own, config_dir, errors, origin=f" (in cell {name})")
        if errors:
            raise Refused(errors)
        own = [o for o in own if o.get_key_element().lstrip("+") not in typed]  # what was typed wins
        swept = any(o.is_sweep_override() for o in own)
        for point in _product(own, config_dir):
            task = next((text.partition("=")[2] for text in point if text.startswith("task=")), None)
            foreign = set() if task is None else _foreign(task, str(head["task"].get("name")))
            if picked:  # what is typed for one cell is meant for it
                foreign -= typed
            shared = [text for text in rest if _key(text) not in foreign]
            typed_for_cell = [f"{CELL}={name}", *shared, *(point if swept else [])]
            one = _composed([*point, *shared], name, config_dir, compose_once, typed_for_cell)
            kept = {key: value for key, value in one.config["task"].items() if f"task.{key}" not in foreign}
            composed.append(replace(one, config={**one.config, "task": kept}))
    return composed


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]


def _foreign(own: str, shared: str) -> set[str]:
    """The options of the experiment's task that a cell with a task of its own does not have: they are the other cells'."""
    from pqcache.harness.tasks import task_class

    try:
        has, others = (set(option_fields(task_class(name).Options)) for name in (own, shared))
    except ValueError:
        return set()  # a name that is refused later
    return {f"task.{key}" for key in others - has}


def _best_of(head: dict[str, Any], present: set[str | None], errors: list[str]) -> dict[str, list[str]]:
    """An experiment's `best_of:` as name -> cells, without the lines whose cells are not all in this command."""
    value, cells = head.get("best_of") or {}, head.get("cells") or {}
    if not isinstance(value, dict) or not all(isinstance(names, list) for names in value.values()):
        errors.append(f"best_of={show(value)}: expected name: [cell, cell] pairs, in an experiment file")
        return {}
    for name, names in value.items():
        errors += [f"best_of.{name}={n}: unknown cell; {suggestion(str(n), cells)}" for n in names if n not in cells]
    return {str(name): names for name, names in value.items() if set(names) <= present}


def _summary(head: dict[str, Any], errors: list[str]) -> str | None:
    """An experiment's `summary:`, the name of a method."""
    value = head.get("summary")
    if value is not None and value not in METHODS:
        errors.append(f"summary={shortened(show(value))}: unknown method; {suggestion(str(value), METHODS)}")
        return None
    return value


def _cell_overrides(value: Any, name: str) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}={yaml_text(item)}" for key, item in value.items()]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise Refused([f"cells.{name}: expected a list of overrides, or key: value pairs"])


def _composed(
    overrides: list[str], cell: str | None, config_dir: Path, compose_once: Composer, arguments: list[str]
) -> Composed:
    hydra, config = compose_once(tuple(overrides))
    choices = hydra["runtime"]["choices"]
    if (weights := _weights_of(choices)) and not any(_key(text) == "model" for text in overrides):
        hydra, config = compose_once((*overrides, f"model={weights}"))
        choices = hydra["runtime"]["choices"]
    defaults = {}
    for group in ALONE:
        defaults[group] = _group_file(config_dir / group / f"{choices[group]}.yaml") or {}
    typed = tuple(text.lstrip("+").replace(f"{EXPERIMENT}=", "experiment=") for text in arguments)
    named = {_key(text) for text in overrides}
    if experiment := choices.get(EXPERIMENT):
        named |= {f"task.{key}" for key in _task_keys(config_dir, experiment)}
    return Composed(config, defaults, cell, typed, frozenset(named))


def _weights_of(choices: dict[str, str]) -> str | None:
    """The shipped weights that were trained for the chosen task, where the model is the embedded one."""
    from pqcache.harness.tasks import TASKS

    task = TASKS.get(choices["task"])
    return task.weights if task is not None and choices["model"] == "embedded" else None


@cache
def _task_keys(config_dir: Path, experiment: str) -> tuple[str, ...]:
    """The options of the task that an experiment's file sets."""
    file = yaml.safe_load((config_dir / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")) or {}
    return tuple(file.get("task") or ())


def _composer(config_dir: Path) -> Composer:
    """A function that composes overrides. Groups are chosen first, values set afterwards."""
    files = tuple((str(path), (facts := path.stat()).st_mtime_ns, facts.st_size) for path in config_dir.rglob("*.yaml"))

    def compose_once(overrides: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        groups = tuple(text for text in overrides if not text.startswith(VALUE))
        hydra, chosen = _chosen(config_dir, files, groups)
        config = OmegaConf.create(chosen)
        try:
            for override in _parsed([text for text in overrides if text.startswith(VALUE)]):
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
            values = OmegaConf.to_container(config, resolve=True)
        except (HydraException, OmegaConfBaseException, RecursionError, ValueError) as error:
            raise Refused([shortened(error)]) from error
        assert isinstance(values, dict)
        return hydra, {str(k): v for k, v in values.items()}

    return cache(compose_once)


def _parsed(texts: list[str]) -> list[Override]:
    """The overrides that set a value. One that Hydra reads only in another spelling is refused by its name."""
    parser = OverridesParser.create()
    parsed = []
    for text in texts:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            raise Refused([f"{shortened(text.removeprefix(VALUE))}: {shortened(error)}"]) from error
    return parsed


def _chosen(config_dir: Path, files: Files, groups: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A choice of groups as plain containers: (Hydra's own settings, all other keys).

    A group is what its file says, with what the experiment's file sets of it on top. Hydra composes the defaults once,
    and again what the files do not decide alone: composing every point of a sweep would take a good part of a second each.
    """
    plain, rest = {}, []
    for text in groups:
        group, _, name = text.partition("=")
        own = _group_file(config_dir / group / f"{name}.yaml") if group in ALONE else None
        if own is None:
            rest.append(text)
        else:
            plain[group] = name, own
    experiment = next((text.partition("=")[2] for text in rest if text.startswith(EXPERIMENT)), None)
    on_top = _experiment_groups(config_dir / "experiment" / f"{experiment}.yaml", files) if experiment else {}
    if on_top is None:
        return _choose(config_dir, files, groups)
    hydra, config = _choose(config_dir, files, tuple(rest))
    choices = {**hydra["runtime"]["choices"], **{group: name for group, (name, _) in plain.items()}}
    chosen = {
        group: OmegaConf.to_container(OmegaConf.merge(own, on_top[group])) if group in on_top else own
        for group, (_, own) in plain.items()
    }
    return {**hydra, "runtime": {"choices": choices}}, {**config, **chosen}


@lru_cache(maxsize=1024)
def _experiment_groups(path: Path, files: Files) -> dict[str, Any] | None:
    """What an experiment's file sets of each group; None if it asks Hydra for more than its keys and its choice of groups.

    files: what it depends on.
    """
    if not path.is_file():
        return {}  # Hydra says so
    text = path.read_text(encoding="utf-8")
    own = OmegaConf.to_container(OmegaConf.create(text))
    if not isinstance(own, dict) or "@package" in text:
        return None
    choices = own.get("defaults") or []
    if not all(isinstance(one, dict) and str(next(iter(one))).startswith("override /") for one in choices):
        return None
    return {group: own[group] for group in ALONE if isinstance(own.get(group), dict)}


def _group_file(path: Path) -> dict[str, Any] | None:
    """What a group's file sets; None if there is no such file, or it asks Hydra for more than its keys."""
    try:
        facts = path.stat()
    except (OSError, ValueError):
        return _parts().get(path.stem) if path.parent.name == "task" else None
    return _read_group(path, facts.st_mtime_ns, facts.st_size)


@cache
def _parts() -> dict[str, dict[str, Any]]:
    """The tasks without a file: name -> their options at their defaults. Hydra is told of them, too."""
    from pqcache.harness.tasks import PARTS, TASKS

    nodes = {}
    for name in PARTS:
        options = option_fields(TASKS[name].Options).items()
        nodes[name] = {"name": name, **{key: plain(default) for key, (_, default) in options}}
        ConfigStore.instance().store(group="task", name=name, node=nodes[name])
    return nodes


@lru_cache(maxsize=1024)
def _read_group(path: Path, changed: int, size: int) -> dict[str, Any] | None:
    text = path.read_text(encoding="utf-8")
    own = OmegaConf.to_container(OmegaConf.create(text))
    if not isinstance(own, dict) or "defaults" in own or "@package" in text:
        return None
    return {str(key): value for key, value in own.items()}


@lru_cache(maxsize=1024)
def _choose(config_dir: Path, files: Files, groups: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A choice of groups, composed by Hydra; see `_chosen`. files: what it depends on."""
    _parts()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir)):
            composed = compose(config_name="config", overrides=list(groups), return_hydra_config=True)
        hydra_node = composed.hydra
        params = hydra_node.sweeper.params
        hydra = {
            "mode": hydra_node.mode,
            "sweeper": {"params": OmegaConf.to_container(params, resolve=False) if params is not None else {}},
            "runtime": {"choices": OmegaConf.to_container(hydra_node.runtime.choices)},
        }
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        config = OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException, AssertionError, ValueError) as error:
        raise Refused([shortened(error)]) from error
    assert isinstance(config, dict)
    return hydra, {str(k): v for k, v in config.items()}
