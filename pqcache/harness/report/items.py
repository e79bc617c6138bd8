"""Every table and figure of the four papers, as results/published/settings.yaml lists them, and the experiments that repeat them.

An experiment file names its paper and item under `report:`. "Figure 11" stands for figures 11a and 11b, too.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pqcache import places
from pqcache.harness.config.cells import RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.experiments import experiments as found

FILE = places.PUBLISHED / "settings.yaml"
CONFIGS = places.CONFIGS
PAPERS = {
    "pqcache": "PQCache, arXiv 2407.12820v1",
    "kvcrush": "KVCrush, arXiv 2503.00022",
    "clusterkv": "ClusterKV, arXiv 2412.03213v2",
    "zipcache": "ZipCache, arXiv 2405.14256",
}
ALL, NOT_FULL = "all", "not full"


@dataclass(frozen=True)
class Setting:
    """What a paper says of some lines of an item. A list of values: together the lines have exactly these."""

    source: str
    of: str | tuple[str, ...]  # all | not full | names of cells and methods
    values: Mapping[str, Any]
    words: tuple[str, ...] = ()  # words of a note that names a difference


@dataclass(frozen=True)
class Item:
    """One table or figure."""

    paper: str
    name: str
    shows: str
    drawing: bool  # nothing to measure
    settings: tuple[Setting, ...] = ()
    samples: int = 0  # of a cell
    prompt_tokens: int = 0
    new_tokens: int = 0
    experiments: tuple[str, ...] = ()


@functools.cache
def _file() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def models() -> dict[str, tuple[float, float]]:
    """Model -> (billions of parameters, KiB of 16-bit K and V per token)."""
    return {name: (values[0], values[1]) for name, values in _file().get("models", {}).items()}


def downloads() -> dict[str, int]:
    """Task -> MB of its data."""
    return dict(_file().get("downloads", {}))


@functools.cache
def items(configs: Path = CONFIGS) -> tuple[Item, ...]:
    """All items in the papers' order, each with the experiments that repeat it."""
    repeated = reports(configs).items()
    made = []
    for paper in PAPERS:
        for name, values in _file().get(paper, {}).items():
            own = (e for e, (of, named) in repeated if of == paper and any(covers(one, str(name)) for one in named))
            settings = tuple(_setting(one) for one in values.get("settings") or ())
            samples, prompt, new = (int(values.get(key) or 0) for key in ("samples", "prompt_tokens", "new_tokens"))
            drawing = values.get("kind") == "drawing"
            size = samples, prompt, new
            made.append(Item(paper, str(name), str(values["shows"]), drawing, settings, *size, tuple(own)))
    return tuple(made)


def _setting(values: Mapping[str, Any]) -> Setting:
    of = values.get("of", ALL)
    rest = {str(k): v for k, v in values.items() if k not in ("source", "of", "words")}
    return Setting(
        str(values["source"]), of if isinstance(of, str) else tuple(of), rest, tuple(values.get("words") or ())
    )


def covers(named: str, item: str) -> bool:
    """Whether an experiment of `named` repeats `item`: the same, or a figure whose panel it is."""
    named, item = named.lower(), item.lower()
    return named == item or (named[-1:].isdigit() and bool(re.fullmatch(re.escape(named) + "[a-z]", item)))


# -- experiments -------------------------------------------------------------------------------------------------------


def experiments(configs: Path = CONFIGS, *, every: bool = False) -> list[str]:
    """The experiments that repeat a paper's table or figure (`report:`); every: all there are."""
    return [name for name, one in found(configs).items() if every or "report" in one.values]


@functools.cache
def reports(configs: Path = CONFIGS) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Experiment -> (paper, items), of those that name them."""
    named = {}
    for name, one in found(configs).items():
        report = one.values.get("report") or {}
        if report.get("paper"):
            value = report.get("item") or ()
            named[name] = (str(report["paper"]), (value,) if isinstance(value, str) else tuple(map(str, value)))
    return named


def words(name: str, configs: Path = CONFIGS) -> list[str]:
    """The words after `python run.py` in the command that an experiment's comment begins with."""
    return shlex.split(found(configs)[name].words) or [f"experiment={name}"]


def experiment_plan(name: str, out: str | Path, *, smoke: bool = False, configs: Path = CONFIGS) -> RunPlan:
    """The cells of an experiment as `python run.py experiment=<name> out=<out>` would run them; nothing is loaded."""
    return make_plan(compose_all([*words(name, configs), f"out={out}", f"smoke={str(smoke).lower()}"], configs))


def plan_at_paper_scale(name: str, out: str | Path, configs: Path = CONFIGS) -> RunPlan:
    """The cells of an experiment, at the paper's sizes where its file has both."""
    scale = ["scale=paper"] if found(configs)[name].values.get("paper_scale") else []
    return make_plan(compose_all([*words(name, configs), f"out={out}", *scale], configs))
