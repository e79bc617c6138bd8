"""What was typed: flags, and overrides in Hydra's grammar, each checked by its key and value before anything is composed."""

import argparse
import itertools
import json
import math
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf.resolvers import oc

from pqcache.fields import option_fields
from pqcache.harness.config.experiments import experiment_of, experiments
from pqcache.harness.config.options import COMMON, GROUPS, Refused, one_line, plain, show
from pqcache.harness.tasks import PARTS, task_class
from pqcache.naming import suggestion
from pqcache.registry import BUILT_IN, METHODS, NotLoaded, is_known, method_class

HYDRA_KEYS = ("hydra.mode", "hydra.sweeper.params")  # Hydra's own settings that we read
VALUE = "++"  # the prefix of overrides that set a value; those that choose a file have none
# The package is given here. In an experiment file it would have to be the first line, which is the command that runs it.
EXPERIMENT = "experiment@_global_"
LONGEST, DEEPEST = 10_000, 20  # characters of one override, brackets within brackets
MOST_CELLS = 100_000  # of one command
# Environment variables that a configuration may not read: it is written to disk and to logs.
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
NO_SECRETS = "a variable that may hold a secret (KEY, TOKEN, SECRET, PASSWORD) cannot be read into a configuration"
EMPTY = re.compile(r"[=\[,]\s*,|,\s*\]?$")  # an entry of a list
WANDB_KEY = re.compile(r"^(\+{0,2})wandb\.(?=\w)")  # wandb.project=x is typed for wandb_project=x
# WANDB_MODE -> wandb; dryrun is wandb's older word
WANDB_MODES = {"online": "online", "offline": "offline", "disabled": "disabled", "dryrun": "offline"}


def options_of(group: str, config_dir: Path) -> list[str]:
    """The values a group can take: its files; also tasks and methods without one, and of experiments the entries of files."""
    if group == "experiment":
        return sorted(experiments(config_dir))
    return sorted({path.stem for path in (config_dir / group).glob("*.yaml")} | without_file(group))


def without_file(group: str) -> set[str]:
    """Names of a group that have no file: parts of tasks, and methods from outside."""
    return {*PARTS} if group == "task" else METHODS.keys() - BUILT_IN if group == "method" else set()


def yaml_text(value: Any) -> str:
    """A YAML value in Hydra's override grammar. A string keeps its commas, so that it may be a sweep."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{yaml_text(item)}" for key, item in value.items()) + "}"
    return show(value)


@cache
def part(group: str, name: str) -> dict[str, Any]:
    """A task or method without a file: its options at their defaults. Hydra is told of it, too. Raises NotLoaded."""
    options = option_fields(task_class(name).Options if group == "task" else method_class(name), COMMON)
    node = {"name": name, **plain({key: default for key, (_, default) in options.items()})}
    ConfigStore.instance().store(group=group, name=name, node=node)
    return node


def command_line(argv: list[str]) -> argparse.Namespace:
    """Our own flags. `--budget 0.2` is a habit from other programs. Raises Refused for any other flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("overrides", nargs="*")
    try:
        known, others = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as error:
        raise Refused([str(error)]) from None
    if others:
        keys = [shortened(flag[2:].partition("=")[0] if flag.startswith("--") else "") or "<key>" for flag in others]
        hint = "unknown flag; options are typed as"
        flags = zip(map(shortened, others), keys, strict=True)
        raise Refused([f"{flag}: {hint} {key}=<value>, without dashes" for flag, key in flags])
    return known


def wandb_mode(words: list[str], errors: list[str]) -> list[str]:
    """What the environment's WANDB_MODE says of `wandb`, where the command line says nothing."""
    mode = os.environ.get("WANDB_MODE")
    if not mode or any(word.lstrip("+").startswith("wandb=") for word in words):
        return []
    if mode not in WANDB_MODES:
        errors.append(f"WANDB_MODE={mode} (environment): allowed is online, offline, disabled")
        return []
    return [f"wandb={WANDB_MODES[mode]}"]


def shortened(text: object) -> str:
    """A text in one line of at most 200 characters, for messages."""
    line = one_line(text)
    return line if len(line) <= 200 else f"{line[:180]}... ({len(line)} characters)"


def variable(name: str, *default: Any) -> Any:
    """The value of `${oc.env:name}` or `${oc.env:name,default}`. Raises ValueError for a name that may be a secret's."""
    if SECRET.search(name):
        raise ValueError(f"oc.env:{name}: {NO_SECRETS}")
    return oc.env(name, *default)


