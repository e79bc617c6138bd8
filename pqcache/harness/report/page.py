"""The page itself: `write(folder)` makes report.html, which needs no network and no other file to be viewed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from jinja2.utils import htmlsafe_json_dumps

from pqcache.atomic import write_text
from pqcache.harness.config.cells import CONFIG, make_plan, read_config, read_status
from pqcache.harness.config.compose import compose_all, yaml_text
from pqcache.harness.config.options import DECODE, LM_EVAL, Refused, masked
from pqcache.harness.config.smoke import FOLDER as SMOKE_FOLDER
from pqcache.harness.report.any_table import MEASURES
from pqcache.harness.report.charts import charts
from pqcache.harness.report.footnotes import deviations
from pqcache.harness.report.frame import budget_text, frame, pooled_groups, said_of_bytes, said_of_load
from pqcache.harness.report.rows import Row, changed_keys, rows_by_folder, skipped_text
from pqcache.harness.report.sample_lines import read_all
from pqcache.harness.report.table import number, printable, several, signed, spread
from pqcache.outside import each, finite
from pqcache.places import CONFIGS
from pqcache.registry import METHODS, method_class

NAME = "report.html"
TEMPLATE = Path(__file__).with_name("page.html.jinja")
SHOWN = "kl fall tt2t tpot tpot_p95 prefill index_build device host of_full peak moved attended prompt".split()
FACTS: dict[str, Callable[[Row], Any]] = {
    "models": lambda row: row["model"],
    "tasks": lambda row: row["task"],
    "machines": lambda row: row["device"],
    "commits": lambda row: row["git_commit"],
    "number formats of K and V": lambda row: row["kv_dtype"],
    "protocols": lambda row: row["protocol"] if row["method"] != "full" else None,
    "versions": lambda row: ", ".join(f"{name} {of}" for name, of in row["versions"].items() if of),
}


def write(root: Path, out: Path, name: str) -> Path:
    """Write the page of a folder's rows into `out`. name: of the folder, for the title."""
    how: dict[str, Any] = {"finalize": lambda one: printable(one) if type(one) is str else one}  # no Markup
    environment, path = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, **how), out / NAME
    views = cell_views(root)
    groups, left_out = pooled_groups(view.row for view in views if view.row is not None)
    rows = [row for group in groups for row in group]
    drawn = charts(rows, [view.folder / "heatmap.json" for view in views if view.row is not None])
    data: dict[str, list[Any]] = {"charts": drawn, "cells": []}
    for view in (view for view in views if view.samples):
        title, row = view.name, view.row
        if row is not None:
            title = f"{row['method']} {budget_text(row)} {row['task']} seed {row['seed']} {_changed(view)}".strip()
        data["cells"].append({"id": view.name, "title": title, "samples": view.samples, "of": view.n_samples})
    harmless = each(finite(data), lambda one: printable(masked(one)) if isinstance(one, str) else one, str)
    deviating = dict.fromkeys(row["method"] for row in rows if row["method"] in METHODS)
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        library=_library(),
        data=htmlsafe_json_dumps(harmless, ensure_ascii=False, allow_nan=False),  # no text ends the script element
        views=views,
        bad=[view for view in views if not view.ended_well],
        skipped=[view for view in views if view.status == "not applicable"],
        table=_table_of(views),
        charts=drawn,
        facts={title: several(map(of, rows)) for title, of in FACTS.items()},
        notes=_notes(rows, left_out),
        deviations=[(name, lines) for name in deviating if (lines := deviations(method_class(name)))],
        smoke=any(row["smoke"] for row in rows),
    )
    write_text(path, text)
    return path


def _library() -> str:
    """plotly's JavaScript, which the page carries."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


# -- the table of cells ------------------------------------------------------------------------------------------------


def _table_of(views: Iterable[CellView]) -> dict[str, Any]:
    """{head, lines}: a line per row. Each cell is (what is shown, what it is sorted by)."""
    known = [view for view in views if view.row is not None]
    records = frame(view.row for view in known if view.row is not None).to_dict("records")
    shown = [MEASURES[key] for key in SHOWN if any(MEASURES[key].of(record) for record in records)]
    head = ["model", "task", "method", "budget", "seed", "samples", "score", "95 %", "to Full", "95 % "]
    lines = []
    for view, record in zip(known, records, strict=True):
        row: Row = record["row"]
        ratio, options = row["budget_ratio"], _changed(view)
        line: list[tuple[str, Any]] = [(row[key], row[key]) for key in ("model", "task", "method")]
        line += [(budget_text(row), row["budget_tokens"] if ratio is None else ratio), (str(row["seed"]), row["seed"])]
        line.append((f"{row['n_samples']}{skipped_text(row)}", row["n_samples"]))
        for name, show in (("score", number), ("to_full", signed)):
            value, interval = MEASURES[name].of(record), MEASURES[name].interval(record)
            full = name == "to_full" and row["method"] == "full"
            texts = ("", "") if full else (show(value), spread(value, interval, show))
            line += zip(texts, (value, interval[0] if interval else None), strict=True)
        line += [(number(value, measure.digits), value) for measure in shown for value in [measure.of(record)]]
        line.append((options, options))
        lines.append({"id": view.name, "cells": line, "failed": not view.ended_well})
    return {"head": [*head, *(measure.title for measure in shown), "options"], "lines": lines}


def _changed(view: CellView) -> str:
    """The options that are not at their default, from the folder's name, which writes a list as -1,2-."""
    parts = (part for part in view.name.split("__")[5:-1] if "=" in part)
    return " ".join(re.sub(r"=-(.*)-$", r"=[\1]", part) for part in parts)


