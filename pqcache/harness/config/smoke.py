"""`smoke=true`: any command end to end in minutes on a laptop, to see that it runs; its numbers mean nothing.

    python run.py experiment=pqcache_table2 smoke=true      every cell of the table; rows under <out>/smoke

Models become small random ones (run/smoke_models.py). Tasks take the one row they construct themselves, prompts keep their
first and last half of 1024 tokens, answers end after 16. Grids (seeds, lengths, depths, lines) keep two values. Methods,
budgets, data sets and everything else of the experiment stay.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pqcache.fields import option_fields

if TYPE_CHECKING:
    from pqcache.harness.config.compose import Composed

FOLDER = "smoke"  # below `out`, so that these rows are never mixed with results
GRID_SIZE = 2  # values that a grid keeps

LENGTHS = (512, 1000)  # tokens, in place of longer prompts
LINES = (10, 20)  # in place of longer lists
GRIDS = {"seed": None, "task.length": LENGTHS, "task.lines": LINES}  # swept over: one value per cell
LISTS = {"lengths": LENGTHS, "lines": LINES, "depths": None}  # one list per cell
LARGEST = {
    "length": LENGTHS[-1],
    "tokens": LENGTHS[-1],
    "stride": 250,
    "constructed_tokens": 700,
    "new_tokens": 8,
    "rounds": 1,
}


def reduced(composed: Iterable[Composed]) -> list[Composed]:
    """Make the configurations with smoke=true small. The others stay as they are. Equal ones become one cell later."""
    composed = list(composed)
    small = [c for c in composed if c.config.get("smoke") is True]
    kept = {key: list(dict.fromkeys(_named(c, key) for c in small))[:GRID_SIZE] for key in GRIDS}
    result = []
    for one in composed:
        if one.config.get("smoke") is not True:
            result.append(one)
        elif all(_named(one, key) in values for key, values in kept.items()):
            config = copy.deepcopy(one.config)
            for key, values in kept.items():
                if _named(one, key) is not None:
                    _replace(config, key, values)
            _shrink_task(config)
            if config["model"].get("name") == "random":
                config["model"]["geometry"] = "tiny"
            result.append(replace(one, config=config))
    return result


def _named(one: Composed, key: str) -> Any:
    """The value of a grid's key; None if the command sets none: a default is no point of a grid."""
    return None if "." in key and key not in one.named else _scalar(one.config, key)


def _scalar(config: dict[str, Any], key: str) -> Any:
    """The value of a key; None if it has none or a list (see LISTS)."""
    group, _, name = key.partition(".")
    value = config.get(group)
    if name:
        value = value.get(name) if isinstance(value, dict) else None
    return None if isinstance(value, list | dict) else value


def _replace(config: dict[str, Any], key: str, values: list[Any]) -> None:
    """Replace a value that is too large for a smoke run. Two different values stay different."""
    stand_ins = GRIDS[key]
    value = _scalar(config, key)
    if stand_ins is None or not isinstance(value, int) or isinstance(value, bool):
        return
    group, _, name = key.partition(".")
    if value > stand_ins[-1]:
        config[group][name] = stand_ins[values.index(value)]


def _shrink_task(config: dict[str, Any]) -> None:
    from pqcache.harness.tasks import task_class

    task = config["task"]
    try:
        fields = option_fields(task_class(task["name"]).Options)
    except ValueError:  # of lm-eval, or a name that is refused later
        fields = {}
    if "source" in fields:
        task["source"] = "constructed"
    for key, stand_ins in LISTS.items():
        if key in fields and (isinstance(task.get(key), list) or fields[key][1] is None):
            task[key] = two(task.get(key), stand_ins)
    for key, largest in LARGEST.items():
        if key in fields:
            value = task.get(key, fields[key][1])
            task[key] = largest if value is None else min(value, largest)
    config["limit"] = GRID_SIZE if "stride" in fields else 1
    if {"lengths", "depths"} <= fields.keys():  # a grid of its own: one document per point
        config["limit"] = len(task["lengths"]) * len(task["depths"])


def two(values: list[Any] | None, stand_ins: Sequence[int] | None) -> list[Any]:
    """The first and last value of a list, or of `stand_ins` if the list has none or a larger one."""
    if not values or (stand_ins is not None and max(values) > stand_ins[-1]):
        values = list(stand_ins or (0, 100))
    return list(dict.fromkeys([values[0], values[-1]]))
