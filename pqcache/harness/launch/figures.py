"""Documents of a task where its data or its tokenizer is not at hand, by the published sizes in figures.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.embedded import WEIGHTS
from pqcache.harness.launch.documents import Document
from pqcache.harness.tasks.longbench.data_sets import DATASETS, DATASETS_E
from pqcache.harness.tasks.ruler.constructed import NEW_TOKENS as RULER_NEW_TOKENS

if TYPE_CHECKING:
    from pqcache.harness.tasks import Task

DEFAULT_SAMPLES = 50  # of the tasks that make their documents, where they name no number


@cache
def figures() -> dict[str, Any]:
    """The committed sizes; each entry names its source."""
    return json.loads((Path(__file__).parent / "figures.json").read_text(encoding="utf-8"))


def documents(task: Task[Any], limit: int | None, model: str, room: int | None) -> list[Document]:
    """The task's documents at their mean length, without fingerprints. room: the model's longest prompt + answer."""
    name, options = task.name, task.options
    if name.startswith("longbench"):
        return _longbench(task, limit, model, room)
    longest = task.longest(limit=limit, model_name=model)
    known = figures().get(name, {})
    new = longest.answer or task.max_new_tokens
    if name == "ruler":
        families = task.families()  # type: ignore[attr-defined]
        per = _count(known["documents"], limit)
        return [
            Document(f"ruler_{family}", i, max(1, options.length - RULER_NEW_TOKENS[family]), RULER_NEW_TOKENS[family])
            for family in families
            for i in range(per)
        ]
    if name == "pg19":
        tokens = options.tokens or (2048 if model in WEIGHTS else 32_000)
        if options.mode == "stream":
            return [Document(name, 0, options.prefill, max(1, tokens - options.prefill))]
        positions = [i for i in range(options.stride, tokens + 1, options.stride) if i >= options.start]
        return [Document(name, i, position, 1) for i, position in enumerate(positions[:limit])]
    if name == "needle":
        grid = task.grid(model)[:limit]  # type: ignore[attr-defined]
        return [Document(name, i, length, new) for i, (length, _) in enumerate(grid)]
    if name == "line_retrieval":
        prompt = known["tokens_per_line"] * options.lines
    elif "words" in known:
        prompt = round(known["words"] * figures()["tokens_per_word"]["value"])
    else:
        prompt = getattr(options, "tokens", None) or known.get("prompt_tokens") or longest.prompt
    count = _count(known.get("documents", DEFAULT_SAMPLES), limit) if known else limit or DEFAULT_SAMPLES
    families = getattr(task, "families", None) if name.startswith("pocket") else None
    names = [f"pocket_{family}" for family in families] if families else [name]
    return [Document(one, i, prompt, new) for one in names for i in range(count)]


def _longbench(task: Task[Any], limit: int | None, model: str, room: int | None) -> list[Document]:
    known, per_word = figures()["longbench"]["documents"], figures()["tokens_per_word"]["value"]
    cut = task.longest(limit=limit, model_name=model).prompt or room
    made = task.options.constructed_tokens if task.options.source == "constructed" else None
    result = []
    for dataset in task.datasets():  # type: ignore[attr-defined]
        count, words = known[dataset]
        if task.name == "longbench_e":
            count = 300  # LongBench-E: about 100 in each of three buckets
            assert dataset in DATASETS_E
        tokens = made or min(round(words * per_word), cut or 1 << 40)
        tasks = [f"longbench_{dataset}"]
        result += [
            Document(one, i, tokens, DATASETS[dataset].new_tokens, longest=made or cut)
            for one in tasks
            for i in range(_count(count, limit))
        ]
    return result


def _count(documents: int, limit: int | None) -> int:
    return documents if limit is None else min(documents, limit)


def download(task: Task[Any]) -> dict[str, Any] | None:
    """The hub's data set of a task with its size in bytes (None: unknown); None for a task that reads none."""
    if getattr(task.options, "source", None) != "hub":
        return None
    name = "longbench" if task.name.startswith("longbench") else task.name
    return figures().get(name, {}).get("download")