def parsed(words: Iterable[str], config_dir: Path, errors: list[str], origin: str = "") -> list[Override]:
    """The valid overrides, so that the rest can still be checked. Each other one becomes a line in `errors`.

    If a group's value is wrong, its options (`method.m` of an unknown method) cannot be checked and are left out too.
    """
    parser, good, bad = OverridesParser.create(), [], set()
    for text in words:
        depths = itertools.accumulate((c in "[{(") - (c in "]})") for c in text[:LONGEST])
        line = "" if "=" in text or text.startswith("~") else f"{shortened(text)}: expected <key>=<value>"
        if len(text) > LONGEST or max(depths, default=0) > DEEPEST:
            most = f"{LONGEST} characters and {DEEPEST} brackets within brackets"
            line = f"{shortened(text)}: at most {most} are read"
        if not line:
            try:
                override = parser.parse_override(text)
                line = f"{wrong}{origin}" if (wrong := _wrong(override, config_dir)) else ""
            except (HydraException, RecursionError, ValueError):  # ValueError: thousands of digits
                why = "not a valid <key>=<value>; quote special characters: \"key='value'\""
                line = f"{shortened(text)}: {'a value between commas is empty' if EMPTY.search(text) else why}"
            else:
                (bad.add(override.key_or_group) if line else good.append(override))
        errors += [line] if line else []
    return [o for o in good if o.key_or_group.partition(".")[0] not in bad & set(GROUPS)]


def _wrong(override: Override, config_dir: Path) -> str:
    """What is wrong with an override, by its key and value alone; empty if nothing is."""
    key = override.key_or_group
    text = shortened(override.input_line or key)
    if override.is_delete():
        return f"{text}: keys cannot be deleted"
    if override.package is not None:
        return f"{text}: packages cannot be chosen here"
    if key.split(".")[0].split("/")[0] == "hydra":
        known = key in HYDRA_KEYS or key.startswith("hydra.sweeper.params.")
        return "" if known else f"{text}: Hydra's own settings are fixed; known: {', '.join(HYDRA_KEYS)}"
    if isinstance(override.value(), IntervalSweep):
        return f"{text}: interval() names no values; use choice(...), range(...) or a list a,b"
    if not 0 < (points := _points(override)) <= MOST_CELLS:
        return f"{text}: names {points:g} values; one command runs at most {MOST_CELLS} cells"
    if key in GROUPS:
        lines = (_wrong_choice(key, value, config_dir) for value in _values(override, config_dir))
        return next(filter(None, lines), "")
    return f"{text}: glob() works for {', '.join(GROUPS)} only" if isinstance(override.value(), Glob) else ""


def _wrong_choice(group: str, value: Any, config_dir: Path) -> str:
    """One line if a group has no such value."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return f"{group}={show(value)}: expected one name (several: -m {group}=a,b)"
    name = str(value)
    try:
        if group == "method" and name not in BUILT_IN and is_known(name):
            part(group, name)
    except NotLoaded as error:
        return str(error)
    files = options_of(group, config_dir)
    if name in files or (group == "experiment" and experiment_of(config_dir, name)):
        return ""
    if name in METHODS:
        return f"method={name}: has no file configs/method/{name}.yaml; make configs writes it"
    return f"{group}={name}: unknown {group}; {suggestion(name, METHODS if group == 'method' else files)}"


def _points(override: Override) -> float:
    """How many values an override has; nothing is expanded. Infinite where a range has no end."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if isinstance(value, RangeSweep):
        start, stop, step = value.start or 0, value.stop, 1 if value.step is None else value.step
        if stop is None or step == 0 or not all(math.isfinite(x) for x in (start, stop, step)):
            return math.inf
        return max(0, math.ceil((stop - start) / step))
    return 1


def _values(override: Override, config_dir: Path) -> list[Any]:
    """The values of an override; a sweep has several."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        known = [v.text if isinstance(v, QuotedString) else v for v in value.list]
        return [str(v) if override.key_or_group in GROUPS else v for v in known]
    if isinstance(value, RangeSweep):
        return list(value.range())
    if isinstance(value, Glob):
        return value.filter(options_of(override.key_or_group, config_dir))
    return [value]


def texts(override: Override, config_dir: Path) -> Iterable[str]:
    """An override as it is passed to Hydra, one text per value of its sweep.

    With `++` Hydra accepts unknown keys; we report them ourselves.
    """
    key = override.get_key_element().lstrip("+")
    prefix = "" if override.key_or_group in GROUPS or key.split(".")[0] == "hydra" else VALUE
    prefix += EXPERIMENT if key == "experiment" else key
    if isinstance(override.value(), Glob):
        return (f"{prefix}={value}" for value in _values(override, config_dir))
    if override.is_sweep_override():
        return (f"{prefix}={value}" for value in override.sweep_string_iterator())
    return [f"{prefix}={override.value() if key == 'experiment' else override.get_value_element_as_str()}"]


def product(overrides: list[Override], config_dir: Path) -> list[list[str]]:
    """The points of a sweep. One that is too large to be listed is refused before it is."""
    last = {o.get_key_element().lstrip("+"): o for o in overrides}  # the last one wins
    if (points := math.prod(map(_points, last.values()))) > MOST_CELLS:
        raise Refused([f"this sweep has {points:g} points: at most {MOST_CELLS} cells are run by one command"])
    return [list(choice) for choice in itertools.product(*(texts(o, config_dir) for o in last.values()))]
