"""The rows of a folder as configurations: seeds pooled, options known by the names that a command line gives them.

for one in configurations(rows_under(folder)):
    print(one.value("method"), one.value("method.m"), one.number(measure("score", [one])).value)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from pqcache.harness.config.values import show
from pqcache.harness.report import score_statistics
from pqcache.harness.report.rows import Row, changed_keys, find_full
from pqcache.harness.report.score_statistics import Scores, known_mean
from pqcache.harness.report.tables import budget_text
from pqcache.naming import suggestion
from pqcache.registry import METHODS, method_class

OPTIONS = {"model": "model_options", "method": "hyper_parameters", "task": "task_options"}  # group -> field of the row
FIELDS = ("model", "method", "task", "budget", "seed", "protocol", "dense_layers", "attn", "kv_dtype", "device")
DATASET = "dataset"  # the sub-tasks of a task, and their average
AVERAGE = "average"


@dataclass(frozen=True)
class Number:
    """A measured number. None: not measured."""

    value: float | None = None
    low: float | None = None  # 95 % interval
    high: float | None = None
    sampled: bool = False  # a mean over samples: without an interval it has too few of them


@dataclass(frozen=True)
class Measure:
    """What a table may show of a configuration."""

    name: str  # as it is asked for
    title: str
    field: str = ""  # of the row, with dots; empty: computed from the samples
    digits: int = 1
    better: Callable[[Iterable[float]], float] | None = None  # max or min; None: neither is better
    scale: float = 1.0


MEASURES = {
    one.name: one
    for one in (
        Measure("score", "score", better=max),
        Measure("to_full", "to Full", better=max),
        Measure("p", "p", digits=3),
        Measure("samples", "samples", digits=0),
        Measure("tpot", "TPOT ms", "tpot_p50_ms", 2, min),
        Measure("tpot_p95", "TPOT p95 ms", "tpot_p95_ms", 2, min),
        Measure("tt2t", "TT2T s", "tt2t_s", 3, min),
        Measure("prefill", "prefill s", "prefill_s", 3, min),
        Measure("index_build", "index build s", "index_build_s", 3, min),
        Measure("resident", "MiB", "resident_bytes", 2, min, 1 / 2**20),
        Measure("peak", "peak MiB", "peak_bytes", 2, min, 1 / 2**20),
        Measure("moved", "KiB per step", "bytes_per_step", 1, min, 1 / 2**10),
        Measure("attended", "attended", "attended_tokens", 0),
        Measure("prompt", "prompt tokens", "prompt_tokens", 0),
        Measure("recall", "recall", "diagnostics.recall_kv", 3, max),
        Measure("mass", "mass", "diagnostics.mass", 3, max),
        Measure("output_error", "output error", "diagnostics.output_error", 3, min),
    )
}


class Configuration:
    """One configuration under all its seeds."""

    def __init__(self, rows: Sequence[Row], full: Sequence[Row]) -> None:
        """rows: one per seed. full: the folder's rows of Full."""
        self.rows, self.full = rows, full
        self.first = rows[0]
        self.budget = budget_text(self.first)
        self.changed = changed_keys(self.first)

    @cached_property
    def ignores_budget(self) -> bool:
        name = self.first["method"]
        return name in METHODS and method_class(name).ignores_budget

    @cached_property
    def keys(self) -> dict[str, str]:
        """Every key that tells configurations apart, with its value as a text."""
        row: Any = self.first
        values = {key: _text(row[key]) for key in FIELDS if key not in ("seed", "budget")}
        values |= {"budget": "" if self.ignores_budget else self.budget}
        values |= {"seed": ", ".join(str(r["seed"]) for r in self.rows)}
        for group, field in OPTIONS.items():
            values |= {f"{group}.{name}": _text(value) for name, value in (row[field] or {}).items()}
        return {**self.changed, **values}

    def value(self, key: str) -> str:
        """The value of a key; empty if this configuration has no such key."""
        return self.keys.get(key, "")

    @property
    def datasets(self) -> list[str]:
        """The sub-tasks, then their average; `average` alone if there is one sub-task."""
        names = [name.removeprefix(f"{self.first['task']}_") for name in self.first["sample_scores"]]
        return [*names, AVERAGE] if len(names) > 1 else [AVERAGE]

    def number(self, measure: Measure, dataset: str = AVERAGE) -> Number:
        """What was measured, pooled over the seeds. Of a data set there are score, to_full, p and samples."""
        if measure.name == "score":
            return self._score(dataset)
        if measure.name in ("to_full", "p"):
            return self._to_full(dataset, p=measure.name == "p")
        if measure.name == "samples":
            counts = [len(s) for row in self.rows for s in _of(row["sample_scores"], row, dataset).values()]
            return Number(float(sum(counts) or (sum(r["n_samples"] for r in self.rows) if dataset == AVERAGE else 0)))
        if dataset != AVERAGE:
            return Number()
        value = known_mean(field_of(row, measure.field) for row in self.rows)
        return Number(None if value is None else value * measure.scale)

    def _score(self, dataset: str) -> Number:
        if any(row["score"] is None for row in self.rows):
            return Number()
        if len(self.rows) == 1 and dataset == AVERAGE:  # computed when the row was written
            low, high = self.first["score_interval"] or (None, None)
            return Number(self.first["score"], low, high, bool(self.first["sample_scores"]))
        scores = pooled((row["seed"], _of(row["sample_scores"], row, dataset)) for row in self.rows)
        low, high = score_statistics.interval(scores) or (None, None)
        return Number(score_statistics.mean(scores), low, high, True)

    def _to_full(self, dataset: str, *, p: bool) -> Number:
        if self.first["method"] == "full" or any(row["score"] is None for row in self.rows):
            return Number()
        parts = []
        for row in self.rows:
            full = find_full(row, self.full)
            if full is None or full["score"] is None:
                return Number()
            differences = score_statistics.paired(row["sample_scores"], full["sample_scores"])
            parts.append((row["seed"], _of(differences, row, dataset)))
        every = pooled(parts)
        value = score_statistics.mean(every)
        if p:
            return Number(score_statistics.significance(every), sampled=value is not None)
        low, high = score_statistics.interval(every) or (None, None)
        return Number(value, low, high, True)