# -- what must be known ------------------------------------------------------------------------------------------------


def _notes(rows: Sequence[Row], left_out: int) -> list[str]:
    """What a reader must know of these numbers."""
    notes = [
        "Score: 0 to 100, with a 95 % bootstrap interval over samples; n/a with one sample of a sub-task.",
        "To Full: the mean difference of the same samples, with its own interval. Compare differences, not scores.",
        "TT2T: seconds from the prompt to the second token, the index included. TPOT: milliseconds of a decode step.",
        f"{said_of_bytes(rows)}. KiB per step: bytes moved between tiers and read to select.",
        "Charts pool seeds: scores over the samples of all, times and bytes as means. The table has a line per cell.",
    ]
    if any(row["timed_samples"] is not None and row["timed_samples"] < row["n_samples"] for row in rows):
        text = "Times are of the samples that had a prefill of their own"
        notes.append(f"{text}; the others shared one with other cells.")
    if said := said_of_load(rows):
        notes.append(said)
    if unverified := sum(row["unverified_samples"] or 0 for row in rows):
        notes.append(f"{unverified} samples are of older lines, which do not name their configuration.")
    if any("-dirty" in (row["git_commit"] or "") for row in rows):
        notes.append("A commit that ends with -dirty had changes that are not committed.")
    if left_out:
        other = "another one of the same configuration and seed has as many samples"
        notes.append(f"{left_out} rows are not in the charts: {other}.")
    return notes


# -- the cells of a folder: how each ended, what it ran, its samples, and the command that repeats it ------------------


FILES = ("row.json", "status.json", CONFIG)  # a folder with one of them is a cell's
GROUPS = ("model", "method", "task")
UNTYPED = {*((group, "name") for group in GROUPS), ("method", "revision")}  # what no word sets but the group's own
SAMPLES = 50  # of a cell, those with the lowest scores
SAMPLES_IN_ALL = 5000
ANSWER, TARGET = 1000, 500  # characters that are shown


@dataclass
class CellView:
    """One cell's folder."""

    folder: Path
    row: Row | None
    status: str  # ok | failed | interrupted | running | not applicable | no row
    reason: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    command: str = ""  # repeats it; empty where its configuration cannot be read
    samples: list[dict[str, Any]] = field(default_factory=list)
    n_samples: int = 0  # on disk

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def ended_well(self) -> bool:
        return self.status in ("ok", "not applicable")

    @property
    def config_text(self) -> str:
        return yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True) if self.config else ""


