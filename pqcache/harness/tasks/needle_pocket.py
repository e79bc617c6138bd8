"""`needle_pocket`: several needles with near-duplicate distractors, restated in free generation.

Score: 100 x the share of value words restated at their place. The documents come from the embedded model's generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pqcache.embedded import needle_pocket as pocket
from pqcache.harness.tasks.base import Built, Docs, TaskRequest, TaskSpec, dataset_of, require

MAX_NEW_TOKENS = 48
DEFAULT_SAMPLES = 50  # where no limit is given: the documents are generated, there is no end to them


@dataclass(kw_only=True)
class Options:
    length: int = 2048  # prompt tokens at most, chat wrapping included

    def __post_init__(self) -> None:
        require(self.length >= 96, "length", self.length, "must be at least 96 tokens")


def longest(options: Options, *, limit: int | None, model_name: str) -> tuple[str, int]:
    return f"task.length={options.length}", options.length


def build(options: Options, request: TaskRequest) -> Built:
    samples = request.samples(DEFAULT_SAMPLES)
    docs = pocket.make_samples(samples, options.length, request.seed, request.tokenizer, request.count_tokens)
    spec = TaskSpec(
        name="needle_pocket",
        lm_eval_tasks=["needle_pocket"],
        metric={"needle_pocket": "score"},
        scale=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    return spec, {"needle_pocket": docs}


def dataset(docs: Docs, **_: Any) -> dict:
    return dataset_of(docs, "needle_pocket")


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    return {"score": pocket.score(results[0], list(doc["values"]))}
