"""Every table and figure of the four papers, as results/published/settings.yaml lists them, and the experiments that repeat them.

An experiment file names its paper and item under `report:`. "Figure 11" stands for figures 11a and 11b, too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pqcache import places

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
    experiments: tuple[str, ...] = field(default=())


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
    repeated = reports(configs)
    return tuple(
        _item(paper, str(name), values, repeated) for paper in PAPERS for name, values in _file().get(paper, {}).items()
    )


@functools.cache
def reports(configs: Path = CONFIGS) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Experiment -> (paper, items), of the files that name them."""
    named = {}
    for file in sorted((configs / "experiment").glob("*.yaml")):
        report = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("report") or {}
        if report.get("paper"):
            value = report.get("item") or ()
            named[file.stem] = (str(report["paper"]), (value,) if isinstance(value, str) else tuple(map(str, value)))
    return named


def covers(named: str, item: str) -> bool:
    """Whether an experiment of `named` repeats `item`: the same, or a figure whose panel it is."""
    if named.lower() == item.lower():
        return True
    return bool(re.fullmatch(re.escape(named.lower()) + "[a-z]", item.lower())) and named[-1:].isdigit()


def _item(
    paper: str, name: str, values: Mapping[str, Any], repeated: Mapping[str, tuple[str, tuple[str, ...]]]
) -> Item:
    experiments = [
        experiment
        for experiment, (own, named) in repeated.items()
        if own == paper and any(covers(one, name) for one in named)
    ]
    return Item(
        paper=paper,
        name=name,
        shows=str(values["shows"]),
        drawing=values.get("kind") == "drawing",
        settings=tuple(_setting(one) for one in values.get("settings") or ()),
        samples=int(values.get("samples") or 0),
        prompt_tokens=int(values.get("prompt_tokens") or 0),
        new_tokens=int(values.get("new_tokens") or 0),
        experiments=tuple(experiments),
    )


def _setting(values: Mapping[str, Any]) -> Setting:
    of = values.get("of", ALL)
    rest = {str(k): v for k, v in values.items() if k not in ("source", "of", "words")}
    return Setting(
        str(values["source"]), of if isinstance(of, str) else tuple(of), rest, tuple(values.get("words") or ())
    )