def cell_views(root: Path) -> list[CellView]:
    """Every cell below a folder, without the smoke runs in its sub-folders."""
    rows = rows_by_folder(root)
    folders = dict.fromkeys([*rows, *(path.parent for name in FILES for path in root.rglob(name))])
    kept = sorted(folder for folder in folders if SMOKE_FOLDER not in folder.relative_to(root).parts)
    most, views = max(5, min(SAMPLES, SAMPLES_IN_ALL // max(1, len(kept)))), []
    for folder in kept:
        row, (status, reason) = rows.get(folder), read_status(folder)
        if row is None and status == "ok":
            status, reason = "no row", "status.json says ok, but there is no row.json"
        status, stored = status or ("ok" if row is not None else "no row"), read_config(folder)
        config = stored if isinstance(stored, dict) else _of_row(row) if row is not None else {}
        samples = _samples(folder, row)
        shown = sorted(samples, key=lambda s: (s["score"] is not None, s["score"] or 0.0))[:most]
        command = repeat(config, folder, row)
        views.append(CellView(folder, row, status, reason, config, command, shown, len(samples)))
    return views


# -- samples -----------------------------------------------------------------------------------------------------------


def _samples(folder: Path, row: Row | None) -> list[dict[str, Any]]:
    """What is shown of each sample on disk; of several of one answer the last counts."""
    answers = (row.get("answer_scores") if row is not None else None) or {}
    scores = {  # from the row: some scores are known only when all answers are
        (task, int(number), draw): one
        for task, of in (row["sample_scores"] if row is not None else {}).items()
        for key, score in of.items()
        if (number := key.partition(":")[0]).isdigit()
        for draw, one in enumerate(answers.get(task, {}).get(key, [score]))
    }
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for sample in read_all(folder)[0].values():
        place, target = (sample["task"], sample["doc_id"], sample.get("draw", 0)), sample.get("target", [])
        found[place] = {
            "task": sample["task"],
            "doc": sample["doc_id"],
            "score": scores.get(place, sample["score"]),
            "prompt": sample.get("prompt_end", ""),
            "target": _cut(target if isinstance(target, str) else " | ".join(target), TARGET),
            "answer": _cut(sample.get("failed") or sample["response"], ANSWER),
        }
    return [found[place] for place in sorted(found)]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


# -- the command -------------------------------------------------------------------------------------------------------


def repeat(config: Mapping[str, Any], folder: Path, row: Row | None) -> str:
    """The command that runs a cell again, from the repository's root; empty without a configuration."""
    words = words_of(config)
    if not words:
        return ""
    out = folder.parent
    if config.get("smoke") and out.name == SMOKE_FOLDER:
        out = out.parent
    sizes = [len(samples) for samples in row["sample_scores"].values()] if row is not None else []
    limit = [f"limit={largest}"] if (largest := max(sizes, default=0)) else []
    return masked(shlex.join(["python", "run.py", *words, *limit, f"out={out}"]))


def words_of(config: Mapping[str, Any]) -> list[str]:
    """The overrides that compose a stored configuration: its groups, and what is not at its default."""
    try:
        names = {group: str(config[group]["name"]) for group in GROUPS}
    except (KeyError, TypeError):
        return []
    task, _, inner = names["task"].partition(":")
    words = [f"model={names['model']}", f"method={names['method']}", f"task={task}"]
    own = [f"task.name={_quoted(inner)}"] if task == LM_EVAL else []
    own += [f"model.path={_quoted(config['model'].get('path'))}"] if names["model"] == "hf" else []
    own += [f"task.source={_quoted(config['task'].get('source'))}"] if task == "prompts" else []  # it has no default
    top = [f"{key}={yaml_text(config[key])}" for key in ("budget", "protocol") if key in config]
    defaults = _defaults((*words, *own, *top[1:]))
    words += own + top
    in_tokens = isinstance(config.get("budget"), int) and config["budget"] != 1
    if in_tokens and config.get("protocol") == "aligned" and config.get("budget_rule", "prompt") == "prompt":
        words.append("budget_rule=prompt")  # also of older folders, which do not name it
    known, said = dict(_flat(defaults)), {word.partition("=")[0] for word in words}
    changed = [(key, value) for key, value in _flat(config) if key not in said and known.get(key, config) != value]
    return words + [f"{key}={_quoted(value)}" for key, value in changed]


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and options of groups by their dotted names, without the names of the groups' files."""
    for key, value in config.items():
        if key in (*GROUPS, DECODE):
            yield from ((f"{key}.{name}", of) for name, of in value.items() if (key, name) not in UNTYPED)
        else:
            yield key, value


def _of_row(row: Row) -> dict[str, Any]:
    """The configuration that a row repeats, for folders that have only their row."""
    options = row["model_options"]
    name = "hf" if options.get("path") == row["model"] else row["model"]
    ratio, tokens = row["budget_ratio"], row["budget_tokens"]
    return {
        "model": {"name": name, **options},
        "method": {"name": row["method"], **row["hyper_parameters"]},
        "task": {"name": row["task"], **row["task_options"]},
        "budget": ratio if ratio is not None else round(tokens or 0),
        "protocol": row["protocol"],
        "seed": row["seed"],
        "dense_layers": row["dense_layers"],
        **{key: value for key, value in changed_keys(row).items() if key not in ("protocol", "dense_layers")},
    }


@cache
def _defaults(words: Sequence[str]) -> dict[str, Any]:
    """What a choice of groups composes; empty where it needs more than these."""
    try:
        return dict(make_plan(compose_all(list(words), CONFIGS)).cells[0].identity)
    except Refused:
        return {}


def _quoted(value: Any) -> str:
    """A value in Hydra's grammar. Texts that it would read otherwise are quoted."""
    if isinstance(value, str) and not value.replace("_", "").replace("-", "").replace(".", "").isalnum():
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return yaml_text(value)
