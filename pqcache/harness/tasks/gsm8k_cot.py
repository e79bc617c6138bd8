"""`gsm8k_cot`: GSM8K as lm-eval's task of that name has it: eight fixed worked examples, two ways to read the answer.

Prompt, stop strings, filters and metric are lm-eval's definition; the rows come from `task.source`. `strict-match` wants
"The answer is <n>." and counts an answer without the full stop as wrong; `flexible-extract` takes the last number. Both
are in the row's metrics; `task.extract` says which one is the score.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from pqcache.harness.tasks import arithmetic, gsm8k_cot_long, sources
from pqcache.harness.tasks import data_set as published
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of

MAX_NEW_TOKENS = 256  # lm-eval's default; the definition sets none
FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}


@dataclass(kw_only=True)
class Options:
    source: str = sources.HUB  # hub, constructed, or a folder with test.jsonl
    extract: Literal["strict", "flexible"] = "flexible"  # which reading of the answer is the score

    def __post_init__(self) -> None:
        published.check(self.source)


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    return "task=gsm8k_cot", 0


def read(options: Options, seed: int, limit: int | None) -> tuple[list[dict], dict[str, Any]]:
    if options.source == sources.CONSTRUCTED:
        count = limit if limit is not None else gsm8k_cot_long.DEFAULT_SAMPLES
        rows = [arithmetic.problem(Random(f"gsm8k/{seed}/test/{i}"), 2 + i % 5) for i in range(count)]
        return rows, published.constructed(rows, seed)
    rows, facts = gsm8k_cot_long.TEST.read(options.source, limit)
    return [{key: row[key] for key in gsm8k_cot_long.FIELDS} for row in rows], facts


def prepare(options: Options, *, limit: int | None) -> None:
    read(options, 0, limit)


def definition() -> dict[str, Any]:
    """lm-eval's own definition, over the documents of this package."""
    import lm_eval.tasks
    import yaml

    path = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k-cot.yaml"
    found = yaml.safe_load(path.read_text())
    for key in ("dataset_path", "dataset_name", "tag"):
        found.pop(key, None)
    return {**found, "custom_dataset": dataset}


def build(options: Options, request: TaskRequest) -> Built:
    rows, facts = read(options, request.seed, request.limit)
    spec = TaskSpec(
        name="gsm8k_cot",
        lm_eval_tasks=[definition()],
        metric={"gsm8k_cot": f"exact_match,{FILTERS[options.extract]}"},
        scale=100.0,
        max_new_tokens=MAX_NEW_TOKENS,
        value=lambda value: 100.0 * float(value),
        data=facts,
    )
    return spec, {"gsm8k_cot": rows}


def dataset(docs: Docs, **_: Any) -> dict:
    return dataset_of(docs, "gsm8k_cot")
