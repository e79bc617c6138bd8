"""The cells of a folder as a page shows them: how each ended, what it ran, its samples, and the command that repeats it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pqcache.harness.config.cells import CONFIG, make_plan, read_config
from pqcache.harness.config.compose import compose_all, yaml_text
from pqcache.harness.config.options import DECODE, LM_EVAL, Refused, masked
from pqcache.harness.config.smoke import FOLDER as SMOKE_FOLDER
from pqcache.harness.report.rows import Row, changed_keys, rows_by_folder
from pqcache.places import CONFIGS

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
    most = max(5, min(SAMPLES, SAMPLES_IN_ALL // max(1, len(kept))))
    return [_view(folder, rows.get(folder), most) for folder in kept]


def _view(folder: Path, row: Row | None, most: int) -> CellView:
    status, reason = _status(folder, row)
    stored = read_config(folder)
    config = stored if isinstance(stored, dict) else _of_row(row) if row is not None else {}
    samples = _samples(folder, row)
    shown = sorted(samples, key=lambda s: (s["score"] is not None, s["score"] or 0.0))[:most]
    return CellView(folder, row, status, reason, config, repeat(config, folder, row), shown, len(samples))


def _status(folder: Path, row: Row | None) -> tuple[str, str]:
    try:
        recorded = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        state, reason = str(recorded["status"]), str(recorded.get("reason") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        state, reason = ("ok" if row is not None else "no row"), ""
    if state == "ok" and row is None:
        return "no row", "status.json says ok, but there is no row.json"
    return state, reason


# -- samples -----------------------------------------------------------------------------------------------------------


def _samples(folder: Path, row: Row | None) -> list[dict[str, Any]]:
    """What is shown of each line of samples*.jsonl; of several lines of one answer the last counts."""
    scores = _scores(row)
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for path in [*sorted(folder.glob("samples-*.jsonl")), folder / "samples.jsonl"]:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            continue
        for line in lines:
            try:
                sample = json.loads(line)
                key = str(sample["task"]), int(sample["doc_id"]), int(sample.get("draw", 0))
                found[key] = _shown(sample, scores.get(key, sample.get("score")))
            except (ValueError, RecursionError, KeyError, TypeError):
                continue  # half a line, or no sample
    return [found[key] for key in sorted(found)]


def _scores(row: Row | None) -> dict[tuple[str, int, int], float]:
    """(sub-task, document, answer) -> score, from the row: some scores are known only when all answers are."""
    answers = (row.get("answer_scores") if row is not None else None) or {}
    return {
        (task, int(number), draw): one
        for task, of in (row["sample_scores"] if row is not None else {}).items()
        for key, score in of.items()
        if (number := key.partition(":")[0]).isdigit()
        for draw, one in enumerate(answers.get(task, {}).get(key, [score]))
    }


def _shown(sample: Mapping[str, Any], score: Any) -> dict[str, Any]:
    target = sample.get("target")
    targets = [target] if isinstance(target, str) else target if isinstance(target, list) else []
    return {
        "task": str(sample["task"]),
        "doc": int(sample["doc_id"]),
        "score": score if isinstance(score, int | float) else None,
        "prompt": str(sample.get("prompt_end", "")),
        "target": _cut(" | ".join(map(str, targets)), TARGET),
        "answer": _cut(str(sample.get("failed") or sample.get("response", "")), ANSWER),
    }


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
    top = [f"{key}={yaml_text(config[key])}" for key in ("budget", "protocol") if key in config]
    defaults = _defaults((*words, *own, *top[1:]))
    words += own + top
    in_tokens = isinstance(config.get("budget"), int) and config["budget"] != 1
    if in_tokens and config.get("protocol") == "aligned" and config.get("budget_rule", "prompt") == "prompt":
        words.append("budget_rule=prompt")  # also of older folders, which do not name it
    known = {**dict(_flat(defaults)), "budget": config.get("budget"), "protocol": config.get("protocol")}
    return words + [f"{key}={_quoted(value)}" for key, value in _flat(config) if known.get(key, config) != value]


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and options of groups by their dotted names, without the names of the groups' files."""
    for key, value in config.items():
        if key in (*GROUPS, DECODE):
            yield from ((f"{key}.{name}", of) for name, of in value.items() if (key, name) not in UNTYPED)
        else:
            yield key, value


def _of_row(row: Row) -> dict[str, Any]:
    """The configuration that a row repeats, for folders that have only their row."""
    options = row["model_options"] or {}
    name = "hf" if options.get("path") == row["model"] else row["model"]
    ratio, tokens = row["budget_ratio"], row["budget_tokens"]
    return {
        "model": {"name": name, **options},
        "method": {"name": row["method"], **(row["hyper_parameters"] or {})},
        "task": {"name": row["task"], **(row["task_options"] or {})},
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
