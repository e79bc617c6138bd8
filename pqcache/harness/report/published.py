"""The papers: their printed numbers, their tables and figures, and the experiments that repeat these.

results/published/<experiment>.csv has the numbers, see the README there; settings.yaml every table and figure. An experiment
file names its paper and item under `report:`. "Figure 11" stands for figures 11a and 11b, too.

index("pqcache_table2")["mistral-7b-instruct-v0.2", "pqcache", 0.2, "average", "score"]     39.32
"""

import functools
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pqcache import places
from pqcache.harness.config.cells import Cell, RunPlan, make_plan
from pqcache.harness.config.compose import compose_all
from pqcache.harness.config.experiments import experiments as found
from pqcache.harness.report.table import Table
from pqcache.outside import read_yaml

FOLDER = places.PUBLISHED
AVERAGE = "average"
Budget = float | int | None  # None: the method has none


@functools.cache
def numbers(name: str) -> tuple[Any, ...]:
    """Every number of an experiment's table, or of `prose`, as a namedtuple of its file's columns; empty without a file."""
    path = FOLDER / f"{name}.csv"
    if not path.exists():
        return ()
    table = pd.read_csv(path, dtype=str, keep_default_na=False).astype({"value": float})
    budgets = [None if not text else float(text) if "." in text else int(text) for text in table.budget]
    return tuple(table.assign(budget=pd.Series(budgets, dtype=object)).itertuples(index=False, name="Number"))


@functools.cache
def index(experiment: str) -> dict[tuple, float]:
    """(model, method, budget, data set, metric) -> the printed number."""
    return {(n.model, n.method, n.budget, n.dataset, n.metric): n.value for n in numbers(experiment)}


def pair(
    experiment: str, model: str, labels: Iterable[str], budget: Budget, dataset: str, metric: str, is_full: bool = False
) -> dict[str, float | None]:
    """The number of the first label that has one (`published`), and its difference to the paper's Full."""
    own = index(experiment)
    printed = next((v for name in labels if (v := own.get((model, name, budget, dataset, metric))) is not None), None)
    full = None if is_full else own.get((model, "full", None, dataset, metric))
    return {"published": printed, "published_to_full": None if printed is None or full is None else printed - full}


def cell_score(cell: Cell) -> float | None:
    """The paper's score of a cell: its line's printed average, or its only score. None outside an experiment whose paper
    prints one, and for a smoke run."""
    if cell.experiment is None or cell.run.smoke:
        return None
    budget = None if cell.ignores_budget else cell.identity["budget"]
    for label in cell.labels:
        line = (cell.identity["model"]["name"], label, budget, "score")
        own = {n.dataset: n.value for n in numbers(cell.experiment) if (n.model, n.method, n.budget, n.metric) == line}
        if (score := own.get(AVERAGE, next(iter(own.values())) if len(own) == 1 else None)) is not None:
            return score
    return None


# -- the papers' tables and figures ------------------------------------------------------------------------------------


CONFIGS = places.CONFIGS
PAPERS = {
    "pqcache": "PQCache, arXiv 2407.12820v1",
    "kvcrush": "KVCrush, arXiv 2503.00022",
    "clusterkv": "ClusterKV, arXiv 2412.03213v2",
    "zipcache": "ZipCache, arXiv 2405.14256",
}


@dataclass(frozen=True)
class Item:
    """One table or figure."""

    paper: str
    name: str
    shows: str
    drawing: bool  # nothing to measure
    # as settings.yaml has them: source, of, words, and options with values
    settings: tuple[Mapping[str, Any], ...] = ()
    experiments: tuple[str, ...] = ()


@functools.cache
def items() -> tuple[Item, ...]:
    """All items in the papers' order, each with the experiments that repeat it; none in an installation without the file."""
    path, repeated = FOLDER / "settings.yaml", reports().items()
    file = read_yaml(path) if path.exists() else {}
    made = []
    for paper in PAPERS:
        for name, values in file.get(paper, {}).items():
            own = (e for e, (of, named) in repeated if of == paper and any(covers(one, str(name)) for one in named))
            drawing, settings = values.get("kind") == "drawing", tuple(values.get("settings") or ())
            made.append(Item(paper, str(name), str(values["shows"]), drawing, settings, tuple(own)))
    return tuple(made)


def covers(named: str, item: str) -> bool:
    """Whether an experiment of `named` repeats `item`: the same, or a figure whose panel it is."""
    named, item = named.lower(), item.lower()
    return named == item or (named[-1:].isdigit() and bool(re.fullmatch(re.escape(named) + "[a-z]", item)))


def status(measured: Iterable[str]) -> str:
    """Markdown: a line per item of the papers. measured: the folder names of the rows that there are."""
    known, parts = {*measured}, []
    for paper, title in PAPERS.items():
        body = []
        for item in (item for item in items() if item.paper == paper):
            for name in item.experiments or [""]:
                cells = [cell.name for cell in plan_at_paper_scale(name).cells] if name else []
                done = f"{len(known & {*cells})} of {len(cells)} cells" if cells else ""
                body.append([item.name, item.shows, name, done or ("a drawing" if item.drawing else "")])
        table = Table("", ["item", "what it shows", "experiment", "measured"], body)
        parts.append(f"## {title}\n\n{table.markdown()}")
    return "\n\n".join(parts) + "\n"


# -- experiments -------------------------------------------------------------------------------------------------------


def experiments(*, every: bool = False) -> list[str]:
    """The experiments that repeat a paper's table or figure (`report:`); every: all there are."""
    return [name for name, one in found(CONFIGS).items() if every or "report" in one.values]


@functools.cache
def reports() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Experiment -> (paper, items), of those that name them."""
    named = {}
    for name, one in found(CONFIGS).items():
        report = one.values.get("report") or {}
        if report.get("paper"):
            value = report.get("item") or ()
            named[name] = (str(report["paper"]), (value,) if isinstance(value, str) else tuple(map(str, value)))
    return named


def words(name: str) -> list[str]:
    """The words after `python run.py` in the command that an experiment's comment begins with."""
    return shlex.split(found(CONFIGS)[name].words) or [f"experiment={name}"]


def experiment_plan(name: str, out: str | Path) -> RunPlan:
    """The cells of an experiment as `python run.py experiment=<name> out=<out>` would run them; nothing is loaded."""
    return make_plan(compose_all([*words(name), f"out={out}"], CONFIGS))


def plan_at_paper_scale(name: str) -> RunPlan:
    """The cells of an experiment, at the paper's sizes where its file has both."""
    scale = ["scale=paper"] if found(CONFIGS)[name].values.get("paper_scale") else []
    return make_plan(compose_all([*words(name), "out=results/runs", *scale], CONFIGS))
