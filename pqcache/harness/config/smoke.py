"""`smoke=true`: any command end to end in minutes on a laptop, to see that it runs; its numbers mean nothing.

    python run.py experiment=pqcache_table2 smoke=true      every cell of the table; rows under <out>/smoke

Models become small random ones (run/smoke_models.py). Tasks take one row that they construct themselves or that is shipped.
Prompts keep their first and last half of 1024 tokens, answers end after 16. Grids (seeds, lengths, depths) keep two values.
Methods, budgets, data sets and everything else of the experiment stay.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pqcache.fields import option_fields
from pqcache.harness.config.compose import Composed
from pqcache.harness.tasks import task_class

FOLDER = "smoke"  # below `out`, so that these rows are never mixed with results
GRID_SIZE = 2  # values that a grid keeps

LENGTHS = (512, 1000)  # tokens, in place of longer prompts
LINES = (10, 20)  # in place of longer lists
# Swept over: one value per cell.
GRIDS: dict[str, tuple[int, ...] | None] = {"seed": None, "task.length": LENGTHS, "task.lines": LINES}
LISTS = {"lengths": LENGTHS, "lines": LINES, "depths": None}  # one list per cell
LARGEST = {**dict.fromkeys(("length", "tokens"), LENGTHS[-1]), "stride": 250, "constructed_tokens": 700}
LARGEST |= {"new_tokens": 8, "rounds": 1}


def reduced(composed: Iterable[Composed]) -> list[Composed]:
    """Make the configurations with smoke=true small. The others stay as they are. Equal ones become one cell later."""
    composed = list(composed)
    small = [_points(one) for one in composed if one.config.get("smoke") is True]
    kept = {key: list(dict.fromkeys(points[key] for points in small))[:GRID_SIZE] for key in GRIDS}
    result = []
    for one in composed:
        points = _points(one)
        if one.config.get("smoke") is not True:
            result.append(one)
        elif all(points[key] in values for key, values in kept.items()):
            config = copy.deepcopy(one.config)
            for key, value in points.items():
                group, _, name = key.partition(".")
                if (small_ones := GRIDS[key]) and type(value) is int and value > small_ones[-1]:
                    config[group][name] = small_ones[kept[key].index(value)]  # two different values stay different
            _shrink_task(config)
            if config["model"].get("name") == "random":
                config["model"]["geometry"] = "tiny"
            result.append(replace(one, config=config))
    return result


def _points(one: Composed) -> dict[str, Any]:
    """The value of each grid's key; None if the command sets none, as a default is no point of a grid, or a list (see LISTS)."""
    values = {"seed": one.config.get("seed")}
    values |= {key: one.config["task"].get(key.partition(".")[2]) for key in one.named if key.startswith("task.")}
    return {key: None if isinstance(value := values.get(key), list | dict) else value for key in GRIDS}


def _shrink_task(config: dict[str, Any]) -> None:
    task = config["task"]
    try:
        fields = option_fields(task_class(task["name"]).Options)
    except ValueError:  # of lm-eval, or a name that is refused later
        fields = {}
    if "source" in fields and (default := fields["source"][1]) is not None:  # else what was typed serves
        task["source"] = "constructed" if default == "hub" else default
    for key, stand_ins in LISTS.items():
        if key in fields and (isinstance(task.get(key), list) or fields[key][1] is None):
            values = task.get(key)
            if not values or (stand_ins is not None and max(values) > stand_ins[-1]):
                values = list(stand_ins or (0, 100))
            task[key] = list(dict.fromkeys([values[0], values[-1]]))
    for key, largest in LARGEST.items():
        if key in fields:
            value = task.get(key, fields[key][1])
            task[key] = largest if value is None else min(value, largest)
    config["limit"] = GRID_SIZE if "stride" in fields else 1
    if {"lengths", "depths"} <= fields.keys():  # a grid of its own: one document per point
        config["limit"] = len(task["lengths"]) * len(task["depths"])