def configurations(rows: Iterable[Row]) -> tuple[list[Configuration], int]:
    """(The configurations of these rows, how many rows were left out).

    Of several rows of one configuration and seed the one with the most samples counts.
    """
    rows = list(rows)
    groups: dict[str, dict[int, Row]] = {}
    left_out = 0
    for row in rows:
        ratio = row["budget_ratio"]
        fields = ("model", "method", "task", *OPTIONS.values(), "protocol", "dense_layers", "smoke")
        identity = [row[field] for field in fields]  # type: ignore[literal-required]
        identity += [ratio if ratio is not None else ("tokens", row["budget_tokens"]), changed_keys(row)]
        seeds = groups.setdefault(repr(identity), {})
        known = seeds.get(row["seed"])
        left_out += known is not None
        if known is None or known["n_samples"] < row["n_samples"]:
            seeds[row["seed"]] = row
    full = [row for row in rows if row["method"] == "full"]
    made = [Configuration([seeds[seed] for seed in sorted(seeds)], full) for seeds in groups.values()]
    return sorted(made, key=lambda one: (one.first["method"] != "full", natural(one.first["folder"]))), left_out


def natural(text: str) -> list[tuple[bool, float, str]]:
    """A sort key that compares the numbers in a text as numbers, so that 25 comes after 3, and 0.5 after 0.25."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(part[:1].isdigit(), float(part) if part[:1].isdigit() else 0.0, part) for part in parts]


def measure(name: str, of: Sequence[Configuration]) -> Measure:
    """The measure of a name: one of MEASURES, `metric.<lm-eval's metric>`, or any number of the rows with its dots.

    Raises ValueError, with what is known, if no row has it.
    """
    if name in MEASURES:
        return MEASURES[name]
    if any(field_of(row, name) is not None for one in of for row in one.rows):
        title = name.removeprefix("extra.").removeprefix("metric.").replace("_", " ")
        lower = name.endswith(("_s", "_ms", "_bytes", "error", "perplexity"))
        return Measure(name, title, name, 3, min if lower else None)
    raise ValueError(suggestion(name, [*MEASURES, *numbers_of(of)] if "." in name else MEASURES))


def numbers_of(of: Iterable[Configuration]) -> list[str]:
    """The dotted names of all numbers that the rows have."""
    names: dict[str, None] = {}
    for one in of:
        row: Any = one.first
        for key, value in row.items():
            if isinstance(value, dict) and key not in ("sample_scores", "tasks", "versions", *OPTIONS.values()):
                names |= {f"{key}.{name}": None for name, item in value.items() if _is_number(item)}
            elif _is_number(value):
                names[key] = None
        names |= {f"metric.{name}": None for task in (row["tasks"] or {}).values() for name in task.get("metrics", {})}
    return list(names)


def field_of(row: Row, name: str) -> float | None:
    """A number of a row. Of an object of numbers (bytes by tier) their sum; of a metric the mean over the sub-tasks."""
    kind, _, rest = name.partition(".")
    if kind == "metric":
        values = [task["metrics"][rest] for task in (row["tasks"] or {}).values() if rest in task.get("metrics", {})]
        return fmean(values) if values else None
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict) and value and all(map(_is_number, value.values())):
        return float(sum(value.values()))
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else show(value)


def _of(scores: Scores, row: Row, dataset: str) -> Scores:
    """The samples of one sub-task, or of all."""
    if dataset == AVERAGE:
        return scores
    names = (dataset, f"{row['task']}_{dataset}")
    return {task: samples for task, samples in scores.items() if task in names}


def pooled(parts: Iterable[tuple[int, Scores]]) -> Scores:
    """The samples of several seeds; those of one number in two seeds are two samples."""
    every: dict[str, dict[str, float]] = {}
    for seed, scores in parts:
        for task, samples in scores.items():
            every.setdefault(task, {}).update({f"{seed}/{key}": value for key, value in samples.items()})
    return every
