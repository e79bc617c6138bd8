"""`line_retrieval`: the number in one of many numbered lines (LongEval; ZipCache, Fig. 5 and table A).

    python run.py -m task=line_retrieval task.lines=200,400,600 method=full,zipcache limit=null     # a cell per length

`task.lines` is how many lines a prompt has. Answers have 100 tokens, greedy; the score is the official one: the last number
of the answer is the line's. An answer that goes on with another number is wrong, as it is there.

Deviations: the chat template of the tokenizer, not FastChat's; greedy, where the official call leaves it to the model's
generation settings. Constructed rows never name a line twice, which the official ones may.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from random import Random
from typing import Any

from pqcache.embedded import documents
from pqcache.harness.tasks import data_set as published
from pqcache.harness.tasks import sources
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of, require

REPO = "abacusai/LongChat-Lines"  # LongEval's own rows lie on GitHub only; these are made by its generator
ON_HUB = (100, 150, 175, 200, 250, 300, 400, 500, 600, 680, 750, 850, 950, 1100)
MAX_NEW_TOKENS = 100
DEFAULT_SAMPLES = 50
LARGEST = 50_000


@dataclass(kw_only=True)
class Options:
    lines: int = 200  # of a prompt; about 24 tokens each
    source: str = sources.HUB  # hub, constructed, or a file or folder with <lines>_lines.jsonl

    def __post_init__(self) -> None:
        published.check(self.source)
        require(self.lines >= 1, "lines", self.lines, "must be at least 1")


def check(options: Options) -> None:
    known = options.source != sources.HUB or options.lines in ON_HUB
    require(known, "lines", options.lines, f"source=hub has {', '.join(map(str, ON_HUB))}; source=constructed any")


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    return f"task.lines={options.lines}", 8 * options.lines  # at the very least; each prompt is checked again


def texts() -> dict[str, str]:
    """The fixed parts of a prompt."""
    file = resources.files("pqcache.harness.tasks").joinpath("prompts.json")
    return json.loads(file.read_text(encoding="utf-8"))["line_retrieval"]


def made(rng: Random, lines: int) -> dict[str, Any]:
    """A row in the official format, with keys of this package's words."""
    parts = texts()
    first, second = documents._ADJECTIVES, (*documents._THINGS, *documents._PEOPLE, *documents._PLACES)
    names = [f"{a}-{b}" for a in first for b in second]
    names += [f"{a}-{name}" for a in first for name in names] if lines > len(names) else []
    keys = rng.sample(names, lines)
    values = [rng.randint(1, LARGEST) for _ in keys]
    asked = rng.randrange(lines)
    record = [parts["line"].format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
    return {
        "random_idx": [keys[asked], asked],
        "expected_number": values[asked],
        "num_lines": lines,
        "correct_line": record[asked],
        "prompt": parts["head"] + "".join(record) + parts["tail"].format(key=keys[asked]),
    }


def read(options: Options, seed: int, limit: int | None) -> tuple[list[dict], dict[str, Any]]:
    if options.source == sources.CONSTRUCTED:
        count = limit if limit is not None else DEFAULT_SAMPLES
        rows = [made(Random(f"lines/{options.lines}/{seed}/{i}"), options.lines) for i in range(count)]
        return rows, published.constructed(rows, seed)
    data = published.DataSet(
        REPO,
        split=str(options.lines),
        fields=("prompt", "expected_number", "num_lines"),
        files=(f"{options.lines}_lines.jsonl",),
    )
    rows, facts = data.read(options.source, limit)
    wrong = [row["num_lines"] for row in rows if int(row["num_lines"]) != options.lines]
    require(not wrong, "lines", options.lines, f"{options.source} has prompts of {wrong[0] if wrong else ''} lines")
    return rows, facts


def prepare(options: Options, *, limit: int | None) -> None:
    read(options, 0, limit)


def build(options: Options, request: TaskRequest) -> Built:
    rows, facts = read(options, request.seed, request.limit)
    docs = [
        {"prompt": row["prompt"], "answer": str(row["expected_number"]), "meta": {"lines": options.lines}}
        for row in rows
    ]
    spec = TaskSpec(
        name="line_retrieval",
        lm_eval_tasks=["line_retrieval"],
        metric={"line_retrieval": "accuracy"},
        scale=100.0,
        max_new_tokens=MAX_NEW_TOKENS,
        data=facts,
    )
    return spec, {"line_retrieval": docs}


def dataset(docs: Docs, **_: Any) -> dict:
    return dataset_of(docs, "line_retrieval")


def last_number(text: str) -> int:
    """The last run of digits; -1 if there is none."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else -1


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"accuracy": float(last_number(results[0]) == int(doc["answer"]))}
