"""What was typed: overrides in Hydra's grammar, checked by name before anything is composed.

Hydra would answer a wrong name or value with a long text and exit code 1. Here each becomes one line, and the rest is still
checked.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf.resolvers import oc

from pqcache.harness.config.options import GROUPS, one_line
from pqcache.harness.config.values import show
from pqcache.naming import suggestion
from pqcache.registry import METHODS

HYDRA_KEYS = ("hydra.mode", "hydra.sweeper.params")  # Hydra's own settings that we read
# The prefix of overrides that set a value. Those that choose a file have none.
VALUE = "++"
LONGEST = 10_000  # characters of one override
DEEPEST = 20  # brackets within brackets
MOST_CELLS = 100_000  # of one command
# Environment variables that a configuration may not read: it is written to disk and to logs.
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
NO_SECRETS = "a variable that may hold a secret (KEY, TOKEN, SECRET, PASSWORD) cannot be read into a configuration"
# The package is given here. In an experiment file it would have to be the first line, which is the command that runs it.
EXPERIMENT = "experiment@_global_"


def options_of(group: str, config_dir: Path) -> list[str]:
    """The values a group can take: its files, and for task the parts of a group of tasks, which have none."""
    from pqcache.harness.tasks import PARTS

    return sorted({path.stem for path in (config_dir / group).glob("*.yaml")} | {*(PARTS if group == "task" else ())})


def parse(texts: Iterable[str], errors: list[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in texts:
        if "=" not in text and not text.startswith("~"):
            errors.append(f"{shortened(text)}: expected <key>=<value>")
        elif why := _too_much(text):
            errors.append(f"{shortened(text)}: {why}")
        else:
            try:
                parsed.append(parser.parse_override(text))
            except (HydraException, RecursionError, ValueError):  # ValueError: thousands of digits
                errors.append(
                    f"{shortened(text)}: not a valid <key>=<value>; quote special characters: \"key='value'\""
                )
    return parsed


def shortened(text: object) -> str:
    """A text in one line of at most 200 characters, for messages."""
    line = one_line(text)
    return line if len(line) <= 200 else f"{line[:180]}... ({len(line)} characters)"


def _too_much(text: str) -> str | None:
    """Why an override is refused before it is parsed."""
    if len(text) > LONGEST:
        return f"at most {LONGEST} characters are read"
    depth = deepest = 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        return f"at most {DEEPEST} brackets within brackets are read"
    return None


def variable(name: str, *default: Any) -> Any:
    """The value of `${oc.env:name}` or `${oc.env:name,default}`. Raises ValueError for a name that may be a secret's."""
    if SECRET.search(name):
        raise ValueError(f"oc.env:{name}: {NO_SECRETS}")
    return oc.env(name, *default)


def count(overrides: Iterable[Override]) -> int:
    """How many points a sweep over these overrides has; nothing is expanded."""
    return math.prod(_points(override) for override in {o.get_key_element(): o for o in overrides}.values())


def _points(override: Override) -> int:
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if isinstance(value, RangeSweep):
        start, stop, step = value.start or 0, value.stop, 1 if value.step is None else value.step
        if stop is None or step == 0 or not all(math.isfinite(x) for x in (start, stop, step)):
            return MOST_CELLS + 1  # it has no end
        return max(0, math.ceil((stop - start) / step))
    return 1


def valid(overrides: list[Override], config_dir: Path, errors: list[str], origin: str = "") -> list[Override]:
    """The valid overrides, so that the rest can still be checked. Each other one becomes a line in `errors`.

    If a group's value is wrong, its options (`method.m` of an unknown method) cannot be checked and are left out too.
    """
    good, bad_groups = [], set()
    for override in overrides:
        before = len(errors)
        _check_override(override, config_dir, errors, origin)
        if len(errors) == before:
            good.append(override)
        else:
            bad_groups.add(override.key_or_group)
    return [o for o in good if o.key_or_group.partition(".")[0] not in bad_groups & set(GROUPS)]


def _check_override(override: Override, config_dir: Path, errors: list[str], origin: str = "") -> None:
    """Check one override by its key and value, before anything is composed."""
    key = override.key_or_group
    text = shortened(override.input_line or key)
    if override.is_delete():
        errors.append(f"{text}: keys cannot be deleted{origin}")
    elif override.package is not None:
        errors.append(f"{text}: packages cannot be chosen here{origin}")
    elif key.split(".")[0].split("/")[0] == "hydra":
        if key not in HYDRA_KEYS and not key.startswith("hydra.sweeper.params."):
            errors.append(f"{text}: Hydra's own settings are fixed; known: {', '.join(HYDRA_KEYS)}{origin}")
    elif key in GROUPS:
        wrong = (_wrong_choice(key, value, config_dir) for value in _values(override, config_dir))
        errors += [line + origin for line in wrong if line]
    elif isinstance(override.value(), IntervalSweep):
        errors.append(f"{text}: interval() names no values; use choice(...), range(...) or a list a,b{origin}")
    elif _points(override) > MOST_CELLS:
        errors.append(f"{text}: more than {MOST_CELLS} values{origin}")
    elif isinstance(override.value(), Glob):
        errors.append(f"{text}: glob() works for {', '.join(GROUPS)} only{origin}")


def _wrong_choice(group: str, value: Any, config_dir: Path) -> str | None:
    """One line if a group has no such value."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return f"{group}={show(value)}: expected one name (several: -m {group}=a,b)"
    name, files = str(value), options_of(group, config_dir)
    if name in files:
        return None
    if group == "method" and name in METHODS:
        return f"method={name}: has no file configs/method/{name}.yaml; make configs writes it"
    return f"{group}={name}: unknown {group}; {suggestion(name, METHODS if group == 'method' else files)}"


def _values(override: Override, config_dir: Path) -> list[Any]:
    """The values of an override; a sweep has several."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [str(v) if override.key_or_group in GROUPS else v for v in value.list]
    if isinstance(value, RangeSweep):
        return list(value.range())
    if isinstance(value, Glob):
        names = options_of(override.key_or_group, config_dir)
        hit = [n for n in names if any(fnmatch.fnmatch(n, g) for g in value.include)]
        return [n for n in hit if not any(fnmatch.fnmatch(n, g) for g in value.exclude)]
    return [value]


def texts(override: Override, config_dir: Path) -> list[str]:
    """An override as it is passed to Hydra, one text per value of its sweep.

    With `++` Hydra accepts unknown keys; we report them ourselves.
    """
    key = override.get_key_element().lstrip("+")
    chooses_file = override.key_or_group in GROUPS or key.split(".")[0] == "hydra"
    prefix = "" if chooses_file else VALUE
    if key == "experiment":
        key = EXPERIMENT
    if isinstance(override.value(), Glob):
        return [f"{prefix}{key}={value}" for value in _values(override, config_dir)]
    if override.is_sweep_override():
        return [f"{prefix}{key}={value}" for value in override.sweep_string_iterator()]
    return [f"{prefix}{key}={override.get_value_element_as_str()}"]


def yaml_text(value: Any) -> str:
    """A YAML value in Hydra's override grammar. A string keeps its commas, so that it may be a sweep."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{yaml_text(item)}" for key, item in value.items()) + "}"
    return show(value)
